"""Frozen records that cross the hook boundary; new fields always get defaults.

Importing this module does not import MLX, so that plugins stay import-light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import attrs

from engine_core.weight_plan import (
    Concat,
    Drop,
    Permute,
    Rename,
    Rule,
    Split,
    Stack,
    TensorInfo,
    WeightPlan,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from engine_core.messages import Message, ToolDecl
    from engine_core.step import BuildContext, CausalLM

__all__ = [
    "Architecture",
    "Concat",
    "Drop",
    "FamilyInfo",
    "Full",
    "LayerSpec",
    "MediaPlan",
    "MtpPlan",
    "NormFold",
    "Permute",
    "Proposal",
    "ReasoningMarkers",
    "Recurrent",
    "Rename",
    "Rule",
    "Shared",
    "Sliding",
    "Split",
    "Stack",
    "TemplateDialect",
    "TemplateInput",
    "TensorInfo",
    "ToolSyntax",
    "WeightPlan",
]


def _positive(_: object, attribute: attrs.Attribute[int], value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        msg = f"{attribute.name}: must be a positive integer, got {value!r}"
        raise ValueError(msg)


def _names(values: Iterable[str]) -> frozenset[str]:
    """Freeze names; a lone string would silently become the set of its letters."""
    if isinstance(values, str):
        msg = f"names: must be a collection of strings, got {values!r}"
        raise TypeError(msg)
    return frozenset(values)


@attrs.frozen(kw_only=True)
class FamilyInfo:
    """Which checkpoints a plugin owns and what it prefers.

    Attributes:
        name: Family name, equal to the entry-point name.
        model_types: ``config.json`` ``model_type`` values it owns.
        architectures: ``architectures`` entries it owns when ``model_type`` is absent.
        dialects: Template dialect names, most preferred first.
        tool_syntaxes: Tool syntax names, most preferred first.
        text_only: Whether the family never has media.
    """

    name: str = attrs.field(validator=attrs.validators.matches_re(r"[a-z][a-z0-9_-]{0,63}"))
    model_types: frozenset[str] = attrs.field(converter=_names)
    architectures: frozenset[str] = attrs.field(converter=_names, default=frozenset())
    dialects: tuple[str, ...] = ("chatml",)
    tool_syntaxes: tuple[str, ...] = ()
    text_only: bool = True


@attrs.frozen(kw_only=True)
class NormFold:
    """Add a constant to zero-centred norm scales, once, at load.

    Attributes:
        keys: Exact *mapped* keys to fold; each must exist and have one dimension.
        offset: Added in float32; the result has the compute dtype. Dimensionless.
    """

    keys: frozenset[str] = attrs.field(converter=_names, validator=attrs.validators.min_len(1))
    offset: float = 1.0


@attrs.frozen(kw_only=True)
class Full:
    """A full-attention layer's cache: keys and values of every position.

    Attributes:
        kv_heads: K.
        head_dim: D of the keys.
        value_dim: D of the values; ``None`` means ``head_dim``.
    """

    kv_heads: int = attrs.field(validator=_positive)
    head_dim: int = attrs.field(validator=_positive)
    value_dim: int | None = None


@attrs.frozen(kw_only=True)
class Sliding:
    """A sliding-window layer's cache: the last ``window`` positions, self included.

    Attributes:
        window: Positions one query sees, itself included (tokens).
        kv_heads: K.
        head_dim: D of the keys.
        value_dim: D of the values; ``None`` means ``head_dim``.
    """

    window: int = attrs.field(validator=_positive)
    kv_heads: int = attrs.field(validator=_positive)
    head_dim: int = attrs.field(validator=_positive)
    value_dim: int | None = None


@attrs.frozen(kw_only=True)
class Recurrent:
    """A recurrent layer's state: a tuple of replaced arrays, zero at the start.

    Attributes:
        shapes: Shape of each slot without the batch axis.
        dtypes: Dtype name of each slot, ``"compute"`` for the compute dtype.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    def __attrs_post_init__(self) -> None:
        """Refuse a record whose two tuples disagree."""
        if len(self.shapes) != len(self.dtypes):
            msg = (
                "recurrent layer: shapes and dtypes must have one length, "
                f"got {len(self.shapes)} and {len(self.dtypes)}"
            )
            raise ValueError(msg)


@attrs.frozen(kw_only=True)
class Shared:
    """A layer that owns no state and reads the cache of an earlier layer.

    Attributes:
        donor: Index of the layer whose cache it reads.
    """

    donor: int


LayerSpec = Full | Sliding | Recurrent | Shared
"""What a layer remembers, as data; core builds the caches from it."""


def _layers(values: Iterable[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Keep what is walked more than once: a plugin may give a generator."""
    return tuple(values)


@attrs.frozen(kw_only=True)
class Architecture:
    """A model's structure, known before any weight is read.

    Attributes:
        build: Makes the model with placeholder parameters; called on the worker thread.
        layers: One cache spec a layer, in order.
        vocab_size: V, rows of the embedding.
        hidden_size: H.
        context_length: Longest context the model allows (tokens).
        keep_float32: Exact mapped keys that stay float32 whatever the compute dtype.
        extra_eos: Token texts that end a reply beside the configured ids.
        notes: Remarks for ``client.info`` (text-only degrade and the like).
    """

    build: Callable[[BuildContext], CausalLM] = attrs.field(
        validator=attrs.validators.is_callable()
    )
    layers: tuple[LayerSpec, ...] = attrs.field(converter=_layers)
    vocab_size: int = attrs.field(validator=_positive)
    hidden_size: int = attrs.field(validator=_positive)
    context_length: int = attrs.field(validator=_positive)
    keep_float32: frozenset[str] = attrs.field(converter=_names, default=frozenset())
    extra_eos: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        """Refuse a shared layer whose donor is not an earlier owner."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer, Shared) and not (
                0 <= layer.donor < index and isinstance(self.layers[layer.donor], (Full, Sliding))
            ):
                msg = f"layer {index}: donor must be an earlier attention layer, got {layer.donor}"
                raise ValueError(msg)


@attrs.frozen(kw_only=True)
class MtpPlan:
    """A multi-token-prediction module: its exact layout and how to build it.

    Attributes:
        expected: Mapped key -> header facts; the checkpoint must match exactly.
        build: Makes the module beside a built backbone.
        implementation_id: Names this implementation in certificates.
        certificates: Readable resources holding shipped certificates.
        reason: Why MTP is unavailable although tensors are present; empty when it is available.
    """

    expected: Mapping[str, TensorInfo]
    build: Callable[[CausalLM], Any] | None = None
    implementation_id: str = ""
    certificates: tuple[Any, ...] = ()
    reason: str = ""


@attrs.frozen(kw_only=True)
class MediaPlan:
    """Media towers: their tensors (never materialised while unused) and what they serve.

    Attributes:
        modalities: ``"image"``, ``"audio"``.
        expected: Mapped key -> header facts of tower tensors. Checked by shape, left unread
            until a processor is attached.
        placeholders: Modality -> placeholder token text.
    """

    modalities: frozenset[str] = attrs.field(converter=_names, default=frozenset())
    expected: Mapping[str, TensorInfo] = attrs.field(factory=dict)
    placeholders: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class ReasoningMarkers:
    """The pair of texts around a reasoning span at the start of a reply.

    Attributes:
        open: Opening marker.
        close: Closing marker.
    """

    open: str = attrs.field(validator=attrs.validators.min_len(1))
    close: str = attrs.field(validator=attrs.validators.min_len(1))


@attrs.frozen(kw_only=True)
class TemplateInput:
    """What a dialect hands to the template engine.

    Attributes:
        messages: Plain JSON-like dicts in the shape this template family reads.
        tools: Plain JSON-like tool declarations, ``None`` when there are none.
        variables: Further template variables.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class TemplateDialect:
    """How one family of chat templates wants its input and writes its spans.

    Attributes:
        name: Dialect name, unique over all plugins.
        prepare: ``(messages, tools, options) -> TemplateInput``; pure.
        reasoning: Reasoning markers, ``None`` when the dialect has none. Of all control tokens only
            those that spell them, or a call, act inside an assistant's text.
        end_of_turn: Token texts that close a turn; each is an EOS candidate, decided by rendering.
    """

    name: str = attrs.field(validator=attrs.validators.min_len(1))
    prepare: Callable[[Sequence[Message], Sequence[ToolDecl], Mapping[str, Any]], TemplateInput]
    reasoning: ReasoningMarkers | None = None
    end_of_turn: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Proposal:
    """A tool call a model wrote: untrusted text until core accepts it.

    Attributes:
        span: Half-open character range in the parsed text, markers included.
        name: Function name as written.
        readings: Grammatical readings of the smallest class; each maps a parameter to its raw
            text (``str``) or to an already typed JSON value wrapped in ``Typed``.
    """

    span: tuple[int, int]
    name: str
    readings: tuple[Mapping[str, Any], ...]


@attrs.frozen
class Typed:
    """A JSON value whose type the markup itself states (as opposed to raw text).

    Attributes:
        value: ``None``, ``bool``, ``int``, ``float``, ``str``, list or dict.
    """

    value: Any


class ToolSyntax(Protocol):
    """A tool-call markup: where it starts and ends, and how to read a completed text.

    A syntax may also have two optional attributes. ``delimiters: tuple[str, ...]`` are texts inside
    calls that stay part of the reply while tools are advertised, even when a tokenizer declares
    them special (and would hide them); markers and delimiters are what stays a control token in an
    assistant's earlier turns. ``literals: Mapping[str, Any]`` are spellings of ``true``,
    ``false`` and ``null`` that its templates use beside those of JSON; they count only where the
    schema allows no string.
    """

    @property
    def name(self) -> str:
        """Syntax name, unique over all plugins."""
        ...

    @property
    def markers(self) -> tuple[tuple[str, str], ...]:
        """``(open, close)`` pairs; empty when a call is the whole reply."""
        ...

    @property
    def probe_rounds(self) -> int:
        """Call/result round trips the capability probe needs: 1 or 2."""
        ...

    def parse(self, text: str, tools: Sequence[ToolDecl]) -> tuple[Proposal, ...]:
        """Read a completed text; never raises for any text.

        Args:
            text: The answer part of a finished reply.
            tools: Advertised tools.

        Returns:
            Proposals in order; text outside their spans stays visible.
        """
        ...
