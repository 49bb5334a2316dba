"""A reply from token ids to delivered pieces."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from engine_core.events import TokenKind
from engine_core.family import ReasoningMarkers
from engine_core.testing.tokenizers import BUILDERS, byte_level_tokenizer_json
from engine_core.text.reasoning import split_reply
from engine_core.text.reply import ReplyDecoder
from engine_core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine_core.text.stream import Piece

TEXT, REASONING, CALL = TokenKind.TEXT, TokenKind.REASONING, TokenKind.TOOL_CALL
THINK = ReasoningMarkers(open="<think>", close="</think>")
TOOLS = (("<tool_call>", "</tool_call>"),)
TOKENIZER = Tokenizer.from_bytes(byte_level_tokenizer_json())
# Here the markers themselves are special: decoding alone would hide them.
HIDING = Tokenizer.from_bytes(
    byte_level_tokenizer_json(("<think>", "</think>", "<tool_call>", "</tool_call>", "<e>"), ())
)


def run(
    text: str, tokenizer: Tokenizer = TOKENIZER, **options: Any
) -> tuple[ReplyDecoder, list[Piece]]:
    decoder = ReplyDecoder(tokenizer, **options)
    pieces = [piece for one in tokenizer.encode(text) for piece in decoder.push(one)]
    return decoder, pieces + decoder.finish()


def text_of(pieces: list[Piece], kind: TokenKind) -> str:
    return "".join(piece.text for piece in pieces if piece.kind is kind)


def test_reply_parts_are_told_apart_even_when_markers_are_special() -> None:
    text = "<think>the</think>\nhello <tool_call>{1}</tool_call> world"
    for tokenizer in (TOKENIZER, HIDING):
        decoder, pieces = run(text, tokenizer, reasoning=THINK, tool_markers=TOOLS, armed=True)
        assert decoder.reasoning == text_of(pieces, REASONING) == "the"
        assert decoder.answer == "\nhello <tool_call>{1}</tool_call> world"
        assert decoder.delivered == text_of(pieces, TEXT) == "\nhello "
        assert text_of(pieces, CALL) == "{1}"
        assert next(piece.opens_call for piece in pieces if piece.kind is CALL)
        assert decoder.called


def test_reply_special_tokens_that_are_no_marker_stay_hidden() -> None:
    decoder, _ = run("hello<e><tool_call>", HIDING, reasoning=THINK)
    assert decoder.answer == "hello"


def test_reply_stop_string_ends_the_answer_and_the_stream() -> None:
    decoder, pieces = run("hello the world end", stops=["the w"])
    assert decoder.stopped
    assert decoder.answer == text_of(pieces, TEXT) == "hello "
    assert decoder.push(0) == []
    assert decoder.finish() == []


def test_reply_stop_string_in_reasoning_or_call_does_not_count() -> None:
    decoder, pieces = run(
        "<think>world</think>a<tool_call>world</tool_call>b",
        reasoning=THINK,
        tool_markers=TOOLS,
        armed=True,
        stops=["world"],
    )
    assert not decoder.stopped
    assert decoder.answer == "a<tool_call>world</tool_call>b"
    assert text_of(pieces, CALL) == "world"


def test_reply_stop_string_does_not_match_across_a_call() -> None:
    options: dict[str, Any] = {"tool_markers": TOOLS, "armed": True, "stops": ["END"]}
    decoder, _ = run("E<tool_call>x</tool_call>ND", **options)
    assert not decoder.stopped
    decoder, _ = run("a<tool_call>x</tool_call>b END c", **options)
    assert decoder.stopped
    assert decoder.answer == "a<tool_call>x</tool_call>b "


def test_reply_waiting_stop_match_before_a_call_drops_the_call() -> None:
    # The shorter stop string waits for the longer one, which the call's opener rules out.
    decoder, pieces = run(
        "abc<tool_call>x</tool_call>", tool_markers=TOOLS, armed=True, stops=["bc", "abcd"]
    )
    assert decoder.stopped
    assert decoder.answer == "a"
    assert not decoder.called
    assert text_of(pieces, CALL) == ""


def test_reply_forced_close_swallows_a_repetition() -> None:
    decoder = ReplyDecoder(TOKENIZER, reasoning=THINK, open_reasoning=True)
    for one in TOKENIZER.encode("hello</think>"):
        decoder.push(one)
    assert not decoder.in_reasoning
    decoder.expect_duplicate_close()
    for one in TOKENIZER.encode("</think>world"):
        decoder.push(one)
    decoder.finish()
    assert (decoder.reasoning, decoder.answer) == ("hello", "world")


def test_reply_random_ids_equal_the_terminal_split() -> None:
    rng = random.Random(2)
    for kind, build in BUILDERS.items():
        tokenizer = Tokenizer.from_bytes(build())
        added = [token.id for token in tokenizer.added_tokens]
        keep = tokenizer.marker_ids([THINK.open, THINK.close])
        for _ in range(150):
            ids = [
                rng.choice(added) if rng.random() < 0.3 else rng.randrange(tokenizer.vocab_size)
                for _ in range(rng.randrange(30))
            ]
            opened = rng.random() < 0.5
            decoder = ReplyDecoder(tokenizer, reasoning=THINK, open_reasoning=opened)
            pieces = [piece for one in ids for piece in decoder.push(one)] + decoder.finish()
            parts = split_reply(tokenizer.decode(ids, keep=keep), THINK, open_reasoning=opened)
            assert (decoder.reasoning, decoder.answer) == (parts.reasoning, parts.answer), kind
            assert text_of(pieces, TEXT) == parts.answer
