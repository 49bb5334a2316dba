"""Record the goldens of this folder's parent with transformers in float32.

    python plugins/gemma4/tests/oracle/record_goldens_gemma4.py

Needs torch, transformers and numpy.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))

from tiny_gemma4 import CASES, SEED, prompt, tensors_of  # noqa: E402

GOLDENS = TESTS / "goldens"
REPLY_TOKENS = 12
CLASSES = {
    "gemma4_text": (transformers.Gemma4TextConfig, transformers.Gemma4ForCausalLM),
    "gemma4_unified_text": (
        transformers.Gemma4UnifiedTextConfig,
        transformers.Gemma4UnifiedForCausalLM,
    ),
}


def build(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Any:
    """A transformers model with exactly these weights."""
    make_config, make_model = CLASSES[config["model_type"]]
    fields = {key: value for key, value in copy.deepcopy(config).items() if key != "architectures"}
    # It takes layer numbers, not the text that it writes them as.
    entries = fields.pop("per_layer_config")
    fields["per_layer_config"] = {int(key): value for key, value in entries.items()}
    model = make_model(make_config(**fields)).float().eval()
    state = {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model


def logits(model: Any, ids: list[int]) -> np.ndarray:
    """Logits ``[L, V]`` float32 of one uncached pass."""
    with torch.no_grad():
        return np.asarray(model(torch.tensor([ids]), use_cache=False).logits[0].numpy())


def greedy(model: Any, ids: list[int]) -> list[int]:
    """Greedy ids, each from an uncached pass over all that came before."""
    chosen: list[int] = []
    for _ in range(REPLY_TOKENS):
        chosen.append(int(logits(model, [*ids, *chosen])[-1].argmax()))
    return chosen


def main() -> None:
    """Write the goldens and their manifest."""
    torch.manual_seed(0)
    GOLDENS.mkdir(exist_ok=True)
    arrays: dict[str, np.ndarray] = {}
    for name, config in CASES.items():
        model = build(config, tensors_of(config))
        arrays[name] = logits(model, prompt())
        arrays[f"{name}.greedy"] = np.array(greedy(model, prompt()), np.int32)
    np.savez_compressed(GOLDENS / "tiny_logits.npz", **arrays)
    file = GOLDENS / "tiny_logits.npz"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    manifest = {
        "generator": "plugins/gemma4/tests/oracle/record_goldens_gemma4.py",
        "seed": SEED,
        "versions": {
            "torch": torch.__version__.split("+")[0],
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "files": {file.name: {"sha256": digest, "bytes": file.stat().st_size}},
    }
    text = json.dumps(manifest, indent=1)
    (GOLDENS / "MANIFEST.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
