"""How packed weights are laid out: MLX's quantization modes and the plan for one checkpoint.

A packed layer has ``weight`` (uint32 words holding the values of a row one after the other, least
significant bits first) and ``scales`` (one a group of a row); affine layers have ``biases`` too.
"""

from __future__ import annotations

from collections import Counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MODES", "QuantizationMode", "QuantizationPlan", "QuantizationSpec"]

WORD_BITS: Final = 32


@attrs.frozen(kw_only=True)
class QuantizationMode:
    """What one mode allows.

    Attributes:
        name: As MLX spells it.
        bits: Allowed bits a value.
        group_sizes: Allowed values a scale.
        affine: Whether scales are floating with biases beside them; else scales are one byte
            each and there are no biases.
    """

    name: str
    bits: tuple[int, ...]
    group_sizes: tuple[int, ...]
    affine: bool


MODES: Final[Mapping[str, QuantizationMode]] = MappingProxyType(
    {
        mode.name: mode
        for mode in (
            QuantizationMode(
                name="affine", bits=(2, 3, 4, 5, 6, 8), group_sizes=(32, 64, 128), affine=True
            ),
            QuantizationMode(name="mxfp4", bits=(4,), group_sizes=(32,), affine=False),
            QuantizationMode(name="mxfp8", bits=(8,), group_sizes=(32,), affine=False),
            QuantizationMode(name="nvfp4", bits=(4,), group_sizes=(16,), affine=False),
        )
    }
)


@attrs.frozen
class QuantizationSpec:
    """How one layer's weight is packed.

    Attributes:
        mode: Key of ``MODES``.
        bits: Bits a value.
        group_size: Values a scale.
    """

    mode: str = "affine"
    bits: int = 4
    group_size: int = 64

    def __attrs_post_init__(self) -> None:
        """Refuse a combination outside the mode table."""
        mode = MODES.get(self.mode)
        if mode is None:
            msg = f"quantization mode: must be one of {sorted(MODES)}, got {self.mode!r}"
            raise ValueError(msg)
        for name, value, allowed in (
            ("bits", self.bits, mode.bits),
            ("group_size", self.group_size, mode.group_sizes),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
                choices = " or ".join(map(str, allowed))
                msg = f"quantization {name}: must be {choices} in mode {mode.name!r}, got {value!r}"
                raise ValueError(msg)

    @property
    def affine(self) -> bool:
        """Whether biases stand beside floating scales."""
        return MODES[self.mode].affine

    def words(self, width: int) -> int:
        """Count the uint32 words of a row.

        Args:
            width: Values in the row, a multiple of the group size.

        Returns:
            Words.
        """
        return width * self.bits // WORD_BITS

    def width(self, words: int) -> int:
        """Count the values in a row of words.

        Args:
            words: uint32 words of the row.

        Returns:
            Values; meaningful when ``words * 32`` is a multiple of ``bits``.
        """
        return words * WORD_BITS // self.bits


def _freeze(layers: Mapping[str, QuantizationSpec]) -> Mapping[str, QuantizationSpec]:
    return MappingProxyType(dict(layers))


@attrs.frozen
class QuantizationPlan:
    """Which layers of a model are packed, and how.

    Attributes:
        layers: Mapped module path -> spec; only paths whose tensors really are packed.
        notes: Remarks for the user.
    """

    layers: Mapping[str, QuantizationSpec] = attrs.field(converter=_freeze, factory=dict)
    notes: tuple[str, ...] = attrs.field(default=(), eq=False)

    def get(self, path: str) -> QuantizationSpec | None:
        """Look one layer up.

        Args:
            path: Mapped module path, e.g. ``"model.layers.0.mlp.up_proj"``.

        Returns:
            Its spec, ``None`` when the layer is dense.
        """
        return self.layers.get(path)

    def summary(self) -> str:
        """Count the packed layers by how they are packed.

        Returns:
            Text such as ``"affine 4 bits group 64 x 210"``; empty when nothing is packed.
        """
        counts = Counter(
            f"{spec.mode} {spec.bits} bits group {spec.group_size}" for spec in self.layers.values()
        )
        return ", ".join(f"{kind} x {count}" for kind, count in sorted(counts.items()))
