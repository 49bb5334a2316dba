"""Reference operations in NumPy double precision, written from the formulas.

They share no code with the layers they check, and favour the form in which a paper or a format
description states a formula over speed. Shapes are unbatched: ``[L, ...]``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    Array = np.ndarray[Any, Any]

__all__ = [
    "attention",
    "band_frequencies",
    "causal_mask",
    "default_frequencies",
    "dequantize",
    "linear_frequencies",
    "rms_norm",
    "rotate",
    "silu",
    "softmax",
    "swiglu",
    "yarn_amplitude",
    "yarn_frequencies",
]

_FP4_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGN_BIT: Final = {4: 8, 8: 128}


def _double(values: Any) -> Array:
    """Convert to float64; the type checker would call the result of ``np.float64`` a scalar."""
    return np.asarray(values, np.float64)


def rms_norm(x: Array, weight: Array | None, eps: float) -> Array:
    """Normalise the last axis by its root mean square.

    Args:
        x: ``[..., size]``.
        weight: ``[size]``, ``None`` for no scale.
        eps: Added to the mean square.

    Returns:
        ``[..., size]`` float64.
    """
    x = _double(x)
    normal = _double(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps))
    return normal if weight is None else normal * _double(weight)


def silu(x: Array) -> Array:
    """Compute ``x / (1 + exp(-x))``, without overflow.

    Args:
        x: Any shape.

    Returns:
        The same shape, float64.
    """
    x = _double(x)
    return x * 0.5 * (1.0 + np.tanh(0.5 * x))


def swiglu(x: Array, gate: Array, up: Array, down: Array) -> Array:
    """Apply a gated feed-forward block without biases.

    Args:
        x: ``[L, H]``.
        gate: ``[I, H]``.
        up: ``[I, H]``.
        down: ``[H, I]``.

    Returns:
        ``[L, H]`` float64.
    """
    x = _double(x)
    return _double((silu(x @ _double(gate).T) * (x @ _double(up).T)) @ _double(down).T)


def softmax(scores: Array) -> Array:
    """Normalise the last axis to sum 1; a row of minus infinities is not allowed.

    Args:
        scores: ``[..., S]``.

    Returns:
        ``[..., S]`` float64.
    """
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=-1, keepdims=True))


def causal_mask(
    length: int, window: int | None = None, spans: Sequence[tuple[int, int]] = ()
) -> Array:
    """Say which positions see which.

    Args:
        length: L.
        window: Positions a row sees, itself included; ``None`` for all earlier ones.
        spans: Half-open ranges whose positions see one another.

    Returns:
        ``[L, L]`` bool, true where the row sees the column.
    """
    mask = np.zeros((length, length), bool)
    for row in range(length):
        first = 0 if window is None else max(0, row - window + 1)
        mask[row, first : row + 1] = True
    for start, stop in spans:
        mask[start:stop, start:stop] = True
    return mask


def attention(
    queries: Array,
    keys: Array,
    values: Array,
    *,
    scale: float,
    mask: Array,
    softcap: float | None = None,
) -> Array:
    """Attend head by head; query head ``n`` reads key head ``n // (N / K)``.

    Args:
        queries: ``[L, N, D]``.
        keys: ``[S, K, D]``.
        values: ``[S, K, Dv]``.
        scale: Factor of the scores.
        mask: ``[L, S]`` bool.
        softcap: Bound of the scores by a scaled tanh, ``None`` for none.

    Returns:
        ``[L, N, Dv]`` float64.
    """
    heads, group = queries.shape[1], queries.shape[1] // keys.shape[1]
    out = np.empty((queries.shape[0], heads, values.shape[2]), np.float64)
    for head in range(heads):
        key, value = _double(keys[:, head // group]), _double(values[:, head // group])
        scores = _double(queries[:, head]) @ key.T * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        out[:, head] = softmax(np.where(mask, scores, -np.inf)) @ value
    return out


# ------------------------------------------------------------------ rotary positions


def default_frequencies(dims: int, theta: float) -> Array:
    """Compute plain rotary frequencies.

    Args:
        dims: Rotated dimensions of a head.
        theta: Base.

    Returns:
        ``[dims / 2]`` float64, radians a token.
    """
    return np.asarray(1.0 / theta ** (np.arange(0, dims, 2, dtype=np.float64) / dims))


def linear_frequencies(dims: int, theta: float, factor: float) -> Array:
    """Compute frequencies for positions divided by a factor.

    Args:
        dims: Rotated dimensions of a head.
        theta: Base.
        factor: Divisor.

    Returns:
        ``[dims / 2]`` float64.
    """
    return default_frequencies(dims, theta) / factor


def band_frequencies(
    dims: int, theta: float, *, factor: float, low: float, high: float, original: int
) -> Array:
    """Divide frequencies of long wavelengths, keep short ones, blend between.

    Args:
        dims: Rotated dimensions of a head.
        theta: Base.
        factor: Divisor.
        low: ``original / low`` tokens is the border to long wavelengths.
        high: ``original / high`` tokens is the border to short ones.
        original: Context before the extension (tokens).

    Returns:
        ``[dims / 2]`` float64.
    """
    frequencies = default_frequencies(dims, theta)
    for index, frequency in enumerate(frequencies):
        wavelength = 2 * math.pi / frequency
        if wavelength > original / low:
            frequencies[index] = frequency / factor
        elif wavelength >= original / high:
            smooth = (original / wavelength - low) / (high - low)
            frequencies[index] = (1 - smooth) * frequency / factor + smooth * frequency
    return frequencies


def yarn_frequencies(
    dims: int,
    theta: float,
    *,
    factor: float,
    original: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Array:
    """Blend divided and plain frequencies along a ramp over the dimensions.

    Args:
        dims: Rotated dimensions of a head.
        theta: Base.
        factor: Divisor.
        original: Context before the extension (tokens).
        beta_fast: Rotations at the start of the ramp.
        beta_slow: Rotations at its end.
        truncate: Whether the ramp's borders are whole dimensions.

    Returns:
        ``[dims / 2]`` float64.
    """

    def dimension(rotations: float) -> float:
        return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    start, stop = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        start, stop = float(math.floor(start)), float(math.ceil(stop))
    start, stop = max(start, 0.0), min(stop, dims - 1.0)
    if start == stop:
        stop += 0.001
    ramp = np.clip((np.arange(dims // 2, dtype=np.float64) - start) / (stop - start), 0, 1)
    plain = default_frequencies(dims, theta)
    return np.asarray(plain / factor * ramp + plain * (1 - ramp))


def yarn_amplitude(
    factor: float,
    *,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
) -> float:
    """Compute the factor of rotated queries and keys.

    Args:
        factor: Context extension.
        attention_factor: Explicit value, which wins.
        mscale: Numerator coefficient.
        mscale_all_dim: Denominator coefficient.

    Returns:
        The factor.
    """
    if attention_factor is not None:
        return attention_factor
    if factor <= 1:
        return 1.0
    if mscale and mscale_all_dim:
        above, below = (0.1 * m * math.log(factor) + 1 for m in (mscale, mscale_all_dim))
        return above / below
    return 0.1 * math.log(factor) + 1


def rotate(x: Array, positions: Array, frequencies: Array, amplitude: float = 1.0) -> Array:
    """Rotate pairs ``(i, i + dims / 2)`` of each head; further dimensions pass through.

    Args:
        x: ``[L, N, D]``.
        positions: ``[L]``.
        frequencies: ``[dims / 2]``, radians a token.
        amplitude: Factor of the rotated dimensions.

    Returns:
        ``[L, N, D]`` float64.
    """
    x = _double(x)
    half = len(frequencies)
    angles = _double(positions)[:, None] * frequencies
    cos, sin = np.cos(angles)[:, None] * amplitude, np.sin(angles)[:, None] * amplitude
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = (first * cos - second * sin, second * cos + first * sin, rest)
    return np.concatenate(turned, axis=-1)


# ------------------------------------------------------------------ packed weights


def dequantize(
    words: Array,
    scales: Array,
    biases: Array | None = None,
    *,
    mode: str,
    bits: int,
    group_size: int,
) -> Array:
    """Unpack a weight bit by bit, as the format describes it.

    A row is one stream of bits, least significant first: value ``i`` occupies bits ``i * bits``
    to ``(i + 1) * bits``, across the borders of words.

    Args:
        words: ``[..., rows, words]`` uint32.
        scales: ``[..., rows, groups]``: floating, or uint8 holding powers of two (``mx`` modes) or
            8-bit floats (``nvfp4``).
        biases: ``[..., rows, groups]`` floating in affine mode.
        mode: ``affine``, ``mxfp4``, ``mxfp8`` or ``nvfp4``.
        bits: Bits a value.
        group_size: Values a scale.

    Returns:
        ``[..., rows, columns]`` float64.

    Raises:
        ValueError: The mode is unknown.

    Source: OCP Microscaling Formats (MX) v1.0 for e2m1, e4m3 and e8m0; MLX documentation of
    ``mx.quantize`` for the packing and the affine mode.
    """
    stream = np.unpackbits(
        np.ascontiguousarray(words, "<u4").view(np.uint8), axis=-1, bitorder="little"
    )
    columns = stream.shape[-1] // bits
    digits = stream[..., : columns * bits].reshape(*words.shape[:-1], columns, bits)
    digits = digits.astype(np.int64)
    codes = (digits << np.arange(bits)).sum(axis=-1)

    def spread(groups: Any) -> Array:
        return np.repeat(_double(groups), group_size, axis=-1)

    if mode == "affine":
        if biases is None:
            msg = "affine: needs biases, got none"
            raise ValueError(msg)
        return _double(codes * spread(scales) + spread(biases))
    if mode in ("mxfp4", "mxfp8"):
        factors = _double(np.ldexp(1.0, np.asarray(scales, np.int64) - 127))
    elif mode == "nvfp4":
        factors = _decode_fp8(np.asarray(scales, np.int64))
    else:
        msg = f"mode: must be a known one, got {mode!r}"
        raise ValueError(msg)
    values = _decode_fp8(codes) if bits == 8 else _decode_fp4(codes)
    return values * spread(factors)


def _decode_fp4(codes: Array) -> Array:
    """Read e2m1: one sign bit, two exponent bits, one mantissa bit."""
    magnitude = _double(_FP4_VALUES)[codes & 7]
    return _double(np.where(codes & _SIGN_BIT[4], -magnitude, magnitude))


def _decode_fp8(codes: Array) -> Array:
    """Read e4m3: one sign bit, four exponent bits (bias 7), three mantissa bits."""
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = np.ldexp(1.0 + mantissa / 8.0, exponent - 7)
    magnitude = np.where(exponent == 0, np.ldexp(mantissa / 8.0, -6), normal)
    return _double(np.where(codes & _SIGN_BIT[8], -magnitude, magnitude))
