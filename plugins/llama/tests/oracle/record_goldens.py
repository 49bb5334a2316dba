"""Record the goldens of this folder's parent with transformers in float32.

    python plugins/llama/tests/oracle/record_goldens.py [--demo PACKED_CHECKPOINT]

Needs torch, transformers and numpy. ``--demo`` also records greedy replies on the demo checkpoint
(``tools/demo_checkpoint.py``): its packed weights are unpacked here, from the format's description,
before transformers sees them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open
from tokenizers import Tokenizer

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))

import tiny_llama  # noqa: E402

from engine_core.testing.reference import dequantize  # noqa: E402

GOLDENS = TESTS / "goldens"
REPLY_TOKENS = 40
CONVERSATIONS: dict[str, list[dict[str, str]]] = {
    "capital": [{"role": "user", "content": "What is the capital of France?"}],
    "system": [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    "history": [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Nice to meet you, Ada!"},
        {"role": "user", "content": "Write a haiku about the sea for me."},
    ],
    "code": [{"role": "user", "content": "Write a Python function that adds two numbers."}],
    "unicode": [{"role": "user", "content": "Translate to English: «Où est la bibliothèque ? 📚»"}],
}


def build(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Any:
    """A transformers model with exactly these weights."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).float().eval()
    state = {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    assert not unexpected, unexpected
    assert set(missing) <= tied, missing
    return model


def logits(model: Any, ids: list[int]) -> np.ndarray:
    """Logits ``[L, V]`` float32 of one uncached pass."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def tiny_logits() -> dict[str, np.ndarray]:
    """Reference logits of every tiny case."""
    return {
        name: logits(
            build(tiny_llama.config_of(name), tiny_llama.tensors_of(tiny_llama.config_of(name))),
            tiny_llama.prompt(),
        )
        for name in tiny_llama.CASES
    }


def unpack_demo(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Config and dense float32 weights of a packed checkpoint."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    packing = config.pop("quantization")
    dense: dict[str, np.ndarray] = {}
    with safe_open(path / "model.safetensors", framework="np") as file:
        keys = set(file.keys())
        for key in sorted(keys):
            module = key.removesuffix(".weight")
            if key.endswith((".scales", ".biases")):
                continue
            if f"{module}.scales" not in keys:
                dense[key] = file.get_tensor(key).astype(np.float32)
                continue
            spec = packing.get(module) or packing
            unpacked = dequantize(
                file.get_tensor(key),
                file.get_tensor(f"{module}.scales"),
                file.get_tensor(f"{module}.biases"),
                mode="affine",
                bits=spec["bits"],
                group_size=spec["group_size"],
            )
            dense[key] = unpacked.astype(np.float32)
    return config, dense


def render(path: Path, messages: list[dict[str, str]]) -> str:
    """The chat template's text with a generation prompt."""
    source = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(source["chat_template"])
    return str(template.render(messages=messages, add_generation_prompt=True))


def greedy(model: Any, ids: list[int], end: int) -> tuple[list[int], list[float], bool]:
    """Greedy ids, the lead of each over the runner-up, and whether the end followed."""
    chosen: list[int] = []
    margins: list[float] = []
    past = None
    pending = ids
    with torch.no_grad():
        while len(chosen) < REPLY_TOKENS:
            out = model(torch.tensor([pending]), past_key_values=past, use_cache=True)
            past = out.past_key_values
            top = torch.topk(out.logits[0, -1], 2)
            token = int(top.indices[0])
            if token == end:
                return chosen, margins, True
            chosen.append(token)
            margins.append(round(float(top.values[0] - top.values[1]), 5))
            pending = [token]
    return chosen, margins, False


def chat_cases(path: Path) -> list[dict[str, Any]]:
    """Greedy replies of the demo model to the conversations."""
    config, tensors = unpack_demo(path)
    model = build(config, tensors)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    cases = []
    for name, messages in CONVERSATIONS.items():
        ids = tokenizer.encode(render(path, messages), add_special_tokens=False).ids
        chosen, margins, ended = greedy(model, ids, config["eos_token_id"])
        last = logits(model, ids)[-1]
        top = np.argsort(last)[::-1][:8]
        cases.append(
            {
                "name": name,
                "messages": messages,
                "prompt_ids": ids,
                "greedy_ids": chosen,
                "ended": ended,
                "text": tokenizer.decode(chosen),
                "smallest_margin": min(margins),
                "margins": margins,
                "first_logits": {str(token): round(float(last[token]), 5) for token in top},
            }
        )
    return cases


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write readable JSON; lists of numbers stay on one line."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Write the goldens and their manifest."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--demo", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    GOLDENS.mkdir(exist_ok=True)
    versions = {
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "numpy": np.__version__,
    }
    np.savez_compressed(GOLDENS / "tiny_logits.npz", **tiny_logits())
    if arguments.demo:
        weights = arguments.demo / "model.safetensors"
        provenance = {
            "model": "SmolLM2-135M-Instruct (Apache-2.0), as tools/demo_checkpoint.py writes it",
            "weights_sha256": sha256(weights),
            "computed_by": "transformers float32 on the unpacked weights, greedy, KV cache",
            "greedy_ids": "end-of-turn id not included; 'ended' says whether it came next",
            **versions,
        }
        write_json(
            GOLDENS / "smollm2_chat.json",
            {"provenance": provenance, "cases": chat_cases(arguments.demo)},
        )
    files = {
        path.name: {"sha256": sha256(path), "bytes": path.stat().st_size}
        for path in sorted(GOLDENS.iterdir())
        if path.name != "MANIFEST.json"
    }
    write_json(
        GOLDENS / "MANIFEST.json",
        {
            "generator": "plugins/llama/tests/oracle/record_goldens.py",
            "seed": tiny_llama.SEED,
            "versions": versions,
            "files": files,
        },
    )


if __name__ == "__main__":
    main()
