"""The frozen identity of a loaded model: hook answers, capabilities and fingerprint."""

from __future__ import annotations

import hashlib
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs

from engine_core.errors import CapabilityUnavailable, PluginError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine_core.checkpoint.config import CheckpointConfig
    from engine_core.family import Architecture, MediaPlan, MtpPlan, NormFold, TensorInfo
    from engine_core.plugins import Owner, Plugins
    from engine_core.quantization import QuantizationPlan
    from engine_core.weight_plan import ResolvedWeights, WeightPlan

__all__ = [
    "Capabilities",
    "Identity",
    "ModelSpec",
    "SpecAnswers",
    "compute_fingerprint",
    "describe_quantization",
    "find_owner",
    "resolve_spec_answers",
]

_NAMES = {
    "chat": "task:chat",
    "translation": "task:translation",
    "system_prompt": "interaction:system_prompt",
    "tools": "interaction:tools",
    "reasoning_history": "interaction:reasoning_history",
    "thinking_toggle": "interaction:thinking_toggle",
    "images": "media:images",
    "audio": "media:audio",
    "mtp": "acceleration:mtp",
}
_FINGERPRINT_FORMAT = b"engine fingerprint 1"


@attrs.frozen(kw_only=True)
class Capabilities:
    """What a checkpoint was shown to support, by rendering its template and by its tensors.

    Attributes:
        chat: User and assistant turns.
        translation: Translation turns.
        system_prompt: System turns.
        tools: Tool declarations, calls and results.
        tool_syntax: Name of the syntax that the template's calls are written in.
        reasoning_history: Reasoning of earlier turns.
        thinking_toggle: Switching of reasoning.
        images: Images on user turns.
        audio: Sound on user turns.
        mtp: Certified multi-token prediction.
        reasons: Capability name (the field's) -> why it is missing.
    """

    chat: bool = False
    translation: bool = False
    system_prompt: bool = False
    tools: bool = False
    tool_syntax: str | None = None
    reasoning_history: bool = False
    thinking_toggle: bool = False
    images: bool = False
    audio: bool = False
    mtp: bool = False
    reasons: Mapping[str, str] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        """Refuse a record that contradicts itself."""
        if self.tools != (self.tool_syntax is not None):
            msg = f"capabilities: tools need a syntax, got {self.tools} with {self.tool_syntax!r}"
            raise ValueError(msg)
        for name in self.reasons:
            if name not in _NAMES or getattr(self, name):
                msg = f"capabilities: a reason must belong to a missing capability, got {name!r}"
                raise ValueError(msg)

    def reason(self, name: str) -> str:
        """Say why a capability is missing.

        Args:
            name: Field name, e.g. ``"tools"``.

        Returns:
            The reason, empty when the capability is there.
        """
        if getattr(self, name):
            return ""
        return self.reasons.get(name, "nothing shows that it is supported")

    def require(self, name: str, *, hint: str = "") -> None:
        """Fail when a capability is missing.

        Args:
            name: Field name, e.g. ``"tools"``.
            hint: What the caller can do.

        Raises:
            CapabilityUnavailable: It is missing.
        """
        reason = self.reason(name)
        if reason:
            raise CapabilityUnavailable(_NAMES[name], reason, hint=hint)


@attrs.frozen(kw_only=True)
class SpecAnswers:
    """The owner's answers to the five questions, checked against the checkpoint's headers.

    Attributes:
        weight_plan: Rules from checkpoint tensors to parameters.
        weights: The plan applied to the checkpoint's tensors.
        norm_fold: Norm scales stored as deltas.
        architecture: Structure of the model.
        mtp: Multi-token-prediction module.
        media: Media towers.
    """

    weight_plan: WeightPlan
    weights: ResolvedWeights
    norm_fold: NormFold | None
    architecture: Architecture
    mtp: MtpPlan | None
    media: MediaPlan | None


@attrs.frozen(kw_only=True)
class ModelSpec:
    """All that a loaded model is, fixed for as long as it is loaded.

    Attributes:
        family: Family name.
        model_type: ``model_type`` of ``config.json``, empty when absent.
        plugin: The owning plugin and its distribution.
        answers: The owner's answers.
        capabilities: What the checkpoint was shown to support.
        fingerprint: SHA-256 in hexadecimal, see :class:`Identity`.
    """

    family: str
    model_type: str
    plugin: str
    answers: SpecAnswers
    capabilities: Capabilities
    fingerprint: str


@attrs.frozen(kw_only=True)
class Identity:
    """All that makes two loaded models the same one; every digest is SHA-256 in hexadecimal.

    No field has a default, so that a loader cannot forget one.

    Attributes:
        config: Digest of ``config.json``.
        shards: Shard name -> digest.
        tokenizer: Artifact name -> digest (``tokenizer.json``, ``tokenizer_config.json``, ...).
        template: Template name -> digest of its source.
        adapters: Adapter name -> digest.
        family: Family name and the distribution that brings it.
        family_version: That distribution's version.
        core_version: This distribution's version.
        compute_dtype: Dtype of activations.
        quantization: ``describe_quantization`` of what is held in memory.
    """

    config: str
    shards: Mapping[str, str]
    tokenizer: Mapping[str, str]
    template: Mapping[str, str]
    adapters: Mapping[str, str]
    family: str
    family_version: str
    core_version: str
    compute_dtype: str
    quantization: str

    def fingerprint(self) -> str:
        """Reduce the identity to one text.

        Returns:
            SHA-256 in hexadecimal, equal in every process.
        """
        parts: dict[str, str] = {}
        for name, value in attrs.asdict(self, recurse=False).items():
            if isinstance(value, str):
                parts[name] = value
            else:
                parts[name] = compute_fingerprint(value)
        return compute_fingerprint(parts)


def compute_fingerprint(parts: Mapping[str, str]) -> str:
    """Hash named texts, independent of their order.

    Names and values are length-prefixed, so that no two different mappings give the same bytes.

    Args:
        parts: Name -> value.

    Returns:
        SHA-256 in hexadecimal.
    """
    digest = hashlib.sha256(_FINGERPRINT_FORMAT)
    for pair in sorted(parts.items()):
        for text in pair:
            # A file name may hold bytes that are no UTF-8, which Python keeps as surrogates.
            data = text.encode("utf-8", errors="surrogatepass")
            digest.update(len(data).to_bytes(8, "big"))
            digest.update(data)
    return digest.hexdigest()


def describe_quantization(plan: QuantizationPlan) -> str:
    """Write a quantization plan as one canonical text, for the fingerprint.

    Args:
        plan: What is packed and how.

    Returns:
        A digest of the plan, empty when nothing is packed.
    """
    layers = {
        path: f"{spec.mode}:{spec.bits}:{spec.group_size}" for path, spec in plan.layers.items()
    }
    return compute_fingerprint(layers) if layers else ""


def resolve_spec_answers(
    plugins: Plugins,
    owner: Owner,
    config: CheckpointConfig,
    tensors: Mapping[str, TensorInfo],
    processor: CheckpointConfig,
) -> SpecAnswers:
    """Ask the owner its five questions, each exactly once, in their documented order.

    Args:
        plugins: Loaded plugins.
        owner: Owner of the checkpoint.
        config: Parsed ``config.json``.
        tensors: Checkpoint-verbatim key -> header facts.
        processor: Parsed processor configuration, empty when there is none.

    Returns:
        The answers.

    Raises:
        PluginError: An answer is missing, unusable or contradicts the checkpoint.
        CheckpointError: The weight plan does not fit the checkpoint's tensors.
    """
    plan = plugins.weight_plan(owner, config, MappingProxyType(dict(tensors)))
    weights = plan.resolve(tensors)
    mapped = MappingProxyType(dict(weights.infos))
    fold = plugins.norm_fold(owner, config, MappingProxyType(dict(weights.stored)))
    if fold is not None:
        _check_fold(owner, fold, weights)
    return SpecAnswers(
        weight_plan=plan,
        weights=weights,
        norm_fold=fold,
        architecture=plugins.architecture(owner, config, mapped),
        mtp=plugins.mtp(owner, config, mapped),
        media=plugins.media(owner, config, mapped, processor),
    )


def _check_fold(owner: Owner, fold: NormFold, weights: ResolvedWeights) -> None:
    for key in sorted(fold.keys):
        info = weights.infos.get(key)
        if info is None or len(info.shape) != 1:
            got = "no such tensor" if info is None else f"shape {info.shape}"
            raise PluginError(
                f"plugin {owner.plugin}: engine_norm_fold must name tensors of one dimension, "
                f"got {key!r} ({got})",
                code="plugin.answer",
                hint="report this to the plugin's author",
            )


def find_owner(plugins: Plugins, config: CheckpointConfig, family: str | None = None) -> Owner:
    """Find who owns a checkpoint from its ``config.json``.

    Args:
        plugins: Plugins to choose from.
        config: The file.
        family: Family to use when several claim the checkpoint.

    Returns:
        The owning plugin and its family.

    Raises:
        ConfigError: ``architectures`` or ``model_type`` is malformed.
        PluginError: Nobody, or more than one plugin, owns it.
    """
    architectures = config.get("architectures", [])
    if not isinstance(architectures, list) or not all(
        isinstance(name, str) for name in architectures
    ):
        raise config.error("architectures", "must be a list of names", architectures)
    model_type = config.string("model_type", default=None)
    return plugins.resolve_owner(model_type, architectures, family)
