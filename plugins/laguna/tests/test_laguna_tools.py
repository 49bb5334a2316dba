"""The tool syntax: grammar first, values verbatim, prose never a call."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

from engine_core.limits import LIMITS
from engine_laguna.tools import LAGUNA_SYNTAX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

TAG = re.compile(r"(</?(?:tool_call|arg_key|arg_value)>)")


def call(name: str, *pairs: tuple[str, str], newline: str = "") -> str:
    """Write a call as the templates do, with or without newlines between tags."""
    inner = "".join(
        f"<arg_key>{key}</arg_key>{newline}<arg_value>{value}</arg_value>{newline}"
        for key, value in pairs
    )
    return f"<tool_call>{name}{newline}{inner}</tool_call>"


def read(text: str) -> list[tuple[str, tuple[Mapping[str, str], ...]]]:
    return [(one.name, one.readings) for one in LAGUNA_SYNTAX.parse(text, ())]


@pytest.mark.parametrize("newline", ["", "\n"])
def test_call_of_both_revisions_is_read(newline: str) -> None:
    text = call("get_weather", ("city", "Oslo"), ("days", "3"), newline=newline)
    (proposal,) = LAGUNA_SYNTAX.parse(f"Well.\n{text}\n", ())
    assert proposal.name == "get_weather"
    assert proposal.readings == ({"city": "Oslo", "days": "3"},)
    assert f"Well.\n{text}\n"[slice(*proposal.span)] == text


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        "\n",
        "    indented",
        "a final newline\n",
        "\n\nx\n\n",
        "123",
        "null",
        '{"a": [1, true]}',
        "<b>bold</b> &amp; </think>",
        "a < b > c",
        "日本 📚",
    ],
)
def test_value_keeps_every_character(value: str) -> None:
    assert read(call("f", ("a", value), newline="\n")) == [("f", ({"a": value},))]


def test_call_without_arguments_is_read() -> None:
    assert read("<tool_call>now</tool_call>") == [("now", ({},))]
    assert read("<tool_call>now\n</tool_call>") == [("now", ({},))]


def test_several_calls_keep_their_order_and_spans() -> None:
    first, second = call("f", ("a", "1")), call("g", ("b", "2"), newline="\n")
    text = f"one {first} two\n{second} three"
    proposals = LAGUNA_SYNTAX.parse(text, ())
    assert [text[slice(*one.span)] for one in proposals] == [first, second]


@pytest.mark.parametrize(
    "text",
    [
        "just prose",
        "<tool_call>",
        "<tool_call>just prose</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>\n</tool_call>",
        "<tool_call>f",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>",
        "<tool_call>f<arg_key>a</arg_key></tool_call>",
        "<tool_call>f<arg_key>a</arg_key>x<arg_value>1</arg_value></tool_call>",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>junk</tool_call>",
        "<tool_call>f junk<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
        "<tool_call>f<arg_value>1</arg_value></tool_call>",
        "<tool_call>f<arg_key></arg_key><arg_value>1</arg_value></tool_call>",
        "<tool_call>f<arg_key>a\n</arg_key><arg_value>1</arg_value></tool_call>",
        "<tool_call>f<arg_key>a[0]</arg_key><arg_value>1</arg_value></tool_call>",
        "<tool_call>f<arg_key>\ud800</arg_key><arg_value>1</arg_value></tool_call>",
        f"<tool_call>f<arg_key>{'é' * 65}</arg_key><arg_value>1</arg_value></tool_call>",
        f"<tool_call>{'f' * 65}</tool_call>",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        "f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
    ],
)
def test_anything_but_the_grammar_is_no_call(text: str) -> None:
    assert read(text) == []


def test_repeated_key_is_refused_and_not_read_as_text_of_the_first_value() -> None:
    assert read(call("f", ("a", "1"), ("a", "2"))) == []
    assert read(call("f", ("a", "1"), ("a", "2")) + call("g")) == [("g", ({},))]


@pytest.mark.parametrize(
    "value",
    [
        "x </arg_value> y",
        "<arg_key>k</arg_key>",
        "<arg_value>",
        "say <tool_call>f</tool_call> to call",
        "</tool_call>",
        "</arg_value>x</arg_value>",
    ],
)
def test_tags_inside_a_value_are_text_where_nothing_else_fits(value: str) -> None:
    text = call("f", ("a", value), ("b", "2"), newline="\n")
    assert read(text) == [("f", ({"a": value, "b": "2"},))]


def test_structure_wins_over_text() -> None:
    """A value that spells the next pair is the next pair: fewer tags are text."""
    value = "1</arg_value><arg_key>b</arg_key><arg_value>2"
    assert read(call("f", ("a", value))) == [("f", ({"a": "1", "b": "2"},))]


def test_call_after_an_unfinished_one_is_read() -> None:
    text = "<tool_call>oops " + call("f", ("a", "1"))
    assert read(text) == [("f", ({"a": "1"},))]


def test_text_of_a_refused_or_unfinished_call_is_no_call() -> None:
    inner = call("g")
    assert read(call("f", ("a", inner), ("a", "2"))) == []
    assert read("<tool_call>f<arg_key>a</arg_key><arg_value>" + inner) == []


def test_calls_beyond_the_bound_stay_text() -> None:
    assert len(read(call("f") * (LIMITS.reply_calls + 3))) == LIMITS.reply_calls


def test_many_openers_end_in_bounded_work() -> None:
    assert read("<tool_call>f<arg_key>a</arg_key><arg_value>" * 3000) == []
    assert read("<tool_call>f<arg_key>a</arg_key><arg_value>" + "</arg_value> " * 50_000) == []


# ------------------------------------------------------------------ against a brute force

Pairs = tuple[tuple[str, str], ...]


def brute_readings(parts: list[str]) -> Iterator[tuple[int, int, str, Pairs]]:
    """Every reading of ``<tool_call>`` + parts: ``(end, tags taken as text, name, pairs)``.

    Parts alternate between text and tags. Each value may end at any later closing tag.
    """

    def pairs_from(at: int) -> Iterator[tuple[int, int, Pairs]]:
        """Readings that continue with the tag at ``at``."""
        if at >= len(parts):
            return
        if parts[at] == "</tool_call>":
            yield at, 0, ()
            return
        shape = [parts[at], *parts[at + 2 : at + 6 : 2]]
        if shape[:3] != ["<arg_key>", "</arg_key>", "<arg_value>"] or parts[at + 3].strip():
            return
        key, begin = parts[at + 1], at + 5
        for close in range(begin + 1, len(parts), 2):
            if parts[close] != "</arg_value>" or close + 1 >= len(parts):
                continue
            if parts[close + 1].strip():
                continue
            value = "".join(parts[begin:close])
            for end, inside, rest in pairs_from(close + 2):
                yield end, inside + (close - begin - 1) // 2, ((key, value), *rest)

    name = parts[0].strip()
    if re.fullmatch(r"[a-z]+", name):
        for end, inside, pairs in pairs_from(1):
            yield end, inside, name, pairs


def brute_first(text: str) -> list[tuple[str, list[Pairs]]]:
    """Fewest tags as text, over all ends."""
    body = TAG.split(text)[2:]
    found = list(brute_readings(body))
    if not found:
        return []
    fewest = min(inside for _, inside, _, _ in found)
    best = [(name, pairs) for _, inside, name, pairs in found if inside == fewest]
    usable = [pairs for _, pairs in best if len(dict(pairs)) == len(pairs)]
    return [(best[0][0], usable)] if usable else []


def test_readings_equal_those_of_a_brute_force() -> None:
    generator = np.random.Generator(np.random.PCG64(5))
    tags = ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"]
    texts = ["", "\n", "k", "v"]
    pair = ["k", "<arg_key>", "K", "</arg_key>", "", "<arg_value>", "V", "</arg_value>", ""]
    seen = 0
    for _ in range(4000):
        pieces = ["f", "<arg_key>", "a", "</arg_key>", "", "<arg_value>"]
        for _ in range(int(generator.integers(1, 9))):
            if generator.random() < 0.3:
                pieces += [*pair[1:2], str(generator.choice(["a", "b", "c"])), *pair[3:]]
            pieces += [str(generator.choice(texts)), str(generator.choice(tags))]
        text = "<tool_call>" + "".join(pieces) + "</arg_value></tool_call>"
        found = LAGUNA_SYNTAX.parse(text, ())[:1]
        ours = [(one.name, [tuple(reading.items()) for reading in one.readings]) for one in found]
        expected = brute_first(text)
        keys = [key for _, readings in expected for one in readings for key, _ in one]
        if not all(map(str.isalpha, keys)):
            continue
        assert ours == expected, text
        seen += bool(expected)
    assert seen > 1000


def test_parse_never_raises_on_random_text() -> None:
    generator = np.random.Generator(np.random.PCG64(9))
    pieces = ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "f", "\n",
              "</arg_value>", "\ud800", "<", ">", "{}"]  # fmt: skip
    for _ in range(2000):
        text = "".join(generator.choice(pieces, int(generator.integers(0, 20))))
        for one in LAGUNA_SYNTAX.parse(text, ()):
            assert text[slice(*one.span)].startswith("<tool_call>" + one.name) or "\n" in text
            assert text[slice(*one.span)].endswith("</tool_call>")
            assert one.readings
