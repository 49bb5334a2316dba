"""What the state after a prompt depends on: its tokens, and the media at their places."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from engine_core.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["MediaSpan", "PromptKey"]


def _digest(_: object, attribute: attrs.Attribute[bytes], value: object) -> None:
    if not isinstance(value, bytes) or not value:
        raise CacheError(
            f"media span: {attribute.name} must be non-empty bytes, got {type(value).__name__}",
            code="cache.key",
        )


@attrs.frozen
class MediaSpan:
    """Placeholder tokens of one media item.

    Attributes:
        start: Position of the first one.
        stop: One past the last one.
        digest: Digest of the item as the model sees it.
    """

    start: int
    stop: int
    digest: bytes = attrs.field(validator=_digest)


@attrs.frozen
class PromptKey:
    """A prompt, or the prefix of one.

    Attributes:
        ids: Token ids.
        media: Media items in order, without overlap.
    """

    ids: tuple[int, ...]
    media: tuple[MediaSpan, ...] = ()

    def __attrs_post_init__(self) -> None:
        """Refuse spans that are not where they should be."""
        at = 0
        for span in self.media:
            if not at <= span.start < span.stop <= len(self.ids):
                raise CacheError(
                    f"prompt key: media must lie in order inside {len(self.ids)} tokens, "
                    f"got {span.start} to {span.stop}",
                    code="cache.key",
                )
            at = span.stop

    def symbols(self) -> tuple[Hashable, ...]:
        """Give one symbol a token: its id, and the item's digest where an item begins."""
        if not self.media:
            return self.ids
        symbols: list[Hashable] = list(self.ids)
        for span in self.media:
            symbols[span.start] = (self.ids[span.start], span.digest)
        return tuple(symbols)

    def floor(self, length: int) -> int:
        """Go back to where no media item is cut, because its rows see one another.

        Args:
            length: A length.

        Returns:
            The greatest length up to it that lies inside no item.
        """
        for span in self.media:
            if span.start < length < span.stop:
                return span.start
        return length

    def first(self, length: int) -> PromptKey:
        """Cut to a prefix.

        Args:
            length: A length inside no item.

        Returns:
            The key of the prefix.
        """
        spans = tuple(span for span in self.media if span.stop <= length)
        return PromptKey(self.ids[:length], spans)
