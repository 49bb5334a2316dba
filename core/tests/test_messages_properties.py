"""Whatever a caller passes, reading ends in checked records or in one typed error."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.errors import InvalidRequest
from engine_core.message_parsing import parse_messages
from engine_core.request import GenerateOptions
from engine_core.tool_parsing import parse_tools
from engine_core.values import freeze_json, thaw_json

WORDS = st.sampled_from(
    [
        "user",
        "assistant",
        "tool",
        "system",
        "text",
        "image",
        "image_url",
        "function",
        "a",
        "b",
        "http://x",
        "data:image/a;base64,QQ==",
    ]
)
KEYS = st.sampled_from(
    [
        "role",
        "content",
        "type",
        "text",
        "tool_calls",
        "tool_call_id",
        "function",
        "name",
        "id",
        "arguments",
        "image_url",
        "url",
        "data",
        "path",
        "source_lang",
        "target_lang",
        "reasoning",
        "description",
        "parameters",
        "strict",
        "extra",
    ]
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | WORDS, inner, max_size=5),
    max_leaves=20,
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
    max_leaves=30,
)


LISTS = st.lists(st.dictionaries(KEYS, VALUES, max_size=6), max_size=4) | VALUES
OPTIONS = st.sampled_from(sorted(set(GenerateOptions.__annotations__) - {"tools"}))


def attempt(read, raw):
    """Give what was read and no error, or the typed error; any other error fails the test."""
    try:
        return read(raw), None
    except InvalidRequest as error:
        return None, error


@settings(deadline=None, max_examples=150)
@given(LISTS)
def test_any_messages_are_read_or_refused(raw):
    turns, error = attempt(parse_messages, raw)
    if error is None:
        assert parse_messages(turns) == turns
    else:
        assert error.code.startswith("request.messages.")
        assert str(error).startswith("messages")


@settings(deadline=None, max_examples=150)
@given(LISTS)
def test_any_tools_are_read_or_refused(raw):
    tools, error = attempt(parse_tools, raw)
    if error is None:
        assert parse_tools(tools) == tools
    else:
        assert error.code.startswith("request.tools")


@settings(deadline=None, max_examples=150)
@given(st.dictionaries(OPTIONS, VALUES, max_size=3))
def test_any_options_are_read_or_refused(raw):
    options, error = attempt(lambda given: GenerateOptions.parse(**given), raw)
    if error is None:
        assert GenerateOptions.parse(**{name: getattr(options, name) for name in raw}) == options
    else:
        # A small context is in contradiction with the default of max_tokens.
        assert error.code.removeprefix("request.") in {*raw, "max_tokens"}


@settings(deadline=None, max_examples=150)
@given(JSON)
def test_frozen_value_equals_its_source_and_prints_the_same(value):
    frozen, size = freeze_json(
        value, "value", max_bytes=1 << 20, max_depth=64, max_digits=1000, code="request.value"
    )
    assert frozen == value
    assert json.dumps(frozen) == json.dumps(value) == json.dumps(thaw_json(frozen))
    assert size <= 2 * len(json.dumps(value, ensure_ascii=False).encode()) + 4


@pytest.mark.parametrize("digits", [1, 2, 19, 1000])
def test_frozen_integer_has_at_most_so_many_digits(digits):
    def freeze(value):
        return freeze_json(
            value, "value", max_bytes=4096, max_depth=1, max_digits=digits, code="request.value"
        )[0]

    largest = int("9" * digits)
    for value in (largest, -largest, largest // 2, 0):
        assert freeze(value) == value
    for value in (largest + 1, -largest - 1, 2 * largest, largest**2 + 9):
        with pytest.raises(InvalidRequest, match=f"at most {digits} digits"):
            freeze(value)
