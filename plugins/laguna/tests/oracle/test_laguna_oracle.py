"""Live comparison with transformers in float32; collected only by ``nox -s oracle``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "oracle")]

from harness_laguna import distance, logits  # noqa: E402
from record_laguna import build, greedy  # noqa: E402
from record_laguna import logits as reference_logits  # noqa: E402
from tiny_laguna import CASES, config_of, prompt, relayout, tensors_of  # noqa: E402

from engine_core.limits import Limits  # noqa: E402
from engine_core.testing.checkpoints import write_checkpoint  # noqa: E402
from engine_core.testing.conformance import load  # noqa: E402

pytestmark = [
    pytest.mark.oracle,
    # transformers and torch warn about their own future releases.
    pytest.mark.filterwarnings("ignore"),
]
LENGTH = 40
CHUNKS = [[], [36, 1, 1, 1, 1], [7] * 5 + [5], [1] * LENGTH]
LONG = 530


def tolerance(expected: np.ndarray) -> float:
    """5e-5 for logits of ordinary size; the tied case has logits of 40."""
    return 5e-5 * max(1.0, float(np.abs(expected).max()) / 8)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_checkpoint_saved_by_transformers_gives_its_logits(
    name: str, seed: int, tmp_path: Path
) -> None:
    config = config_of(name)
    model = build(config, tensors_of(config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.05 * noise if parameter.ndim == 1 else 0.02 * noise)
    model.save_pretrained(tmp_path / "saved")
    ids = prompt(LENGTH)
    expected = reference_logits(model, ids)
    with load(tmp_path / "saved") as session:
        for chunks in CHUNKS:
            assert distance(logits(session, ids, chunks), expected) < tolerance(expected)
        reply = session.complete(ids, max_tokens=8, logit_bias={2: -100.0, 24: -100.0})
        assert list(reply.token_ids) == greedy(model, ids, 8)
    saved = json.loads((tmp_path / "saved" / "config.json").read_text(encoding="utf-8"))
    tensors: dict[str, Any] = load_file(tmp_path / "saved" / "model.safetensors")
    for layout in ("packed", "mlx", "mlx fused"):
        path = write_checkpoint(tmp_path / layout, saved, relayout(config, tensors, layout))
        with load(path) as session:
            assert distance(logits(session, ids), expected) < tolerance(expected)


@pytest.mark.parametrize("name", ["xs21", "per_element", "m1", "all_sliding", "attention_bias"])
@pytest.mark.parametrize("window", [8, 100, 257])
def test_long_prompts_equal_transformers_for_every_chunk_size(
    name: str, window: int, tmp_path: Path
) -> None:
    config = config_of(name) | {"sliding_window": window}
    tensors = tensors_of(config)
    ids = prompt(LONG)
    expected = reference_logits(build(config, tensors), ids)
    path = write_checkpoint(tmp_path, config, tensors)
    for size in (1, 7, 256, 257, LONG):
        with load(path, limits=Limits(prefill_chunk_tokens=size)) as session:
            assert distance(session.score(ids), expected) < 1e-4, size
