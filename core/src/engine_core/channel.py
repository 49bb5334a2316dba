"""A bounded channel from one producer thread to one consumer.

A slow consumer holds the producer back instead of letting events pile up; a consumer that leaves
or a cancelled request wakes a producer that waits.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from engine_core.limits import LIMITS

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Channel", "ChannelEnd"]

ItemT = TypeVar("ItemT")

# A caller's cancel token cannot wake the producer, so a blocked one looks at it this often.
_POLL_SECONDS: Final = 0.05


class ChannelEnd(Exception):  # noqa: N818 - a signal like StopIteration, not an error
    """The producer has finished without an error and every item was read."""


class Channel(Generic[ItemT]):
    """A bounded FIFO with an end, an error and a consumer that may leave."""

    def __init__(self, notify: Callable[[], None] | None = None) -> None:
        """Make an empty channel.

        Args:
            notify: Called on the producer thread after an item or the end was added; must
                neither block nor raise.
        """
        self._notify = notify
        self._items: deque[ItemT] = deque()
        self._changed = threading.Condition()  # over a reentrant lock: finalizers may need it
        self._ended = False
        self._error: BaseException | None = None
        self._consumer_left = False

    def put(self, item: ItemT, is_cancelled: Callable[[], bool]) -> bool:
        """Add an item, waiting while the channel is full.

        Args:
            item: The item.
            is_cancelled: Whether to give up waiting.

        Returns:
            Whether the item was added; ``False`` when the consumer left or the request was
            cancelled.
        """
        with self._changed:
            while not self._consumer_left and len(self._items) >= LIMITS.stream_events:
                if is_cancelled():
                    return False
                self._changed.wait(_POLL_SECONDS)
            if self._consumer_left:
                return False
            self._items.append(item)
            self._changed.notify_all()
        if self._notify is not None:
            self._notify()
        return True

    def finish(self, error: BaseException | None = None) -> None:
        """End the channel; items already in it are still read.

        Args:
            error: Raised to the consumer after the last item.
        """
        with self._changed:
            self._ended = True
            self._error = error
            self._changed.notify_all()
        if self._notify is not None:
            self._notify()

    def get(self) -> ItemT:
        """Take the next item, waiting for it.

        Returns:
            The item.

        Raises:
            ChannelEnd: Everything was read, or the consumer closed the channel.
            BaseException: The error the producer finished with.
        """
        with self._changed:
            self._changed.wait_for(self._is_ready)
            return self._take()

    def poll(self) -> tuple[ItemT, ...]:
        """Take the next item if there is one; never waits.

        Returns:
            The item in a tuple, or an empty tuple when the producer has not got that far.

        Raises:
            ChannelEnd: Everything was read, or the consumer closed the channel.
            BaseException: The error the producer finished with.
        """
        with self._changed:
            return (self._take(),) if self._is_ready() else ()

    def close(self) -> None:
        """Leave as the consumer: drop what is buffered and release the producer."""
        with self._changed:
            self._consumer_left = True
            self._items.clear()
            self._changed.notify_all()

    def _is_ready(self) -> bool:
        return bool(self._items) or self._ended or self._consumer_left

    def _take(self) -> ItemT:
        if self._items:
            item = self._items.popleft()
            self._changed.notify_all()
            return item
        error, self._error = self._error, None
        if error is not None and not self._consumer_left:
            raise error
        raise ChannelEnd
