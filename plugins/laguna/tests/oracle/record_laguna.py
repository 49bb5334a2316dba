"""Record the goldens of this folder's parent with transformers in float32.

    python plugins/laguna/tests/oracle/record_laguna.py

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

import tiny_laguna  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Mapping

GOLDENS = TESTS / "goldens"


def build(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Any:
    """A transformers model with exactly these weights, given in the released layout."""
    settings = transformers.LagunaConfig(**config)
    settings._attn_implementation = "eager"
    settings._experts_implementation = "eager"
    model = transformers.LagunaForCausalLM(settings).float().eval()
    held = tiny_laguna.relayout(config, tensors, "packed")
    state = {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in held.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    assert not unexpected, unexpected
    assert set(missing) <= tied, missing
    return model


def logits(model: Any, ids: list[int]) -> np.ndarray:
    """Logits ``[L, V]`` float32 of one uncached pass."""
    with torch.no_grad():
        result: np.ndarray = model(torch.tensor([ids])).logits[0].numpy()
    return result


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """Greedy ids without the ends of a reply, each from a whole uncached pass."""
    chosen = list(ids)
    for _ in range(count):
        row = logits(model, chosen)[-1]
        row[tiny_laguna.BASE["eos_token_id"]] = -np.inf
        chosen.append(int(row.argmax()))
    return chosen[len(ids) :]


def main() -> None:
    """Write the goldens and their manifest."""
    torch.manual_seed(0)
    GOLDENS.mkdir(exist_ok=True)
    recorded, replies = {}, {}
    for name in tiny_laguna.CASES:
        config = tiny_laguna.config_of(name)
        model = build(config, tiny_laguna.tensors_of(config))
        recorded[name] = logits(model, tiny_laguna.prompt())
        replies[name] = greedy(model, tiny_laguna.prompt(), 8)
    target = GOLDENS / "tiny_logits.npz"
    np.savez_compressed(target, **recorded)
    manifest = {
        "generator": "plugins/laguna/tests/oracle/record_laguna.py",
        "seed": tiny_laguna.SEED,
        "computed_by": "transformers float32, eager attention and experts, no cache",
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
    text = json.dumps(manifest, indent=1)
    (GOLDENS / "MANIFEST.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
