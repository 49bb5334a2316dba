"""``engine inspect``: what a checkpoint holds and what the engine makes of it, weights unread."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from engine_core.cli.options import load_plugins, resolve_model
from engine_core.cli.output import BadUsage
from engine_core.errors import EngineError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from engine_core.checkpoint.reader import Checkpoint
    from engine_core.cli.output import Output
    from engine_core.family import LayerSpec, TensorInfo
    from engine_core.plugins import Owner, Plugins
    from engine_core.spec import SpecAnswers

__all__ = ["run"]


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Describe a checkpoint, the backend, or both.

    Args:
        arguments: Parsed arguments.
        output: Where the description goes.

    Returns:
        Exit code.

    Raises:
        BadUsage: Neither a checkpoint nor ``--backend`` was given.
    """
    if arguments.model is None and not arguments.backend:
        raise BadUsage("inspect: needs DIR or --backend, got neither", code="cli.inspect")
    if arguments.backend:
        _write(output, "backend", _backend_facts())
    if arguments.model is not None:
        _inspect(arguments, output)
    return 0


def _write(output: Output, kind: str, facts: Mapping[str, Any]) -> None:
    if output.as_json:
        output.record(kind, **facts)
        return
    for name, value in facts.items():
        shown = "; ".join(map(str, value)) if isinstance(value, list) else value
        if shown not in ("", None):
            output.line(f"{name:<18} {shown}")


def _backend_facts() -> dict[str, Any]:
    from engine_core import backend

    backend.load_mlx()
    report = backend.backend_report()
    return {
        "device": report.device,
        "mlx": report.mlx_version,
        "blas": report.blas,
        "blas_threads": report.blas_threads,
        "note": report.note,
    }


def _inspect(arguments: argparse.Namespace, output: Output) -> None:
    from engine_core.checkpoint.reader import read_checkpoint
    from engine_core.spec import find_owner, resolve_spec_answers

    plugins = load_plugins(arguments)
    with read_checkpoint(resolve_model(arguments)) as checkpoint:
        owner = find_owner(plugins, checkpoint.config, arguments.family)
        answers = resolve_spec_answers(
            plugins, owner, checkpoint.config, checkpoint.tensors, checkpoint.processor_config
        )
        _write(output, "checkpoint", _facts(checkpoint, owner, answers))
        _write(output, "template", _template_facts(checkpoint, plugins, owner))
        if arguments.tensors:
            for key, info in sorted(answers.weights.infos.items()):
                _write_tensor(output, key, info)


def _facts(checkpoint: Checkpoint, owner: Owner, answers: SpecAnswers) -> dict[str, Any]:
    from engine_core.checkpoint.quantization import plan_quantization

    architecture, weights = answers.architecture, answers.weights
    unread = set(answers.mtp.expected) if answers.mtp else set()
    unread |= set(answers.media.expected) if answers.media else set()
    plan = plan_quantization(checkpoint.config, answers.weight_plan, weights.infos)
    kinds = Counter(_layer_kind(layer) for layer in architecture.layers)
    return {
        "family": owner.family.name,
        "plugin": str(owner.plugin),
        "model_type": checkpoint.config.string("model_type", default=""),
        "shards": len(checkpoint.shards.shards),
        "tensors": len(checkpoint.tensors),
        "values": sum(math.prod(info.shape) for info in checkpoint.tensors.values()),
        "dtypes": ", ".join(sorted({info.dtype for info in checkpoint.tensors.values()})),
        "layers": ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())),
        "vocab_size": architecture.vocab_size,
        "hidden_size": architecture.hidden_size,
        "context_length": architecture.context_length,
        "quantization": plan.summary(),
        "dropped": [f"{key}: {reason}" for key, reason in sorted(weights.dropped.items())],
        "left_unread": len(unread & set(weights.infos)),
        "not_opened": list(checkpoint.shards.unread),
        "notes": [*checkpoint.notes, *architecture.notes, *plan.notes],
    }


def _layer_kind(layer: LayerSpec) -> str:
    return type(layer).__name__.lower()


def _template_facts(checkpoint: Checkpoint, plugins: Plugins, owner: Owner) -> dict[str, Any]:
    from engine_core.limits import LIMITS
    from engine_core.text_loading import load_prompter

    try:
        prompter = load_prompter(
            checkpoint,
            plugins.template_dialects(owner),
            plugins.tool_syntaxes(owner),
            None,
            LIMITS,
        )
    except EngineError as error:
        return {"template": f"unusable: {error}"}
    if prompter.template is None:
        return {"template": prompter.template_reason}
    capabilities = prompter.capabilities
    names = ("chat", "translation", "system_prompt", "tools", "reasoning_history")
    supported = [n for n in (*names, "thinking_toggle") if getattr(capabilities, n)]
    return {
        "template": "usable",
        "capabilities": ", ".join(supported),
        "tool_syntax": capabilities.tool_syntax,
        "unavailable": [f"{name}: {reason}" for name, reason in capabilities.reasons.items()],
    }


def _write_tensor(output: Output, key: str, info: TensorInfo) -> None:
    if output.as_json:
        output.record("tensor", name=key, shape=list(info.shape), dtype=info.dtype)
    else:
        output.line(f"{key}  {list(info.shape)}  {info.dtype}")
