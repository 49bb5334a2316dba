"""The two token mixers: gated full attention and the gated delta net."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from engine_core.nn import (
    Derived,
    Linear,
    Module,
    RMSNorm,
    attend,
    elementwise,
    gated,
    merge_heads,
    sigmoid,
    silu,
    split_heads,
)
from engine_core.nn.conv import CausalConv, conv_history
from engine_core.nn.gated_delta import GatedDeltaRule, normalize_heads

if TYPE_CHECKING:
    from engine_core.cache.kv import KvCache
    from engine_core.cache.recurrent import RecurrentCache
    from engine_core.nn import AttentionMask
    from engine_qwen35.config import Qwen35Config
    from engine_qwen35.rope import Rotation, StreamRope

__all__ = ["GatedAttention", "GatedDeltaNet"]

Arrays = tuple[mx.array, ...]


@elementwise
def _rates(
    rate: mx.array, step: mx.array, step_bias: mx.array, decay_rate: mx.array
) -> tuple[mx.array, mx.array]:
    """Compute how strongly each row corrects the state, and the logarithm of its decay."""
    shifted = step.astype(mx.float32) + step_bias.astype(mx.float32)
    # softplus, in a form that does not overflow.
    return sigmoid(rate.astype(mx.float32)), decay_rate * mx.logaddexp(shifted, 0.0)


class GatedAttention(Module):
    """Grouped-query attention whose output each head scales by a sigmoid gate.

    ``q_proj`` holds, head by head, D query rows and then D gate rows.

    Source: Qiu et al. 2025, "Gated Attention for Large Language Models".
    """

    def __init__(self, config: Qwen35Config, rope: StreamRope, *, fused: bool) -> None:
        """Make the projections with placeholder parameters.

        Args:
            config: Sizes.
            rope: Rotation shared by all full-attention layers.
            fused: Whether ``qkv_proj`` stands for the three projections.
        """
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self._heads = config.heads
        self._kv_heads = config.kv_heads
        self._head_dim = dim
        self._scale = dim**-0.5
        self._rope = rope
        queries, keys = config.heads * dim, config.kv_heads * dim
        if fused:
            self.qkv_proj = Linear(hidden, 2 * queries + 2 * keys)
        else:
            self.q_proj = Linear(hidden, 2 * queries)
            self.k_proj = Linear(hidden, keys)
            self.v_proj = Linear(hidden, keys)
        self.o_proj = Linear(queries, hidden)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps)

    def __call__(
        self, x: mx.array, cache: KvCache, mask: AttentionMask, rotation: Rotation
    ) -> mx.array:
        """Attend.

        Args:
            x: ``[B, L, H]``.
            cache: This layer's cache; grows by L rows.
            mask: For the keys that the cache will return.
            rotation: Of this call's rows.

        Returns:
            ``[B, L, H]``.
        """
        paired, keys, values = self._project(x)
        queries, gate = mx.split(split_heads(paired, 2 * self._head_dim), 2, axis=-1)
        queries = self._rope(self.q_norm(queries), rotation)
        keys = self._rope(self.k_norm(split_heads(keys, self._head_dim)), rotation)
        keys, values = cache.append(keys, split_heads(values, self._head_dim))
        out = attend(queries, keys, values, self._scale, mask)
        return self.o_proj(merge_heads(gated(sigmoid)(gate, out)))

    def _project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Compute paired query and gate rows, keys, values, heads still joined."""
        if "qkv_proj" in self:
            keys = self._kv_heads * self._head_dim
            start = 2 * self._heads * self._head_dim
            paired, key_rows, value_rows = mx.split(
                self.qkv_proj(x), [start, start + keys], axis=-1
            )
            return paired, key_rows, value_rows
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


class GatedDeltaNet(Module):
    """Linear attention: a short convolution, the gated delta rule, a gated norm.

    The cache holds the convolution's last ``kernel - 1`` input rows and the rule's state.

    Source: Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule".
    """

    def __init__(self, config: Qwen35Config, rule: GatedDeltaRule, *, fused: bool) -> None:
        """Make the projections with placeholder parameters.

        Args:
            config: Sizes.
            rule: The recurrence.
            fused: Whether ``in_proj`` stands for the four input projections.
        """
        super().__init__()
        hidden, linear = config.hidden_size, config.linear
        self._sizes = linear
        self._rule = rule
        self._widths = (linear.channels, linear.values, linear.value_heads, linear.value_heads)
        if fused:
            self.in_proj = Linear(hidden, sum(self._widths))
        else:
            self.in_proj_qkv = Linear(hidden, linear.channels)
            self.in_proj_z = Linear(hidden, linear.values)
            self.in_proj_b = Linear(hidden, linear.value_heads)
            self.in_proj_a = Linear(hidden, linear.value_heads)
        self.conv1d = CausalConv(linear.channels, linear.kernel)
        self._decay_rate = Derived(lambda log_rate: -mx.exp(log_rate.astype(mx.float32)))
        self.A_log = mx.zeros((linear.value_heads,))
        self.dt_bias = mx.zeros((linear.value_heads,))
        self.norm = RMSNorm(linear.value_dim, config.rms_norm_eps)
        self.out_proj = Linear(linear.values, hidden)

    def __call__(
        self, x: mx.array, cache: RecurrentCache, lengths: mx.array | None = None
    ) -> mx.array:
        """Mix rows into the state and read them out.

        Args:
            x: ``[B, L, H]``.
            cache: This layer's cache; advances by L rows.
            lengths: Valid rows of each sequence ``[B]``; the rest leave no trace in the state.

        Returns:
            ``[B, L, H]``.
        """
        batch, rows, _ = x.shape
        mixed, gate, rate, step = self._project(x)
        beta, log_decay = _rates(rate, step, self["dt_bias"], self._decay_rate.of(self["A_log"]))
        if lengths is not None:
            valid = (mx.arange(rows)[None] < lengths[:, None])[..., None]
            beta, log_decay = mx.where(valid, beta, 0.0), mx.where(valid, log_decay, 0.0)
        out = cache.run(self._recur, (mixed, log_decay, beta), lengths)
        gate = gate.reshape(batch, rows, self._sizes.value_heads, -1).astype(mx.float32)
        normal = gated(silu)(gate, self.norm(out))
        return self.out_proj(normal.astype(x.dtype).reshape(batch, rows, -1))

    def _project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Compute convolution rows, output gate, update rate and decay step."""
        if "in_proj" in self:
            first, second, third, _ = self._widths
            ends = [first, first + second, first + second + third]
            mixed, gate, rate, step = mx.split(self.in_proj(x), ends, axis=-1)
            return mixed, gate, rate, step
        return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)

    def _recur(
        self, slots: Arrays, inputs: Arrays, lengths: mx.array | None, ends: tuple[int, ...]
    ) -> tuple[mx.array, list[Arrays]]:
        """Run convolution and rule: output ``[B, L, Nv, Dv]`` float32, slots after each end."""
        history, state = slots
        mixed, log_decay, beta = inputs
        sizes, (batch, rows, _) = self._sizes, mixed.shape
        window = mx.concatenate([history, mixed], axis=1)
        convolved = silu(self.conv1d(window))
        joined, values = mx.split(convolved, [2 * sizes.keys], axis=-1)
        queries, keys = normalize_heads(
            joined.reshape(batch, rows, 2 * sizes.key_heads, sizes.key_dim)
        )
        values = values.reshape(batch, rows, sizes.value_heads, sizes.value_dim)
        out, *states = self._rule(
            queries, keys, values.astype(mx.float32), log_decay, beta, state, ends
        )
        kept = sizes.kernel - 1
        histories = (conv_history(window, kept, end, lengths) for end in ends)
        return out, list(zip(histories, states, strict=True))
