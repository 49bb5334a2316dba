"""Streaming forms of the decoders that language models' tokenizers use.

Each stage takes pieces one at a time and gives out what no later piece can change. Run over a
whole reply, the stages give exactly what the library's decoder gives for all tokens at once; the
library's own stream decoder cannot promise that (it fails on a byte token that extends a finished
run, has no flush, and rereads its window for as long as the bytes are invalid).
"""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs

from engine_core.errors import TokenizerError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BYTES_BY_CHARACTER", "DecoderPlan", "Stage"]

_REPLACEMENT = "\ufffd"
# What the library reads as a byte token: six characters around an eight-bit hexadecimal number.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")


class Stage(Protocol):
    """One step of decoding, with the state of one reply."""

    def feed(self, piece: str) -> list[str]:
        """Take a piece.

        Args:
            piece: Output of the stage before; at first the text of a token.

        Returns:
            Pieces that are final.
        """
        ...

    def end(self) -> list[str]:
        """Take the end of the reply.

        Returns:
            The pieces withheld so far.
        """
        ...


@attrs.frozen
class DecoderPlan:
    """How a tokenizer turns token texts into text.

    Attributes:
        factories: One maker a stage, ``None`` when the decoder has no streaming form here.
    """

    factories: tuple[Callable[[], Stage], ...] | None

    @classmethod
    def compile(cls, decoder: Any) -> DecoderPlan:
        """Read a decoder.

        Args:
            decoder: The ``decoder`` entry of ``tokenizer.json``, ``None`` when there is none.

        Returns:
            The plan.

        Raises:
            TokenizerError: The library's own decoder would fail on some tokens.
        """
        if decoder is None:
            return cls((_Spaced,))
        factories: list[Callable[[], Stage]] = []
        fused = False
        for step in _steps(decoder):
            if step.get("type") == "Strip" and step.get("stop"):
                raise TokenizerError(
                    "tokenizer.json: decoder must not strip the ends of tokens, "
                    f"got stop {step['stop']!r}",
                    code="tokenizer.decoder",
                    hint="the library fails on tokens shorter than that",
                )
            factory = _fused_stage(step) if fused else _token_stage(step)
            if factory is None:
                return cls(None)
            factories.append(factory)
            fused = fused or step.get("type") in ("Fuse", "ByteLevel")
        return cls(tuple(factories))

    def start(self) -> tuple[Stage, ...] | None:
        """Make the stages of one reply.

        Returns:
            Fresh stages, ``None`` when the decoder has no streaming form.
        """
        return None if self.factories is None else tuple(make() for make in self.factories)


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for one in decoder["decoders"] for step in _steps(one)]


def _token_stage(step: dict[str, Any]) -> Callable[[], Stage] | None:
    """Find the form of a step that takes one token at a time."""
    match step:
        case {"type": "ByteLevel"}:
            return _ByteLevel
        case {"type": "ByteFallback"}:
            return _ByteFallback
        case {"type": "Fuse"}:
            return _Unchanged
        case {"type": "Metaspace", "replacement": str(char), "prepend_scheme": str(scheme)}:
            return lambda: _Metaspace(char, drop_first=scheme != "never")
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return lambda: _Replace(old, new)
        case {"type": "Strip", "content": str(char), "start": int(start), "stop": 0}:
            return lambda: _Strip(char, start, every_piece=True)
    return None


def _fused_stage(step: dict[str, Any]) -> Callable[[], Stage] | None:
    """Find the form of a step that takes one long text in pieces."""
    match step:
        case {"type": "Fuse"}:
            return _Unchanged
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if (
            len(old) == 1
        ):
            return lambda: _Replace(old, new)
        case {"type": "Strip", "content": str(char), "start": int(start), "stop": 0}:
            return lambda: _Strip(char, start, every_piece=False)
    return None


class _Unchanged:
    """Passes pieces on; their borders mean nothing to what follows."""

    def feed(self, piece: str) -> list[str]:
        return [piece]

    def end(self) -> list[str]:
        return []


class _Spaced(_Unchanged):
    """Without a decoder the library joins tokens with a space."""

    def __init__(self) -> None:
        self._started = False

    def feed(self, piece: str) -> list[str]:
        if not self._started:
            self._started = True
            return [piece]
        return [" " + piece]


class _Replace(_Unchanged):
    """Replaces a literal text inside each piece."""

    def __init__(self, old: str, new: str) -> None:
        self._old = old
        self._new = new

    def feed(self, piece: str) -> list[str]:
        return [piece.replace(self._old, self._new)]


class _Metaspace(_Unchanged):
    """Turns the stand-in of a space back; the first piece loses it."""

    def __init__(self, char: str, *, drop_first: bool) -> None:
        self._char = char
        self._space = "" if drop_first else " "

    def feed(self, piece: str) -> list[str]:
        text = piece.replace(self._char, self._space)
        self._space = " "
        return [text]


class _Strip(_Unchanged):
    """Removes up to ``count`` leading characters, of every piece or of the whole."""

    def __init__(self, char: str, count: int, *, every_piece: bool) -> None:
        self._char = char
        self._count = count
        self._left = count
        self._every_piece = every_piece

    def feed(self, piece: str) -> list[str]:
        at = 0
        while at < min(self._left, len(piece)) and piece[at] == self._char:
            at += 1
        if not self._every_piece:
            self._left = self._left - at if at == len(piece) else 0
        return [piece[at:]]


class _ByteFallback:
    """Joins runs of byte tokens; an invalid run gives one U+FFFD a byte.

    Whether a run is valid is known only at its end, so all of it waits.
    """

    def __init__(self) -> None:
        self._run = bytearray()

    def feed(self, piece: str) -> list[str]:
        found = _BYTE_TOKEN.fullmatch(piece)
        if found:
            self._run.append(int(found[1], 16))
            return []
        return [*self.end(), piece] if self._run else [piece]

    def end(self) -> list[str]:
        run, self._run = self._run, bytearray()
        if not run:
            return []
        try:
            return [run.decode()]
        except UnicodeDecodeError:
            return [_REPLACEMENT] * len(run)


class _ByteLevel:
    """Turns the byte alphabet back into UTF-8; only an unfinished character waits."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, piece: str) -> list[str]:
        try:
            data = bytes(map(BYTES_BY_CHARACTER.__getitem__, piece))
        except KeyError:  # an added token is spelled as text
            data = piece.encode()
        return [self._decoder.decode(data)]

    def end(self) -> list[str]:
        return [self._decoder.decode(b"", final=True)]


def _byte_alphabet() -> dict[str, int]:
    """Map each character that stands for a byte to the byte.

    Bytes that print as themselves in Latin-1 keep their character; the others are numbered from
    U+0100 on.

    Source: the byte-level encoding of the GPT-2 tokenizer.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


BYTES_BY_CHARACTER: Final = _byte_alphabet()
