"""From a directory to everything a session owns, in the order that fails cheapest first."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import attrs

from engine_core import backend
from engine_core.cache.build import build_caches
from engine_core.cache.pool import make_pool
from engine_core.checkpoint.load import choose_compute_dtype, load_model
from engine_core.checkpoint.reader import read_checkpoint
from engine_core.errors import CapabilityUnavailable
from engine_core.info import ClientInfo
from engine_core.kernels import KernelRegistry
from engine_core.nn.activations import computes_on_cpu
from engine_core.plugins import Plugins
from engine_core.spec import (
    Identity,
    ModelSpec,
    describe_quantization,
    find_owner,
    resolve_spec_answers,
)
from engine_core.text_loading import collect_eos_ids, load_prompter

if TYPE_CHECKING:
    import mlx.core as mx

    from engine_core.backend import AllocatorHold
    from engine_core.cache.base import LayerCache
    from engine_core.cache.pool import PromptPool
    from engine_core.checkpoint.load import LoadedModel
    from engine_core.checkpoint.reader import Checkpoint
    from engine_core.limits import Limits
    from engine_core.load_options import LoadOptions
    from engine_core.plugins import Owner
    from engine_core.prompting import Prompter
    from engine_core.spec import SpecAnswers
    from engine_core.step import CausalLM

__all__ = ["Loaded", "load_checkpoint"]


@attrs.frozen(kw_only=True, eq=False)
class Loaded:
    """What a session owns.

    Attributes:
        spec: Identity and answers.
        model: The family's model.
        compute_dtype: Dtype of activations.
        prompter: Turns conversations and texts into ids.
        eos_token_ids: Ids that end a reply.
        kernels: Custom kernels of the model.
        info: The same for the caller.
        limits: Bounds.
        pool: Stored prompt prefixes, ``None`` when there are to be none.
        allocator: The process's allocator limit, held as long as the model.
    """

    spec: ModelSpec
    model: CausalLM
    compute_dtype: mx.Dtype
    prompter: Prompter
    eos_token_ids: frozenset[int]
    kernels: KernelRegistry
    info: ClientInfo
    limits: Limits
    pool: PromptPool | None
    allocator: AllocatorHold

    def new_caches(self) -> list[LayerCache]:
        """Make empty caches.

        Returns:
            One a layer.
        """
        return build_caches(self.spec.answers.architecture.layers, self.compute_dtype)


def load_checkpoint(options: LoadOptions) -> Loaded:
    """Load everything.

    Args:
        options: What to load and how.

    Returns:
        What a session owns.

    Raises:
        EngineError: Whatever kept the checkpoint from loading.
    """
    started = time.perf_counter()
    limits = options.limits
    pool = make_pool(options.prompt_cache_bytes, options.prompt_cache_ttl, limits)
    backend.load_mlx()
    allocator = backend.AllocatorHold(_allocator_cache_bytes(options))
    try:
        return _load(options, allocator, pool, started)
    except BaseException:
        allocator.release()
        raise


def _allocator_cache_bytes(options: LoadOptions) -> int:
    """Say how much freed memory MLX may keep.

    It reuses a buffer only for nearly the same size, so with every new length of a prompt it keeps
    more and asks for more. On a CPU the C library does better: follow-up turns took 0.6 to 0.9 of
    the time without MLX's store, and a process of 6.4 GB had 2.4 GB.
    """
    if options.allocator_cache_bytes is not None:
        return options.allocator_cache_bytes
    return 0 if computes_on_cpu() else options.limits.allocator_cache_bytes


def _load(
    options: LoadOptions, allocator: AllocatorHold, pool: PromptPool | None, started: float
) -> Loaded:
    limits = options.limits
    options.check_cancelled()
    plugins = options.plugins if options.plugins is not None else Plugins.load()
    with read_checkpoint(options.path, limits) as checkpoint:
        owner = find_owner(plugins, checkpoint.config, options.family)
        answers = resolve_spec_answers(
            plugins, owner, checkpoint.config, checkpoint.tensors, checkpoint.processor_config
        )
        if options.certificates:
            reason = answers.mtp.reason if answers.mtp is not None else "it has no such module"
            raise CapabilityUnavailable("acceleration:mtp", reason)
        prompter = load_prompter(
            checkpoint,
            plugins.template_dialects(owner),
            plugins.tool_syntaxes(owner),
            options.template,
            limits,
        )
        eos = collect_eos_ids(checkpoint, answers.architecture, prompter, options.extra_eos_tokens)
        kernels = KernelRegistry()
        filled = load_model(
            checkpoint,
            answers,
            kernels=kernels,
            compute_dtype=choose_compute_dtype(options.compute_dtype, answers.weights.infos),
            quantized_weights=options.quantized_weights,
            on_progress=options.report,
            limits=limits,
        )
        spec = _specify(checkpoint, owner, answers, prompter, filled)
        notes = (*checkpoint.notes, *answers.architecture.notes, *filled.notes)
    return Loaded(
        spec=spec,
        model=filled.model,
        compute_dtype=filled.compute_dtype,
        prompter=prompter,
        eos_token_ids=eos,
        kernels=kernels,
        limits=limits,
        pool=pool,
        allocator=allocator,
        info=_describe(spec, owner, prompter, eos, filled, started, notes),
    )


def _specify(
    checkpoint: Checkpoint,
    owner: Owner,
    answers: SpecAnswers,
    prompter: Prompter,
    filled: LoadedModel,
) -> ModelSpec:
    plugin = owner.plugin
    digests = checkpoint.digests
    identity = Identity(
        config=digests["config.json"],
        shards=filled.digests,
        tokenizer={name: digest for name, digest in digests.items() if name != "config.json"},
        template=prompter.template_digests,
        adapters={},
        family=f"{owner.family.name} of {plugin.distribution}",
        family_version=plugin.version,
        core_version=version("engine-core"),
        compute_dtype=_dtype_name(filled.compute_dtype),
        quantization=describe_quantization(filled.quantization),
    )
    return ModelSpec(
        family=owner.family.name,
        model_type=checkpoint.config.string("model_type", default=""),
        plugin=str(plugin),
        answers=answers,
        capabilities=prompter.capabilities,
        fingerprint=identity.fingerprint(),
    )


def _describe(
    spec: ModelSpec,
    owner: Owner,
    prompter: Prompter,
    eos: frozenset[int],
    filled: LoadedModel,
    started: float,
    notes: tuple[str, ...],
) -> ClientInfo:
    architecture = spec.answers.architecture
    return ClientInfo(
        family=spec.family,
        model_type=spec.model_type,
        plugin=spec.plugin,
        versions={
            "engine-core": version("engine-core"),
            owner.plugin.distribution: owner.plugin.version,
        },
        capabilities=spec.capabilities,
        has_tokenizer=prompter.tokenizer is not None,
        has_template=prompter.template is not None,
        context_length=architecture.context_length,
        compute_dtype=_dtype_name(filled.compute_dtype),
        eos_token_ids=tuple(sorted(eos)),
        vocab_size=architecture.vocab_size,
        hidden_size=architecture.hidden_size,
        layer_count=len(architecture.layers),
        parameter_count=_count_parameters(filled),
        weight_bytes=sum(array.nbytes for _, array in _parameters(filled)),
        quantization=filled.quantization.summary(),
        backend=backend.backend_report(),
        memory=backend.memory_report(),
        kernels=(),
        fingerprint=spec.fingerprint,
        load_seconds=time.perf_counter() - started,
        notes=notes,
    )


def _dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _parameters(filled: LoadedModel) -> list[tuple[str, mx.array]]:
    # At the top of the module it would fail before the guard can say what to install.
    from mlx.utils import tree_flatten

    flat: Any = tree_flatten(filled.model.parameters())
    return list(flat)


def _count_parameters(filled: LoadedModel) -> int:
    """Count numbers; a packed word holds several, and scales and biases are no weights."""
    total = 0
    for path, array in _parameters(filled):
        layer, _, name = path.rpartition(".")
        packed = filled.quantization.get(layer)
        if packed is None:
            total += array.size
        elif name == "weight":
            total += array.size * 32 // packed.bits
        elif name == "bias":
            total += array.size
    return total
