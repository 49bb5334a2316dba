"""Decide from config and header facts how each layer is packed.

What lies in the file decides whether a layer is packed (it has scales) and whether a spec is
possible at all; the config chooses among the possible ones. The paths of per-layer overrides go
through the same weight plan as the tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs

from engine_core.errors import CheckpointError, ConfigError
from engine_core.limits import LIMITS
from engine_core.quantization import MODES, WORD_BITS, QuantizationPlan, QuantizationSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine_core.checkpoint.config import CheckpointConfig
    from engine_core.limits import Limits
    from engine_core.weight_plan import TensorInfo, WeightPlan

__all__ = ["plan_quantization"]

_FIELDS: Final = frozenset({"mode", "bits", "group_size"})
_FLOATING: Final = frozenset({"F16", "BF16", "F32"})
_DEFAULT_BITS: Final = 4
_DEFAULT_GROUP: Final = 64
_HINT: Final = "config.json and the weight files are not of one upload"


@attrs.frozen(kw_only=True)
class _Settings:
    """The config's word on quantization: the default and what deviates, by mapped path."""

    default: QuantizationSpec | None = None
    layers: Mapping[str, QuantizationSpec | None] = attrs.field(factory=dict)
    unknown: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class _Packed:
    """Shapes of one packed layer: words and groups of a row, and whether scales are floating."""

    path: str
    words: int
    groups: int
    affine: bool

    def fits(self, spec: QuantizationSpec, width: int | None) -> bool:
        values = self.groups * spec.group_size
        return (
            spec.affine == self.affine
            and self.words * WORD_BITS == values * spec.bits
            and (width is None or width == values)
        )


def plan_quantization(
    config: CheckpointConfig,
    plan: WeightPlan,
    infos: Mapping[str, TensorInfo],
    *,
    widths: Mapping[str, int] | None = None,
    limits: Limits = LIMITS,
) -> QuantizationPlan:
    """Say how every packed layer is packed.

    Args:
        config: Parsed ``config.json``.
        plan: The checkpoint's weight plan.
        infos: Mapped key -> header facts as mapped.
        widths: Mapped module path -> values in a row of the unpacked weight, where known. It
            settles what the packed shapes alone leave open.
        limits: Bounds on overrides.

    Returns:
        The plan; empty for a dense checkpoint.

    Raises:
        ConfigError: The config's entry is malformed or names a foreign method.
        CheckpointError: Code ``checkpoint.quantization``; tensors contradict it.
    """
    settings = _read_settings(config, plan, infos, limits)
    layers: dict[str, QuantizationSpec] = {}
    for key in infos:
        path, _, part = key.rpartition(".")
        if part == "scales":
            packed = _packed(path, infos)
            layers[path] = _choose(packed, settings, (widths or {}).get(path))
        elif part == "weight" and infos[key].dtype == "U32" and f"{path}.scales" not in infos:
            raise _contradiction(f"{path}.scales", "must stand beside a packed weight, got none")
    notes = tuple(
        f"config.json: the quantization override {path!r} matches no tensor"
        for path in settings.unknown
    )
    return QuantizationPlan(layers, notes)


def _contradiction(key: str, rule: str) -> CheckpointError:
    return CheckpointError(f"tensor {key!r}: {rule}", code="checkpoint.quantization", hint=_HINT)


def _packed(path: str, infos: Mapping[str, TensorInfo]) -> _Packed:
    """Check that the tensors of one layer belong together."""
    weight, scales = infos.get(f"{path}.weight"), infos[f"{path}.scales"]
    biases = infos.get(f"{path}.biases")
    if weight is None or weight.dtype != "U32" or len(weight.shape) < 2:
        found = "none" if weight is None else f"{weight.dtype} {list(weight.shape)}"
        raise _contradiction(f"{path}.weight", f"must be U32 rows beside its scales, got {found}")
    if len(scales.shape) != len(weight.shape) or scales.shape[:-1] != weight.shape[:-1]:
        raise _contradiction(
            f"{path}.scales",
            f"must have the rows of its weight {list(weight.shape)}, got {list(scales.shape)}",
        )
    affine = scales.dtype in _FLOATING
    if not affine and scales.dtype != "U8":
        raise _contradiction(f"{path}.scales", f"must be floating or U8, got {scales.dtype}")
    if affine != (biases is not None):
        rule = "must stand beside floating scales" if affine else "must not stand beside U8 scales"
        raise _contradiction(f"{path}.biases", rule)
    if biases is not None and (biases.shape != scales.shape or biases.dtype not in _FLOATING):
        raise _contradiction(
            f"{path}.biases",
            f"must be floating {list(scales.shape)} as its scales, "
            f"got {biases.dtype} {list(biases.shape)}",
        )
    if not weight.shape[-1] or not scales.shape[-1]:
        raise _contradiction(f"{path}.weight", "must not be empty")
    return _Packed(path=path, words=weight.shape[-1], groups=scales.shape[-1], affine=affine)


def _choose(packed: _Packed, settings: _Settings, width: int | None) -> QuantizationSpec:
    shape = f"{packed.words} words and {packed.groups} scales a row"
    if width is not None:
        shape += f" of {width} values"
    if packed.path in settings.layers:
        spec = settings.layers[packed.path]
        if spec is None:
            raise _contradiction(f"{packed.path}.scales", "must be absent, config.json says false")
        if not packed.fits(spec, width):
            raise _contradiction(f"{packed.path}.weight", f"must fit {spec}, got {shape}")
        return spec
    if settings.default is not None and packed.fits(settings.default, width):
        return settings.default
    return _infer(packed, settings.default, width, shape)


def _infer(
    packed: _Packed, default: QuantizationSpec | None, width: int | None, shape: str
) -> QuantizationSpec:
    """Find the spec of a layer that the config does not describe."""
    candidates = [
        spec
        for mode in MODES.values()
        for bits in mode.bits
        for group_size in mode.group_sizes
        if packed.fits(spec := QuantizationSpec(mode.name, bits, group_size), width)
    ]
    if len(candidates) > 1:
        group_size = default.group_size if default else _DEFAULT_GROUP
        bits = default.bits if default else _DEFAULT_BITS
        candidates = (
            [spec for spec in candidates if spec.group_size == group_size]
            or [spec for spec in candidates if spec.bits == bits]
            or candidates
        )
    if len(candidates) != 1:
        raise _contradiction(
            f"{packed.path}.weight",
            f"must fit one quantization, got {shape} which fit {len(candidates)}",
        )
    return candidates[0]


def _read_settings(
    config: CheckpointConfig,
    plan: WeightPlan,
    infos: Mapping[str, TensorInfo],
    limits: Limits,
) -> _Settings:
    found = next(
        (
            holder.section(name)
            for holder in (config, config.section("text_config"))
            for name in ("quantization", "quantization_config")
            if name in holder
        ),
        None,
    )
    if found is None:
        return _Settings()
    method = found.get("quant_method")
    if method is not None:
        raise ConfigError(
            f"config.json: {found.path}.quant_method must be absent (MLX packing), "
            f"got {str(method)[:80]!r}",
            code="config.quant_method",
            hint="convert the checkpoint to MLX's own quantization, or load the unquantized one",
        )
    return _parse_settings(found, plan, infos, limits)


def _parse_settings(
    found: CheckpointConfig,
    plan: WeightPlan,
    infos: Mapping[str, TensorInfo],
    limits: Limits,
) -> _Settings:
    overrides = {
        path: value
        for path, value in found.data.items()
        if isinstance(value, bool) or not (path in _FIELDS or isinstance(value, (str, int, float)))
    }
    if len(overrides) > limits.quantization_overrides:
        raise ConfigError(
            f"config.json: {found.path} must have at most {limits.quantization_overrides} "
            f"overrides, got {len(overrides)}"
        )
    default = _parse_spec(found, found.data) if _FIELDS & found.data.keys() else None
    layers: dict[str, QuantizationSpec | None] = {}
    unknown: list[str] = []
    for path, value in overrides.items():
        if len(path.encode()) > limits.quantization_path_bytes:
            raise found.error(
                path[:80], f"must have at most {limits.quantization_path_bytes} bytes"
            )
        if value is True:
            continue
        spec = None if value is False else _parse_override(found, path, value)
        mapped = plan.map_path(path)
        for one in mapped:
            if one in layers and layers[one] != spec:
                raise found.error(path, f"must agree with the other override of {one!r}")
            layers[one] = spec
        if mapped and spec and not any(f"{one}.weight" in infos for one in mapped):
            unknown.append(path)
    return _Settings(default=default, layers=layers, unknown=tuple(unknown))


def _parse_override(found: CheckpointConfig, path: str, value: Any) -> QuantizationSpec:
    if not isinstance(value, dict) or not value.keys() <= _FIELDS:
        raise found.error(path, f"must be false or an object of {sorted(_FIELDS)}", value)
    return _parse_spec(found.section(path), value)


def _parse_spec(section: CheckpointConfig, value: Mapping[str, Any]) -> QuantizationSpec:
    name = value.get("mode")
    mode = MODES.get(name if isinstance(name, str) else "affine")
    if mode is None or (name is not None and not isinstance(name, str)):
        raise section.error("mode", f"must be one of {sorted(MODES)}", name)
    bits, group_size = value.get("bits"), value.get("group_size")
    if bits is None:
        bits = _DEFAULT_BITS if _DEFAULT_BITS in mode.bits else mode.bits[0]
    if group_size is None:
        group_size = _DEFAULT_GROUP if mode.affine else mode.group_sizes[0]
    try:
        return QuantizationSpec(mode.name, bits, group_size)
    except ValueError as exc:
        raise ConfigError(f"config.json: {section.path}: {exc}") from exc
