"""What a caller can know about a loaded model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine_core.backend import BackendReport, MemoryReport
    from engine_core.kernels import KernelReport
    from engine_core.spec import Capabilities

__all__ = ["ClientInfo", "PromptCacheInfo"]


@attrs.frozen(kw_only=True)
class PromptCacheInfo:
    """The pool of stored prompt prefixes in plain data.

    Attributes:
        entries: Stored prefixes.
        boundaries: Those of them that end where a conversation can be continued.
        bytes: What their layers hold, every shared buffer counted once.
        budget_bytes: Bound on ``bytes`` between requests; 0 when there is no pool.
        ttl_seconds: Age at which an unused prefix is dropped, ``None`` for no such bound.
        hits: Requests that started from a stored prefix.
        misses: Requests that found none.
        reused_tokens: Prompt tokens served by all hits together.
        evicted: Prefixes dropped for want of room or by age.
        refused: Prefixes that were larger than the whole budget.
        failed: Prefixes that could not be stored or trusted because the device failed.
    """

    entries: int = 0
    boundaries: int = 0
    bytes: int = 0
    budget_bytes: int = 0
    ttl_seconds: float | None = None
    hits: int = 0
    misses: int = 0
    reused_tokens: int = 0
    evicted: int = 0
    refused: int = 0
    failed: int = 0


@attrs.frozen(kw_only=True)
class ClientInfo:
    """A loaded model in plain data.

    Attributes:
        family: Family name.
        model_type: ``model_type`` of ``config.json``, empty when absent.
        plugin: The owning plugin and its distribution.
        versions: Distribution -> version: the core and the owning plugin's.
        capabilities: What the checkpoint was shown to support.
        has_tokenizer: Whether the checkpoint has a tokenizer; without one only token ids work.
        has_template: Whether a chat template is in use.
        context_length: Longest context (tokens).
        compute_dtype: Dtype of activations.
        eos_token_ids: Every id that ends a reply, ascending.
        vocab_size: Rows of the embedding (tokens).
        hidden_size: Width of the hidden states.
        layer_count: Number of layers.
        parameter_count: Numbers in the weights, packed ones unpacked.
        weight_bytes: Memory of the weights (bytes).
        quantization: Summary of packed layers, such as ``"affine 4 bits group 64 x 210"``;
            empty when none is packed.
        backend: Device, MLX version and BLAS.
        memory: The allocator after the last request.
        kernels: Custom kernels used so far: which run, which were replaced by plain operations.
        fingerprint: Identity of the loaded model, SHA-256 in hexadecimal.
        load_seconds: Time the load took.
        prompt_cache: The pool of stored prompt prefixes after the last request.
        notes: Remarks worth knowing.
    """

    family: str
    model_type: str
    plugin: str
    versions: Mapping[str, str]
    capabilities: Capabilities
    has_tokenizer: bool
    has_template: bool
    context_length: int
    compute_dtype: str
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    hidden_size: int
    layer_count: int
    parameter_count: int
    weight_bytes: int
    quantization: str
    backend: BackendReport
    memory: MemoryReport
    kernels: tuple[KernelReport, ...]
    fingerprint: str
    load_seconds: float
    prompt_cache: PromptCacheInfo = attrs.field(factory=PromptCacheInfo)
    notes: tuple[str, ...] = ()
