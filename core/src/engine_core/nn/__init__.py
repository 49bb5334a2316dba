"""Layers that families build their models from.

Parameters are placeholders until a loader fills them. Importing this package imports MLX.
"""

import engine_core.cache  # noqa: F401 - opens MLX through the guard, before the layers import it
from engine_core.nn.activations import elementwise, gated, gelu_tanh, sigmoid, silu, softcap
from engine_core.nn.attention import (
    AttentionMask,
    attend,
    attention_mask,
    attention_masks,
    merge_heads,
    project_heads,
    split_heads,
)
from engine_core.nn.embedding import Embedding
from engine_core.nn.linear import Linear, arrange_weight
from engine_core.nn.mlp import GatedMLP
from engine_core.nn.module import Derived, Module, module_at, replace_module
from engine_core.nn.norms import RMSNorm
from engine_core.nn.quantized import (
    QuantizedEmbedding,
    QuantizedLinear,
    dequantize,
    quantize_module,
)
from engine_core.nn.rope import Rope

__all__ = [
    "AttentionMask",
    "Derived",
    "Embedding",
    "GatedMLP",
    "Linear",
    "Module",
    "QuantizedEmbedding",
    "QuantizedLinear",
    "RMSNorm",
    "Rope",
    "arrange_weight",
    "attend",
    "attention_mask",
    "attention_masks",
    "dequantize",
    "elementwise",
    "gated",
    "gelu_tanh",
    "merge_heads",
    "module_at",
    "project_heads",
    "quantize_module",
    "replace_module",
    "sigmoid",
    "silu",
    "softcap",
    "split_heads",
]
