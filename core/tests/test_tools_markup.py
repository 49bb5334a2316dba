"""Where calls are looked for in a reply, and what names an argument."""

from __future__ import annotations

import pytest

from engine_core.family import Proposal
from engine_core.limits import LIMITS
from engine_core.tools.markup import find_calls, is_argument_key, text_arguments

OPEN, CLOSE = "<call>", "</call>"


def read(text: str, start: int) -> tuple[int, Proposal | None]:
    """A name between markers; without an end, the rest of the text is read."""
    close = text.find(CLOSE, start)
    if close < 0:
        return len(text), None
    name, end = text[start + len(OPEN) : close], close + len(CLOSE)
    return end, Proposal(span=(start, end), name=name, readings=({},)) if name.isalpha() else None


def names(text: str) -> list[str]:
    return [proposal.name for proposal in find_calls(text, OPEN, read)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("prose", []),
        ("a <call>one</call> b<call>two</call>", ["one", "two"]),
        ("<call>1<call>inner</call><call>after</call>", ["after"]),
        ("<call>one</call><call>open", ["one"]),
    ],
)
def test_calls_are_read_one_after_the_other(text: str, expected: list[str]) -> None:
    assert names(text) == expected


def test_calls_openers_and_bytes_are_bounded() -> None:
    call = "<call>a</call>"
    assert len(names(call * 100)) == 64
    assert names("<call>1</call>" * 255 + call) == ["a"]
    assert names("<call>1</call>" * 256 + call) == []
    far = "<call>" + "1" * LIMITS.arguments_total_bytes + CLOSE
    assert names(far + call) == []


@pytest.mark.parametrize("key", ["a", "a b", "naïve", "k" * 128])
def test_key_may_name_an_argument(key: str) -> None:
    assert is_argument_key(key)


@pytest.mark.parametrize("key", ["", "a<b", "{", "a\n", "\x7f", "\ud800", "k" * 129, "é" * 65])
def test_key_is_markup_or_too_long(key: str) -> None:
    assert not is_argument_key(key)


def test_arguments_of_bare_texts() -> None:
    assert text_arguments([]) == {}
    assert text_arguments([("a", "1"), ("b", " 2\n")]) == {"a": "1", "b": " 2\n"}
    assert text_arguments([("a", "1"), ("a", "1")]) is None
    assert text_arguments([("a", "1"), ("<b>", "2")]) is None
    many = [(f"k{index}", "") for index in range(257)]
    assert text_arguments(many) is None
    assert len(text_arguments(many[:256]) or ()) == 256
