"""A tiny family whose layers are chosen by its configuration, for tests of every cache kind.

``config.json`` lists the kinds: ``full``, ``sliding``, ``recurrent``, ``shared`` (reads the cache
of the nearest attention layer before it). The weights are random, so a greedy reply depends on all
that the caches hold and a wrong row shows. The module is itself the plugin: pass it as
``Plugins.load(extra=[layered])``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from engine_core.family import (
    Architecture,
    FamilyInfo,
    Full,
    LayerSpec,
    Recurrent,
    Shared,
    Sliding,
    WeightPlan,
)
from engine_core.markers import hookimpl
from engine_core.testing.checkpoints import write_checkpoint
from engine_core.testing.tokenizers import byte_level_tokenizer_json

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from engine_core.checkpoint.config import CheckpointConfig
    from engine_core.family import TensorInfo
    from engine_core.step import BuildContext, CausalLM

__all__ = ["HYBRID_KINDS", "THINKING_TEMPLATE", "TOOL_TEMPLATE", "write_layered_checkpoint"]

FAMILY: Final = "layered"
WIDTH: Final = 16
CONV_ROWS: Final = 3
HYBRID_KINDS: Final = ("recurrent", "full", "sliding", "shared", "recurrent")
# Turns with tools and reasoning. Reasoning of replies before the last question is left out, and
# an opened reply begins with an open reasoning span, as templates of thinking models do.
_TURNS: Final = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{%- if m.reasoning_content and KEEPS %}
{{- '<think>\\n' + m.reasoning_content + '</think>' }}{% endif %}
{{- m.content }}
{%- for c in m.tool_calls %}
{{- '<tool_call>{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson }}{{ '}</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\nOPENED' }}{% endif %}
""".strip()
TOOL_TEMPLATE: Final = _TURNS.replace("KEEPS", "true").replace("OPENED", "")
THINKING_TEMPLATE: Final = _TURNS.replace("KEEPS", "loop.index0 > ns.last").replace(
    "OPENED", "<think>\\n"
)


@hookimpl
def engine_families() -> Iterable[FamilyInfo]:
    """Own checkpoints whose ``model_type`` is ``layered``.

    Returns:
        One family.
    """
    return [FamilyInfo(name=FAMILY, model_types={FAMILY}, tool_syntaxes=("hermes",))]


@hookimpl
def engine_weight_plan() -> WeightPlan:
    """Keep every name.

    Returns:
        A plan without rules.
    """
    return WeightPlan(rules=())


@hookimpl
def engine_architecture(
    config: CheckpointConfig, tensors: Mapping[str, TensorInfo]
) -> Architecture:
    """Describe the model.

    Args:
        config: Parsed ``config.json``.
        tensors: Mapped key -> header facts.

    Returns:
        The listed layers.
    """
    del tensors
    vocab_size = config.integer("vocab_size", minimum=1)
    window = config.integer("window", minimum=1)
    layers: list[LayerSpec] = []
    donor = 0
    for index, kind in enumerate(config.sequence("kinds")):
        if kind == "shared":
            layers.append(Shared(donor=donor))
            continue
        if kind == "recurrent":
            layers.append(Recurrent(shapes=((CONV_ROWS, WIDTH), (WIDTH,)), dtypes=("compute",) * 2))
            continue
        donor = index
        layers.append(
            Sliding(window=window, kv_heads=1, head_dim=WIDTH)
            if kind == "sliding"
            else Full(kv_heads=1, head_dim=WIDTH)
        )

    def build(context: BuildContext) -> CausalLM:
        from engine_core.testing.layered_model import LayeredModel

        del context
        return LayeredModel(tuple(layers), vocab_size)

    return Architecture(
        build=build,
        layers=tuple(layers),
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        context_length=config.integer("max_position_embeddings", default=16_384),
    )


def write_layered_checkpoint(
    directory: str | os.PathLike[str],
    kinds: Sequence[str] = HYBRID_KINDS,
    *,
    window: int = 24,
    chat_template: str | None = THINKING_TEMPLATE,
    seed: int = 5,
    **config: Any,
) -> Path:
    """Write a checkpoint of random weights.

    Args:
        directory: Created when absent.
        kinds: Layer kinds in order.
        window: Window of sliding layers (tokens).
        chat_template: Template source, ``None`` for none.
        seed: Seed of the weights.
        **config: Further entries of ``config.json``.

    Returns:
        The directory.
    """
    from engine_core.text.tokenizer import Tokenizer

    tokenizer_json = byte_level_tokenizer_json()
    tokenizer = Tokenizer.from_bytes(tokenizer_json)
    generator = np.random.Generator(np.random.PCG64(seed))

    def draw(*shape: int, scale: float) -> np.ndarray:
        return generator.normal(0.0, scale, shape).astype(np.float32)

    names = {"recurrent": ("input", "mix", "output"), "shared": ("query", "output")}
    tensors = {
        "embedding.weight": draw(tokenizer.vocab_size, WIDTH, scale=1.0),
        "head_projection.weight": draw(tokenizer.vocab_size, WIDTH, scale=1.0),
    }
    for index, kind in enumerate(kinds):
        for name in names.get(kind, ("query", "key", "value", "output")):
            tensors[f"blocks.{index}.{name}.weight"] = draw(WIDTH, WIDTH, scale=WIDTH**-0.5)
    return write_checkpoint(
        directory,
        {
            "model_type": FAMILY,
            "vocab_size": tokenizer.vocab_size,
            "kinds": list(kinds),
            "window": window,
            "eos_token_id": tokenizer.single_id("<|im_end|>"),
            **config,
        },
        tensors,
        tokenizer=tokenizer_json,
        chat_template=chat_template,
    )
