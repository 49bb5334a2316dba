"""Classification of a reply, independent of where the pushes are cut."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest

from engine_core.events import TokenKind
from engine_core.family import ReasoningMarkers
from engine_core.text.reasoning import split_reply
from engine_core.text.stream import Piece, StreamClassifier

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TEXT, REASONING, CALL = TokenKind.TEXT, TokenKind.REASONING, TokenKind.TOOL_CALL
THINK = ReasoningMarkers(open="<think>", close="</think>")
CHANNEL = ReasoningMarkers(open="<|channel>thought", close="<channel|>")
TOOLS = (("<tool_call>", "</tool_call>"),)


def run(pushes: Iterable[str], **options: Any) -> list[Piece]:
    classifier = StreamClassifier(**options)
    pieces = [piece for text in pushes for piece in classifier.push(text)]
    return pieces + classifier.finish()


def merged(pieces: Sequence[Piece]) -> list[tuple[TokenKind, str]]:
    """What a caller sees: neighbours of one kind joined, a call's opener kept apart."""
    result: list[tuple[TokenKind, str]] = []
    for piece in pieces:
        if piece.opens_call:
            result.append((CALL, ""))
        elif piece.text and result and result[-1][0] is piece.kind and result[-1][1]:
            result[-1] = (piece.kind, result[-1][1] + piece.text)
        elif piece.text:
            result.append((piece.kind, piece.text))
    return result


def check_every_cut(text: str, expected: list[tuple[TokenKind, str]], **options: Any) -> None:
    cuts = [[text], list(text)]
    cuts += [[text[:at], text[at:]] for at in range(len(text) + 1)]
    for pushes in cuts:
        pieces = run(pushes, **options)
        assert merged(pieces) == expected
        assert "".join(piece.wire for piece in pieces) == text


CASES: list[tuple[str, dict[str, Any], list[tuple[TokenKind, str]]]] = [
    ("Hello", {}, [(TEXT, "Hello")]),
    ("<think>a</think>b", {}, [(TEXT, "<think>a</think>b")]),
    ("<think>a</think>b", {"reasoning": THINK}, [(REASONING, "a"), (TEXT, "b")]),
    ("<think></think>b", {"reasoning": THINK}, [(TEXT, "b")]),
    ("<think>a</think>\n\nb ", {"reasoning": THINK}, [(REASONING, "a"), (TEXT, "\n\nb ")]),
    (" \n\t<think>\na</think>", {"reasoning": THINK}, [(REASONING, "\na")]),
    (" " * 64 + "<think>a", {"reasoning": THINK}, [(REASONING, "a")]),
    (" " * 65 + "<think>a", {"reasoning": THINK}, [(TEXT, " " * 65 + "<think>a")]),
    # The bound is in bytes: an ideographic space has three.
    ("\u3000" * 21 + "<think>a", {"reasoning": THINK}, [(REASONING, "a")]),
    ("\u3000" * 22 + "<think>a", {"reasoning": THINK}, [(TEXT, "\u3000" * 22 + "<think>a")]),
    ("x<think>a</think>", {"reasoning": THINK}, [(TEXT, "x<think>a</think>")]),
    (
        "<think>a</think>b<think>c</think>",
        {"reasoning": THINK},
        [(REASONING, "a"), (TEXT, "b<think>c</think>")],
    ),
    ("<think>a</thin", {"reasoning": THINK}, [(REASONING, "a</thin")]),
    ("  <thin", {"reasoning": THINK}, [(TEXT, "  <thin")]),
    ("   ", {"reasoning": THINK}, [(TEXT, "   ")]),
    ("a</think>b", {"reasoning": THINK, "open_reasoning": True}, [(REASONING, "a"), (TEXT, "b")]),
    (
        "<think>a</think>b",
        {"reasoning": THINK, "open_reasoning": True},
        [(REASONING, "<think>a"), (TEXT, "b")],
    ),
    ("a</think", {"reasoning": THINK, "open_reasoning": True}, [(REASONING, "a</think")]),
    ("</</think>b", {"reasoning": THINK, "open_reasoning": True}, [(REASONING, "</"), (TEXT, "b")]),
    (
        "<|channel>thought\na<channel|>b",
        {"reasoning": CHANNEL},
        [(REASONING, "\na"), (TEXT, "b")],
    ),
    ("<|channel>final\na", {"reasoning": CHANNEL}, [(TEXT, "<|channel>final\na")]),
    # Tool markers count only when tools were advertised.
    (
        "a<tool_call>{}</tool_call>",
        {"tool_markers": TOOLS},
        [(TEXT, "a<tool_call>{}</tool_call>")],
    ),
    (
        "a\n<tool_call>{}</tool_call> b",
        {"tool_markers": TOOLS, "armed": True},
        [(TEXT, "a\n"), (CALL, ""), (CALL, "{}"), (TEXT, " b")],
    ),
    (
        "<tool_call></tool_call><tool_call>x",
        {"tool_markers": TOOLS, "armed": True},
        [(CALL, ""), (CALL, ""), (CALL, "x")],
    ),
    (
        "<tool_call><think>x</think>",
        {"tool_markers": TOOLS, "armed": True, "reasoning": THINK},
        [(CALL, ""), (CALL, "<think>x</think>")],
    ),
    (
        "<think>a<tool_call>{}</tool_call></think><tool_call>{}</tool_call>",
        {"tool_markers": TOOLS, "armed": True, "reasoning": THINK},
        [(REASONING, "a<tool_call>{}</tool_call>"), (CALL, ""), (CALL, "{}")],
    ),
    (
        " <tool_call>{",
        {"tool_markers": TOOLS, "armed": True, "reasoning": THINK},
        [(TEXT, " "), (CALL, ""), (CALL, "{")],
    ),
    ("a<tool_cal", {"tool_markers": TOOLS, "armed": True}, [(TEXT, "a<tool_cal")]),
    ("a</tool_call>b", {"tool_markers": TOOLS, "armed": True}, [(TEXT, "a</tool_call>b")]),
    # A call that is the whole answer: decided by the first visible character.
    (' {"name": 1} x', {"armed": True}, [(CALL, ' {"name": 1} x')]),
    ("\n Hello {}", {"armed": True}, [(TEXT, "\n Hello {}")]),
    ("\n\n", {"armed": True}, [(TEXT, "\n\n")]),
    ('{"name": 1}', {}, [(TEXT, '{"name": 1}')]),
    (
        "<think>{</think>\n{}",
        {"armed": True, "reasoning": THINK},
        [(REASONING, "{"), (CALL, "\n{}")],
    ),
    # One opener is the beginning of another.
    (
        "<a>1</a><a>>2</b>",
        {"tool_markers": (("<a>", "</a>"), ("<a>>", "</b>")), "armed": True},
        [(CALL, ""), (CALL, "1"), (CALL, ""), (CALL, "2")],
    ),
    (
        "<a><",
        {"tool_markers": (("<a>", "</a>"), ("<a><b>", "</b>")), "armed": True},
        [(CALL, ""), (CALL, "<")],
    ),
]


@pytest.mark.parametrize(("text", "options", "expected"), CASES)
def test_classifier_every_split_point_gives_the_same(
    text: str, options: dict[str, Any], expected: list[tuple[TokenKind, str]]
) -> None:
    check_every_cut(text, expected, **options)


@pytest.mark.parametrize(
    ("pushes", "expected"),
    [
        (["Hello"], ["Hello"]),
        (["a <", "b"], ["a ", "<b"]),
        (["a<tool", "ing"], ["a", "<tooling"]),
        (["a<<", "x"], ["a<", "<x"]),
        (["<t", "<tool_", "x"], ["", "<t", "<tool_x"]),
    ],
)
def test_classifier_text_is_withheld_only_while_a_marker_needs_it(
    pushes: list[str], expected: list[str]
) -> None:
    classifier = StreamClassifier(reasoning=THINK, tool_markers=TOOLS, armed=True)
    given = ["".join(piece.text for piece in classifier.push(text)) for text in pushes]
    assert given == expected


def test_classifier_without_tools_withholds_nothing() -> None:
    classifier = StreamClassifier(tool_markers=TOOLS)
    assert [piece.text for piece in classifier.push("a <tool_call")] == ["a <tool_call"]


def test_classifier_reasoning_streams_up_to_a_possible_close() -> None:
    classifier = StreamClassifier(reasoning=THINK, open_reasoning=True)
    assert [piece.text for piece in classifier.push("so </thi")] == ["so "]
    assert classifier.in_reasoning
    assert merged(classifier.push("nk>b")) == [(TEXT, "b")]
    assert not classifier.in_reasoning


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ("</think>b", "b"),
        ("\n\n</think>b", "b"),
        (" " * 8 + "</think>b", "b"),
        (" " * 9 + "</think>b", " " * 9 + "</think>b"),
        ("</think></think>b", "</think>b"),
        ("</thin", "</thin"),
        ("\n", "\n"),
        ("\nb</think>", "\nb</think>"),
        ("b", "b"),
        ("", ""),
    ],
)
def test_classifier_forced_close_swallows_one_repetition(after: str, expected: str) -> None:
    for at in range(len(after) + 1):
        classifier = StreamClassifier(reasoning=THINK, open_reasoning=True)
        pieces = classifier.push("a") + classifier.push("</think>")
        classifier.expect_duplicate_close()
        for text in (after[:at], after[at:]):
            pieces += classifier.push(text)
        pieces += classifier.finish()
        assert "".join(piece.text for piece in pieces if piece.kind is TEXT) == expected
        assert "".join(piece.wire for piece in pieces) == "a</think>" + after
    parts = split_reply("a</think>" + after, THINK, open_reasoning=True, forced_close=True)
    assert parts.answer == expected


def test_classifier_duplicate_close_without_force_is_text() -> None:
    check_every_cut(
        "<think>a</think></think>b", [(REASONING, "a"), (TEXT, "</think>b")], reasoning=THINK
    )


def test_classifier_expectation_inside_reasoning_or_after_text_changes_nothing() -> None:
    classifier = StreamClassifier(reasoning=THINK, open_reasoning=True)
    classifier.expect_duplicate_close()
    pieces = classifier.push("a</think></think>") + classifier.finish()
    assert merged(pieces) == [(REASONING, "a"), (TEXT, "</think>")]


def test_classifier_forced_close_before_a_whole_reply_call_still_finds_it() -> None:
    classifier = StreamClassifier(reasoning=THINK, open_reasoning=True, armed=True)
    pieces = classifier.push("a</think>")
    classifier.expect_duplicate_close()
    pieces += classifier.push("</think>{}") + classifier.finish()
    assert merged(pieces) == [(REASONING, "a"), (CALL, "{}")]


FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<", "</t", ">", "think", " ", "\n",
    "a", "日", "{", "<tool", " " * 63, "call>",
]  # fmt: skip


def reference(
    text: str, tools: Sequence[tuple[str, str]], options: dict[str, Any]
) -> list[tuple[TokenKind, str]]:
    """Classify a whole reply with plain searches."""
    parts = split_reply(text, options["reasoning"], open_reasoning=options["open_reasoning"])
    result = [] if parts.reasoning is None else [(REASONING, parts.reasoning)]
    rest = parts.answer
    for opener, close in itertools.repeat(tools[0]) if tools else ():
        before, found, rest = rest.partition(opener)
        if before:
            result.append((TEXT, before))
        if not found:
            return result
        result.append((CALL, ""))
        payload, _, rest = rest.partition(close)
        if payload:
            result.append((CALL, payload))
    return [*result, (TEXT, rest)] if rest else result


def test_classifier_random_replies_equal_the_terminal_split_for_any_cut() -> None:
    rng = random.Random(11)
    for _ in range(4000):
        text = "".join(rng.choices(FRAGMENTS, k=rng.randrange(10)))
        armed = rng.random() < 0.5
        options = {
            "reasoning": rng.choice([THINK, None]),
            "open_reasoning": rng.random() < 0.3,
        }
        if options["reasoning"] is None:
            options["open_reasoning"] = False
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))
        pushes = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        pieces = run(pushes, tool_markers=TOOLS, armed=armed, **options)
        expected = reference(text, TOOLS if armed else (), options)
        assert merged(pieces) == expected
        assert "".join(piece.wire for piece in pieces) == text


@pytest.mark.parametrize(
    ("text", "markers", "opened", "expected"),
    [
        ("<think>a</think>b", None, False, (None, "<think>a</think>b")),
        ("<think></think>b", THINK, False, (None, "b")),
        ("<think>a", THINK, False, ("a", "")),
        ("a</think>  b", THINK, True, ("a", "  b")),
        ("", THINK, True, (None, "")),
        ("plain", THINK, False, (None, "plain")),
    ],
)
def test_split_reply_each_shape_is_read(
    text: str,
    markers: ReasoningMarkers | None,
    opened: bool,
    expected: tuple[str | None, str],
) -> None:
    parts = split_reply(text, markers, open_reasoning=opened)
    assert (parts.reasoning, parts.answer) == expected
