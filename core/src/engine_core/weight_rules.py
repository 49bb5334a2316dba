"""The rules that a weight plan is made of: data about keys, axes and sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Concat", "Drop", "Permute", "Rename", "Rule", "Split", "Stack"]


def _integers(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


def _texts(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(values)


@attrs.frozen
class Rename:
    """Replace the start of a key.

    Attributes:
        prefix: Start to replace; may be a whole key, or empty to match every key.
        to: What stands there instead.
    """

    prefix: str
    to: str

    def map_key(self, key: str) -> tuple[str, ...]:
        """Map one key; a key that does not match stays as it is."""
        return (self.to + key[len(self.prefix) :],) if key.startswith(self.prefix) else (key,)


@attrs.frozen
class Drop:
    """Leave tensors unread.

    Attributes:
        prefix: Start of the keys to drop; empty matches every start.
        suffix: End of the keys to drop; both must match when both are given.
        reason: Shown to whoever asks why a tensor is unused.
    """

    prefix: str = ""
    suffix: str = ""
    reason: str = ""

    def __attrs_post_init__(self) -> None:
        """Refuse a rule that would drop everything."""
        if not self.prefix and not self.suffix:
            msg = "drop: needs a prefix or a suffix, got neither"
            raise ValueError(msg)

    def map_key(self, key: str) -> tuple[str, ...]:
        """Map one key to nothing when it matches."""
        return () if key.startswith(self.prefix) and key.endswith(self.suffix) else (key,)


@attrs.frozen
class Permute:
    """Reorder the axes of tensors.

    Attributes:
        suffix: End of the keys it applies to.
        axes: Old axis at each new place, as ``numpy.transpose`` takes them.
    """

    suffix: str = attrs.field(validator=attrs.validators.min_len(1))
    axes: tuple[int, ...] = attrs.field(converter=_integers)

    def __attrs_post_init__(self) -> None:
        """Refuse axes that are no permutation."""
        if sorted(self.axes) != list(range(len(self.axes))):
            msg = f"permute {self.suffix!r}: axes must be a permutation, got {self.axes!r}"
            raise ValueError(msg)

    def map_key(self, key: str) -> tuple[str, ...]:
        """Leave the key as it is; only the axes change."""
        return (key,)


@attrs.frozen
class Stack:
    """Stack numbered tensors along a new first axis.

    Attributes:
        pattern: Key with one ``{}`` for the number.
        into: Key of the result.
        count: Numbers 0 to ``count - 1`` must all be present, or none.
    """

    pattern: str
    into: str
    count: int

    def __attrs_post_init__(self) -> None:
        """Refuse a pattern without exactly one place for the number."""
        if self.pattern.count("{}") != 1:
            msg = f"stack: pattern must hold one '{{}}', got {self.pattern!r}"
            raise ValueError(msg)
        if isinstance(self.count, bool) or self.count < 1:
            msg = f"stack {self.pattern!r}: count must be positive, got {self.count!r}"
            raise ValueError(msg)

    @property
    def keys(self) -> tuple[str, ...]:
        """Source keys in order."""
        start, end = self.pattern.split("{}")
        return tuple(f"{start}{number}{end}" for number in range(self.count))

    def map_key(self, key: str) -> tuple[str, ...]:
        """Map each numbered key to the stacked one."""
        start, end = self.pattern.split("{}")
        if not (key.startswith(start) and key.endswith(end)):
            return (key,)
        number = key[len(start) : len(key) - len(end)]
        plain = number.isascii() and number.isdecimal() and str(int(number[:10])) == number
        return (self.into,) if plain and int(number) < self.count else (key,)


@attrs.frozen
class Split:
    """Cut one tensor into several along an existing axis.

    Attributes:
        key: Exact key; the rule is skipped when it is absent.
        into: Keys of the parts, in order.
        sizes: Size of each part along the axis; they must add up.
        axis: Axis to cut, negative counts from the end.
    """

    key: str
    into: tuple[str, ...] = attrs.field(converter=_texts)
    sizes: tuple[int, ...] = attrs.field(converter=_integers)
    axis: int = 0

    def __attrs_post_init__(self) -> None:
        """Refuse parts and sizes that do not pair up."""
        if not self.into or len(self.into) != len(self.sizes):
            msg = (
                f"split {self.key!r}: into and sizes must pair up, "
                f"got {len(self.into)} and {len(self.sizes)}"
            )
            raise ValueError(msg)
        if len(set(self.into)) != len(self.into) or min(self.sizes) < 1:
            msg = f"split {self.key!r}: parts must be distinct and sizes positive, got {self!r}"
            raise ValueError(msg)

    def map_key(self, key: str) -> tuple[str, ...]:
        """Map the key to all its parts."""
        return self.into if key == self.key else (key,)


@attrs.frozen
class Concat:
    """Join tensors along an existing axis.

    Attributes:
        sources: Exact keys in order; all must be present, or none.
        into: Key of the result.
        axis: Axis to join along, negative counts from the end.
    """

    sources: tuple[str, ...] = attrs.field(converter=_texts)
    into: str
    axis: int = 0

    def __attrs_post_init__(self) -> None:
        """Refuse an empty or repeating source list."""
        if not self.sources or len(set(self.sources)) != len(self.sources):
            msg = f"concat {self.into!r}: sources must be distinct, got {self.sources!r}"
            raise ValueError(msg)

    def map_key(self, key: str) -> tuple[str, ...]:
        """Map each source to the joined key."""
        return (self.into,) if key in self.sources else (key,)


Rule = Rename | Drop | Permute | Stack | Split | Concat
"""One step of a plan."""
