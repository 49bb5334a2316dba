"""The prefix tree against a plain list of stored prefixes."""

from __future__ import annotations

import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.cache.pool_tree import BLOCK, PrefixTree

WORDS = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple)
STEPS = st.lists(st.tuples(st.sampled_from(["put", "put", "drop"]), WORDS, st.integers(0, 9)))


def shared(one, other):
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return min(len(one), len(other))


def spelled(node):
    symbols = ()
    while node is not None:
        symbols = (*node.edge, *symbols)
        node = node.parent
    return symbols


def check_shape(tree):
    """No node without need, and what nodes say of their subtrees is so."""
    pending = [tree._root]
    while pending:
        node = pending.pop()
        if node.parent is not None:
            assert node.edge
            assert node.depth == node.parent.depth + len(node.edge)
            assert node.parent.children[node.edge[0]] is node
            assert node.entry is not None or len(node.children) > 1
        below = [child.reach for child in node.children.values()]
        assert node.reach == min([node.earliest, *below])
        pending += node.children.values()


def build(steps):
    tree, stored = PrefixTree(), {}
    for action, word, earliest in steps:
        if action == "put":
            node = tree.place(word)
            stored[word] = min(earliest, len(word))
            tree.store(node, word, stored[word])
        elif stored:
            gone = sorted(stored)[earliest % len(stored)]
            del stored[gone]
            tree.remove(tree.place(gone))
        check_shape(tree)
    return tree, stored


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(steps=STEPS, prompt=WORDS)
def test_tree_any_history_finds_what_a_list_finds(steps, prompt):
    tree, stored = build(steps)
    assert {spelled(node): node.entry for node in tree.nodes()} == {w: w for w in stored}
    assert tree.is_empty == (not stored)
    matches = tree.matches(prompt)
    assert [count for count, _ in matches] == sorted((c for c, _ in matches), reverse=True)
    lengths = [shared(word, prompt) for word, earliest in stored.items()]
    assert matches[0][0] == max(lengths, default=0)
    best = max(
        (s for word, earliest in stored.items() if (s := shared(word, prompt)) >= earliest),
        default=-1,
    )
    found = next(((count, node) for count, node in matches if node.reach <= count), None)
    assert (found is None) == (best < 0)
    if found is not None:
        count, node = found
        assert count == best
        picked = tree.pick(node, count)
        assert picked.entry in stored
        assert stored[picked.entry] <= count <= shared(picked.entry, prompt)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(steps=STEPS, word=WORDS)
def test_tree_place_then_remove_leaves_the_tree_as_it_was(steps, word):
    tree, stored = build(steps)
    if word in stored:
        return
    tree.remove(tree.place(word))
    check_shape(tree)
    assert {spelled(node) for node in tree.nodes()} == set(stored)


class Symbol:
    """A token that counts how often it is compared."""

    compared = 0

    def __init__(self, value):
        self.value = value

    def __hash__(self):
        return hash(self.value)

    def __eq__(self, other):
        Symbol.compared += 1
        return self.value == getattr(other, "value", other)


def test_tree_lookup_at_100_000_tokens_compares_each_token_about_once():
    rng = random.Random(4)
    length = 100_000
    base = [rng.randrange(50) for _ in range(length)]
    tree = PrefixTree()
    for number in range(200):
        at = rng.randrange(1, length)
        word = [*base[:at], 99 + number, *base[at + 1 :]] if number % 2 else base[:at]
        tree.store(tree.place(tuple(word)), number, len(word))
    tree.store(tree.place(tuple(base)), "whole", 0)
    prompt = tuple(Symbol(value) for value in [*base, 7])
    Symbol.compared = 0
    matches = tree.matches(prompt)
    assert matches[0][0] == length
    # A child is found by the hash of its first symbol, which may compare more than once.
    assert Symbol.compared <= length + 1000
    assert len(matches) <= 300


def test_tree_runs_that_part_at_any_place_of_a_block_are_told_apart():
    for size in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK):
        for at in {0, 1, size // 2, size - 1} & set(range(size)):
            tree = PrefixTree()
            word = tuple(range(size))
            tree.store(tree.place(word), "word", 0)
            other = (*word[:at], -1, *word[at + 1 :])
            assert tree.matches(other)[0][0] == at
            tree.store(tree.place(other), "other", 0)
            assert {node.entry for node in tree.nodes()} == {"word", "other"}
            check_shape(tree)


def test_tree_empty_serves_nothing():
    tree = PrefixTree()
    [(count, root)] = tree.matches((1, 2))
    assert (count, root.reach) == (0, math.inf)
