"""The gated delta rule as one CUDA kernel that keeps its state in registers.

MLX has no kernel of its own for CUDA: there ``mx.fast.gated_delta_update`` walks over the rows in
plain operations, and 2,048 rows of a layer take 240 ms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SOURCE", "build_cuda_delta_rule", "fits_cuda_kernel"]

THREADS: Final = 128
LANES: Final = 8
VECTOR: Final = 4

# Eight threads share a row of the state. A step reads the old state only, so that its three sums
# are reduced side by side: with a = S k, b = S q, c = k q and d = beta (v - g a), the output is
# g b + d c and the new state g S + d k.
SOURCE: Final = """
    constexpr int lanes = 8;
    constexpr int parts = Dk / (4 * lanes);
    const int length = queries_shape[1];
    const int lane = threadIdx.x % lanes;
    const int row = blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes;
    const int head = blockIdx.y % Nv;
    const size_t batch = blockIdx.y / Nv;
    const int key_head = head / (Nv / Nk);

    const size_t first_key = (batch * length * Nk + key_head) * Dk;
    const float4* key_rows = reinterpret_cast<const float4*>(keys + first_key) + lane;
    const float4* query_rows = reinterpret_cast<const float4*>(queries + first_key) + lane;
    const size_t first_head = batch * length * Nv + head;
    const float* value_rows = values + first_head * Dv + row;
    const float* decay_rows = log_decay + first_head;
    const float* beta_rows = beta + first_head;
    float* out_rows = out + first_head * Dv + row;
    const size_t place = ((size_t)blockIdx.y * Dv + row) * (Dk / 4) + lane;
    const float4* old_state = reinterpret_cast<const float4*>(state) + place;
    float4* last_state = reinterpret_cast<float4*>(new_state) + place;

    float4 held[parts], key[parts], query[parts];
    #pragma unroll
    for (int part = 0; part < parts; ++part) {
        held[part] = old_state[part * lanes];
        key[part] = key_rows[part * lanes];
        query[part] = query_rows[part * lanes];
    }
    float value = *value_rows, decay = *decay_rows, rate = *beta_rows;

    for (int step = 0; step < length; ++step) {
        // What the next step needs is fetched while this one computes.
        float4 next_key[parts], next_query[parts];
        float next_value = 0.0f, next_decay = 0.0f, next_rate = 0.0f;
        if (step + 1 < length) {
            key_rows += Nk * (Dk / 4);
            query_rows += Nk * (Dk / 4);
            #pragma unroll
            for (int part = 0; part < parts; ++part) {
                next_key[part] = key_rows[part * lanes];
                next_query[part] = query_rows[part * lanes];
            }
            next_value = value_rows[(size_t)(step + 1) * Nv * Dv];
            next_decay = decay_rows[(size_t)(step + 1) * Nv];
            next_rate = beta_rows[(size_t)(step + 1) * Nv];
        }
        float along = 0.0f, across = 0.0f, overlap = 0.0f;
        #pragma unroll
        for (int part = 0; part < parts; ++part) {
            const float4 s = held[part], k = key[part], q = query[part];
            along += (s.x * k.x + s.y * k.y) + (s.z * k.z + s.w * k.w);
            across += (s.x * q.x + s.y * q.y) + (s.z * q.z + s.w * q.w);
            overlap += (k.x * q.x + k.y * q.y) + (k.z * q.z + k.w * q.w);
        }
        #pragma unroll
        for (int offset = lanes / 2; offset > 0; offset /= 2) {
            along += __shfl_xor_sync(0xffffffffu, along, offset);
            across += __shfl_xor_sync(0xffffffffu, across, offset);
            overlap += __shfl_xor_sync(0xffffffffu, overlap, offset);
        }
        const float kept = expf(decay);
        const float change = rate * (value - kept * along);
        if (lane == 0) {
            out_rows[(size_t)step * Nv * Dv] = kept * across + change * overlap;
        }
        #pragma unroll
        for (int part = 0; part < parts; ++part) {
            held[part].x = kept * held[part].x + change * key[part].x;
            held[part].y = kept * held[part].y + change * key[part].y;
            held[part].z = kept * held[part].z + change * key[part].z;
            held[part].w = kept * held[part].w + change * key[part].w;
            key[part] = next_key[part];
            query[part] = next_query[part];
        }
        value = next_value;
        decay = next_decay;
        rate = next_rate;
    }
    #pragma unroll
    for (int part = 0; part < parts; ++part) {
        last_state[part * lanes] = held[part];
    }
"""


def fits_cuda_kernel(key_dim: int, value_dim: int) -> bool:
    """Whether heads of these sizes divide evenly among the kernel's threads.

    Args:
        key_dim: Dk.
        value_dim: Dv.

    Returns:
        False where the plain operations must serve.
    """
    return key_dim % (LANES * VECTOR) == 0 and value_dim % (THREADS // LANES) == 0


def build_cuda_delta_rule(name: str) -> Callable[..., tuple[mx.array, mx.array]]:
    """Make the kernel.

    Args:
        name: Under which MLX keeps what it compiled.

    Returns:
        A function of queries and keys ``[B, L, Nk, Dk]``, values ``[B, L, Nv, Dv]``, logarithms of
        the decay and rates ``[B, L, Nv]`` and the state ``[B, Nv, Dv, Dk]``, all float32; it gives
        the output ``[B, L, Nv, Dv]`` and the new state.
    """
    names = ["queries", "keys", "values", "log_decay", "beta", "state"]
    kernel: Any = mx.fast.cuda_kernel(
        name=name, input_names=names, output_names=["out", "new_state"], source=SOURCE
    )

    def apply(*inputs: mx.array) -> tuple[mx.array, mx.array]:
        queries, _, values, _, _, state = inputs
        key_heads, key_dim = queries.shape[2:]
        batch, _, heads, value_dim = values.shape
        out, new_state = kernel(
            inputs=list(inputs),
            template=[("Dk", key_dim), ("Dv", value_dim), ("Nk", key_heads), ("Nv", heads)],
            grid=(value_dim * LANES, batch * heads, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[values.shape, state.shape],
            output_dtypes=[mx.float32, mx.float32],
        )
        return out, new_state

    return apply
