"""Layouts of checkpoints, and when projections are joined."""

from __future__ import annotations

from tiny_llama import BASE, published_shapes

from engine_core.checkpoint.config import CheckpointConfig
from engine_core.weight_plan import TensorInfo
from engine_llama.config import LlamaConfig
from engine_llama.weights import plan_weights

LAYER = "model.layers.1."


def infos(config=BASE) -> dict[str, TensorInfo]:
    return {key: TensorInfo(shape, "F32") for key, shape in published_shapes(config).items()}


def packed(bits: int = 4, group: int = 32, **overrides: int) -> dict[str, TensorInfo]:
    """The MLX-converted twin; ``overrides`` gives projections other bits."""
    result = {}
    for key, info in infos().items():
        if len(info.shape) == 1:
            result[key] = info
            continue
        module = key.removesuffix(".weight")
        own = overrides.get(module.rpartition(".")[2], bits)
        rows, width = info.shape
        result[key] = TensorInfo((rows, width * own // 32), "U32")
        for part in ("scales", "biases"):
            result[f"{module}.{part}"] = TensorInfo((rows, width // group), "F16")
    return result


def resolve(tensors, config=BASE):
    parsed = LlamaConfig.parse(CheckpointConfig(config))
    plan = plan_weights(parsed, tensors)
    return plan, plan.resolve(tensors)


def test_bare_backbone_gets_the_prefix() -> None:
    config = BASE | {"tie_word_embeddings": None}
    bare = {
        key.removeprefix("model."): info
        for key, info in infos().items()
        if not key.startswith("lm_head")
    }
    plan, resolved = resolve(bare, config)
    whole = {key: info for key, info in infos().items() if not key.startswith("lm_head")}
    assert resolved.infos == resolve(whole, config)[1].infos
    assert plan.map_path("layers.0.mlp.up_proj") == ("model.layers.0.mlp.gate_up_proj",)


def test_leftovers_are_dropped_with_a_reason() -> None:
    config = BASE | {"tie_word_embeddings": True}
    tensors = infos() | {LAYER + "self_attn.rotary_emb.inv_freq": TensorInfo((8,), "F32")}
    tensors |= {"lm_head.scales": TensorInfo((96, 2), "F16")}
    _, resolved = resolve(tensors, config)
    assert set(resolved.dropped) == {
        "lm_head.weight",
        "lm_head.scales",
        LAYER + "self_attn.rotary_emb.inv_freq",
    }
    assert all(resolved.dropped.values())


def test_packed_layers_are_joined_with_all_their_parts() -> None:
    plan, resolved = resolve(packed())
    for part in ("weight", "scales", "biases"):
        assert f"{LAYER}self_attn.qkv_proj.{part}" in resolved.infos
        assert f"{LAYER}mlp.gate_up_proj.{part}" in resolved.infos
    assert not any(".q_proj" in key or ".up_proj" in key for key in resolved.infos)
    assert resolved.infos[LAYER + "self_attn.qkv_proj.scales"].shape == (128, 2)
    assert plan.map_path(LAYER + "self_attn.v_proj") == (LAYER + "self_attn.qkv_proj",)


def test_unlike_storage_stays_separate() -> None:
    _, resolved = resolve(packed(v_proj=6))
    assert LAYER + "self_attn.v_proj.weight" in resolved.infos
    assert LAYER + "self_attn.qkv_proj.weight" not in resolved.infos
    assert LAYER + "mlp.gate_up_proj.weight" in resolved.infos


def test_one_dense_member_keeps_its_group_separate() -> None:
    tensors = packed()
    for part in ("scales", "biases"):
        del tensors[f"{LAYER}mlp.up_proj.{part}"]
    tensors[LAYER + "mlp.up_proj.weight"] = TensorInfo((96, 64), "F16")
    _, resolved = resolve(tensors)
    assert LAYER + "mlp.up_proj.weight" in resolved.infos
    assert "model.layers.0.mlp.gate_up_proj.weight" in resolved.infos


def test_other_dtype_keeps_its_group_separate() -> None:
    tensors = infos()
    tensors[LAYER + "self_attn.k_proj.weight"] = TensorInfo((32, 64), "BF16")
    _, resolved = resolve(tensors)
    assert LAYER + "self_attn.k_proj.weight" in resolved.infos


def test_biases_are_joined_too() -> None:
    config = BASE | {"attention_bias": True, "mlp_bias": True}
    _, resolved = resolve(infos(config), config)
    assert resolved.infos[LAYER + "self_attn.qkv_proj.bias"].shape == (128,)
    assert resolved.infos[LAYER + "mlp.gate_up_proj.bias"].shape == (192,)
    assert LAYER + "self_attn.o_proj.bias" in resolved.infos
