"""Rotary position parameters as data: which frequencies a layer rotates by.

Plugins fill these records from a configuration before anything is loaded, so no MLX is needed here.
The formulas run in double precision; :class:`~engine_core.nn.rope.Rope` rounds once, at the end.
"""

from __future__ import annotations

import math
from typing import Any

import attrs

__all__ = [
    "BandScaling",
    "DynamicScaling",
    "LinearScaling",
    "RopeScaling",
    "RopeSpec",
    "YarnScaling",
]


def _positive(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not numeric or not math.isfinite(value) or value <= 0:
        msg = f"rope {attribute.name}: must be a positive number, got {value!r}"
        raise ValueError(msg)


@attrs.frozen(kw_only=True)
class LinearScaling:
    """Position interpolation: every frequency divided by one factor.

    Attributes:
        factor: How many times longer the context became. Dimensionless.

    Source: Chen et al. 2023, "Extending Context Window of Large Language Models via Positional
    Interpolation".
    """

    factor: float = attrs.field(validator=_positive)

    def scale(self, frequencies: tuple[float, ...], theta: float) -> tuple[float, ...]:
        """Divide all frequencies.

        Args:
            frequencies: Unscaled, radians a token.
            theta: Base of the frequencies; not used.

        Returns:
            Scaled frequencies.
        """
        del theta
        return tuple(frequency / self.factor for frequency in frequencies)


@attrs.frozen(kw_only=True)
class BandScaling:
    """Interpolate long wavelengths, keep short ones.

    Attributes:
        factor: Divisor of the long wavelengths' frequencies. Dimensionless.
        low_freq_factor: A wavelength above ``original_context / low_freq_factor`` is long.
        high_freq_factor: A wavelength below ``original_context / high_freq_factor`` is short.
        original_context: Context length before the extension (tokens).

    Source: Dubey et al. 2024, section 3.4.3 (long-context pre-training); the blend is linear in the
    number of turns over the original context.
    """

    factor: float = attrs.field(validator=_positive)
    low_freq_factor: float = attrs.field(validator=_positive)
    high_freq_factor: float = attrs.field(validator=_positive)
    original_context: int = attrs.field(validator=_positive)

    def __attrs_post_init__(self) -> None:
        """Refuse an empty band, whose blend would divide by zero."""
        if self.high_freq_factor <= self.low_freq_factor:
            msg = (
                "rope high_freq_factor: must be above low_freq_factor, "
                f"got {self.high_freq_factor!r} and {self.low_freq_factor!r}"
            )
            raise ValueError(msg)

    def scale(self, frequencies: tuple[float, ...], theta: float) -> tuple[float, ...]:
        """Scale each frequency by its wavelength.

        Args:
            frequencies: Unscaled, radians a token.
            theta: Base of the frequencies; not used.

        Returns:
            Scaled frequencies.
        """
        del theta
        band = self.high_freq_factor - self.low_freq_factor
        scaled = []
        for frequency in frequencies:
            turns = self.original_context * frequency / (2 * math.pi)
            kept = min(max((turns - self.low_freq_factor) / band, 0.0), 1.0)
            scaled.append((1 - kept) * frequency / self.factor + kept * frequency)
        return tuple(scaled)


@attrs.frozen(kw_only=True)
class YarnScaling:
    """YaRN: interpolate slow dimensions, keep fast ones, scale what attention sees.

    Attributes:
        factor: How many times longer the context became. Dimensionless.
        original_context: Context length before the extension (tokens).
        beta_fast: Rotations over the original context above which a dimension is kept.
        beta_slow: Rotations below which a dimension is interpolated in full.
        truncate: Whether the two borders are rounded outwards to whole dimensions.
        attention_factor: Scale of rotated queries and keys; ``None`` derives it.
        mscale: Numerator coefficient of the derived factor; used only with ``mscale_all_dim``.
        mscale_all_dim: Denominator coefficient of the derived factor.

    Source: Peng et al. 2023, "YaRN"; transformers ``_compute_yarn_parameters``.
    """

    factor: float = attrs.field(validator=_positive)
    original_context: int = attrs.field(validator=_positive)
    beta_fast: float = attrs.field(default=32.0, validator=_positive)
    beta_slow: float = attrs.field(default=1.0, validator=_positive)
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def scale(self, frequencies: tuple[float, ...], theta: float) -> tuple[float, ...]:
        """Blend interpolated and original frequencies along a ramp over the dimensions.

        Args:
            frequencies: Unscaled, radians a token.
            theta: Base of the frequencies.

        Returns:
            Scaled frequencies.
        """
        dims = 2 * len(frequencies)
        low = self._border(self.beta_fast, dims, theta)
        high = self._border(self.beta_slow, dims, theta)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        # The reference widens an empty ramp by this much instead of dividing by zero.
        width = high - low if high != low else 0.001
        scaled = []
        for index, frequency in enumerate(frequencies):
            ramp = min(max((index - low) / width, 0.0), 1.0)
            scaled.append(frequency / self.factor * ramp + frequency * (1 - ramp))
        return tuple(scaled)

    def amplitude(self) -> float:
        """Give the scale of rotated queries and keys.

        Returns:
            The explicit attention factor, or the one the paper suggests.
        """
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def _magnitude(self, coefficient: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * coefficient * math.log(self.factor) + 1.0

    def _border(self, rotations: float, dims: int, theta: float) -> float:
        """Dimension that turns ``rotations`` times over the original context."""
        turns = self.original_context / (rotations * 2 * math.pi)
        return dims * math.log(turns) / (2 * math.log(theta))


@attrs.frozen(kw_only=True)
class DynamicScaling:
    """NTK scaling that depends on the current length, honoured up to the trained context.

    Up to ``limit`` tokens it changes nothing. Beyond, every key would have to be rotated by
    another base than the cached ones, so no cache could be right; a call there is an error.

    Attributes:
        limit: Trained context (tokens).
    """

    limit: int = attrs.field(validator=_positive)

    def scale(self, frequencies: tuple[float, ...], theta: float) -> tuple[float, ...]:
        """Leave the frequencies as they are.

        Args:
            frequencies: Unscaled, radians a token.
            theta: Base of the frequencies; not used.

        Returns:
            The same frequencies.
        """
        del theta
        return frequencies


RopeScaling = LinearScaling | BandScaling | YarnScaling | DynamicScaling
"""A way to stretch the frequencies of a longer context."""


@attrs.frozen(kw_only=True)
class RopeSpec:
    """Rotary parameters of one kind of layer; halves are rotated against each other.

    Attributes:
        head_dim: D.
        theta: Base of the frequencies. Dimensionless.
        partial_rotary_factor: Share of each head that is rotated; the rest passes through.
        proportional: Where the share lies. By default the first dimensions of the head rotate
            among themselves. Proportional: pairs and exponents are those of the whole head, and
            the slowest pairs beyond the share stand still.
        scaling: How the frequencies are stretched, ``None`` when they are not.
    """

    head_dim: int = attrs.field(validator=_positive)
    theta: float = attrs.field(default=10_000.0, validator=_positive)
    partial_rotary_factor: float = attrs.field(default=1.0, validator=_positive)
    proportional: bool = False
    scaling: RopeScaling | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse a rotated part that cannot be halved, and a base without distinct frequencies."""
        if self.partial_rotary_factor > 1 or self.dims % 2 or self.dims == 0:
            msg = (
                "rope dimensions: must be an even, positive part of the head, "
                f"got {self.partial_rotary_factor!r} of {self.head_dim!r}"
            )
            raise ValueError(msg)
        if self.theta <= 1:
            msg = f"rope theta: must be above 1, got {self.theta!r}"
            raise ValueError(msg)

    @property
    def dims(self) -> int:
        """Dimensions of each head that form pairs."""
        return self.head_dim if self.proportional else int(self._share)

    @property
    def _share(self) -> float:
        return self.head_dim * self.partial_rotary_factor

    def frequencies(self) -> tuple[float, ...]:
        """Compute the rotation of each pair of dimensions.

        Returns:
            ``dims / 2`` angular frequencies, radians a token, in double precision; 0 for a pair
            that stands still.

        Source: Su et al. 2021, "RoFormer": ``theta ** (-2 i / dims)``; transformers
        ``_compute_proportional_rope_parameters`` for the proportional share.
        """
        dims, turning = self.dims, int(self._share // 2)
        plain = tuple(
            self.theta ** (-2.0 * index / dims) if index < turning else 0.0
            for index in range(dims // 2)
        )
        return plain if self.scaling is None else self.scaling.scale(plain, self.theta)

    @property
    def attention_factor(self) -> float:
        """Scale of the rotated dimensions of queries and keys."""
        return self.scaling.amplitude() if isinstance(self.scaling, YarnScaling) else 1.0

    @property
    def limit(self) -> int | None:
        """Positions below this one are exact (tokens); ``None`` means all."""
        return self.scaling.limit if isinstance(self.scaling, DynamicScaling) else None
