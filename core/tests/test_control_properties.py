"""Where content is marked and where a prompt is split, against searches written from the rules."""

from __future__ import annotations

import time

import attrs
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine_core.messages import Message, TextPart, ToolCall, ToolDecl
from engine_core.text.control import ControlShield, ControlTokens, iter_texts
from engine_core.text.tokenizer import AddedToken

# Few characters, so that tokens share beginnings and content comes close to them.
CHARACTERS = st.text("<|>ab日", max_size=6)
TOKENS = st.lists(CHARACTERS.filter(bool), max_size=8, unique=True)


@st.composite
def tokens_and_content(draw):
    """Tokens, and content put together from them, from their parts and from other characters."""
    texts = draw(TOKENS)
    pieces = {"", *(part for text in texts for part in (text, text[1:], text[:-1], text[1:-1]))}
    content = draw(st.lists(st.sampled_from(sorted(pieces)) | CHARACTERS, max_size=6))
    return texts, "".join(content)


def controls_of(texts):
    return ControlTokens(AddedToken(id=at, text=text) for at, text in enumerate(texts))


@settings(deadline=None, max_examples=500)
@given(tokens_and_content())
@example((["<a>", "a"], "<a><a"))
@example((["ab", "abab"], "babab"))
def test_breaks_are_in_tokens_at_single_characters_and_at_edges_that_are_parts(drawn):
    texts, content = drawn
    long = [text for text in texts if len(text) > 1]
    single = {at + 1 for at in range(len(content)) for text in long if content.startswith(text, at)}
    for text in long:
        for cut in range(1, len(text)):
            if content.startswith(text[cut:]):
                single.add(0)
            if content.endswith(text[:cut]):
                single.add(len(content))
    double = {at for at, character in enumerate(content) if character in texts}
    assert controls_of(texts).breaks(content) == (single, double)


@settings(deadline=None, max_examples=500)
@given(tokens_and_content())
@example((["<unused1>", "<unused12>", "<u", "<"], "<unused12><unused1><un<"))
def test_split_takes_the_longest_token_at_the_first_place_that_has_one(drawn):
    texts, content = drawn
    expected, run, at = [], "", 0
    while at < len(content):
        here = max((text for text in texts if content.startswith(text, at)), key=len, default="")
        if here:
            expected += [run, texts.index(here)]
            run, at = "", at + len(here)
        else:
            run, at = run + content[at], at + 1
    controls = controls_of(texts)
    assert controls.split(content, ControlShield.avoiding(controls, [content])) == [*expected, run]


@settings(deadline=None, max_examples=300)
@given(TOKENS, st.data())
def test_shielded_contents_that_touch_give_no_token(texts, data):
    pieces = {"", *(text[start:stop] for text in texts for start in range(3) for stop in range(7))}
    contents = data.draw(st.lists(st.sampled_from(sorted(pieces)) | CHARACTERS, max_size=5))
    controls = controls_of(texts)
    shield = ControlShield.avoiding(controls, contents)
    written = "".join(map(shield, contents))
    assert [part for part in controls.split(written, shield) if isinstance(part, int)] == []
    assert shield.remove(written) == "".join(contents)


RECORDS = st.recursive(
    CHARACTERS | st.none() | st.integers() | st.builds(TextPart, CHARACTERS),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(CHARACTERS, inner, max_size=3)
        | st.builds(TextPart, inner)
    ),
    max_leaves=12,
)


def texts_in(value):
    """Every text in a value, found by its structure."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for one in pair for text in texts_in(one)]
    if isinstance(value, (list, tuple)):
        return [text for one in value for text in texts_in(one)]
    return texts_in(attrs.astuple(value, recurse=False)) if attrs.has(type(value)) else []


@settings(deadline=None, max_examples=200)
@given(RECORDS)
def test_iter_texts_finds_each_text_once(value):
    assert sorted(iter_texts(value)) == sorted(texts_in(value))


def test_iter_texts_finds_every_field_of_the_records_of_a_conversation():
    call = ToolCall(id="i", name="n", arguments={"k": ["v"]})
    message = Message(role="assistant", content="c", reasoning="r", tool_calls=(call,))
    tool = ToolDecl(name="t", description="d", parameters={"p": {}})
    found = sorted(iter_texts([message, tool]))
    assert found == sorted(["assistant", "c", "r", "i", "n", "k", "v", "t", "d", "p"])


def test_searches_do_not_try_every_token_where_one_could_begin():
    controls = controls_of([*(f"<unused{number}>" for number in range(6000)), "<end>", "</s>"])
    content = "<p>text</p>" * 50_000
    shield = ControlShield.avoiding(controls, [content])
    start = time.process_time()
    assert shield(content) == content
    assert controls.split(content, shield) == [content]
    # Six thousand comparisons at each of the hundred thousand places take longer than that.
    assert time.process_time() - start < 1.5
