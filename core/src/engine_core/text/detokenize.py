"""Token by token to text: what whole-sequence decoding would give, as early as it is certain."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from engine_core.text.tokenizer import Tokenizer

__all__ = ["Detokenizer"]


class Detokenizer:
    """Decodes one reply.

    The pushes and ``finish`` together give ``tokenizer.decode`` of all ids, and nothing given out
    is ever contradicted. Withheld are only the bytes of an unfinished character, and a run of byte
    tokens until it ends. A decoder of a kind that no known language model uses gives everything
    at ``finish``. The work a token does not grow with the reply.
    """

    def __init__(self, tokenizer: Tokenizer, *, keep: Collection[int] = ()) -> None:
        """Start a reply.

        Args:
            tokenizer: Whose ids come.
            keep: Special ids to show; ``tokenizer.special_ids`` shows all of them.
        """
        self._tokenizer = tokenizer
        self._keep = frozenset(keep)
        self._stages = tokenizer.decoder.start()
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """Take a token.

        Args:
            token_id: Any id; one that the tokenizer does not know gives nothing.

        Returns:
            Text that became final, often empty.
        """
        if self._tokenizer.is_hidden(token_id, self._keep):
            return ""
        if self._stages is None:
            self._held.append(token_id)
            return ""
        text = self._tokenizer.token_text(token_id)
        if text is None:
            return ""
        pieces = [text]
        for stage in self._stages:
            pieces = [out for piece in pieces for out in stage.feed(piece)]
        return "".join(pieces)

    def finish(self) -> str:
        """Take the end of the reply.

        Returns:
            The rest of the text.
        """
        if self._stages is None:
            held, self._held = self._held, []
            return self._tokenizer.decode(held, keep=self._keep)
        pieces: list[str] = []
        for stage in self._stages:
            pieces = [out for piece in pieces for out in stage.feed(piece)]
            pieces += stage.end()
        return "".join(pieces)
