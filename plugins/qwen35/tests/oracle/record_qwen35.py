"""Record the goldens of this folder's parent with transformers in float32.

    python plugins/qwen35/tests/oracle/record_qwen35.py

Needs torch, transformers and numpy.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))

import tiny_qwen35  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Mapping

GOLDENS = TESTS / "goldens"


def build(text: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Any:
    """A transformers text model with exactly these weights, given as published."""
    config = tiny_qwen35.flat_config(dict(text))
    sparse = tiny_qwen35.is_sparse(dict(text))
    kind = "Qwen3_5Moe" if sparse else "Qwen3_5"
    settings = getattr(transformers, f"{kind}TextConfig")(**config)
    settings._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(settings).float().eval()
    held = tiny_qwen35.text_only(dict(tensors))
    state = {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in held.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if text.get("tie_word_embeddings") else set()
    assert not unexpected, unexpected
    assert set(missing) <= tied, missing
    return model


def logits(model: Any, ids: list[int]) -> np.ndarray:
    """Logits ``[L, V]`` float32 of one uncached pass."""
    with torch.no_grad():
        result: np.ndarray = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    return result


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """Greedy ids without the end of a reply, each from a whole uncached pass."""
    chosen = list(ids)
    for _ in range(count):
        row = logits(model, chosen)[-1]
        row[tiny_qwen35.BASE["eos_token_id"]] = -np.inf
        chosen.append(int(row.argmax()))
    return chosen[len(ids) :]


def main() -> None:
    """Write the goldens and their manifest."""
    torch.manual_seed(0)
    GOLDENS.mkdir(exist_ok=True)
    recorded, replies = {}, {}
    for name in tiny_qwen35.CASES:
        text = tiny_qwen35.text_config(name)
        model = build(text, tiny_qwen35.tensors_of(text))
        recorded[name] = logits(model, tiny_qwen35.prompt())[tiny_qwen35.RECORDED_ROWS]
        replies[name] = greedy(model, tiny_qwen35.prompt(), 8)
    target = GOLDENS / "tiny_logits.npz"
    np.savez_compressed(target, **recorded)
    manifest = {
        "generator": "plugins/qwen35/tests/oracle/record_qwen35.py",
        "seed": tiny_qwen35.SEED,
        "computed_by": "transformers float32, eager attention, no cache, every fourth row",
        "versions": {
            "torch": torch.__version__.split("+")[0],
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "greedy_ids": replies,
        "files": {
            target.name: {
                "sha256": hashlib.sha256(target.read_bytes()).hexdigest(),
                "bytes": target.stat().st_size,
            }
        },
    }
    text_form = json.dumps(manifest, indent=1)
    (GOLDENS / "MANIFEST.json").write_text(text_form + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
