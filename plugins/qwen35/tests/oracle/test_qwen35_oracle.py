"""Live comparison with transformers in float32; collected only by ``nox -s oracle``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "oracle")]

import tiny_qwen35 as tiny  # noqa: E402
from harness_qwen35 import distance, logits, sizes  # noqa: E402
from record_qwen35 import build, greedy  # noqa: E402
from record_qwen35 import logits as reference_logits  # noqa: E402

from engine_core.testing.conformance import load  # noqa: E402

pytestmark = [
    pytest.mark.oracle,
    # transformers and torch warn about their own future releases.
    pytest.mark.filterwarnings("ignore"),
]
TOLERANCE = 3e-4
LENGTH = 133
CHUNKS = (1, 7, 256, 257)


def randomise(model: Any, seed: int) -> None:
    """Move every parameter, so that each seed is another model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_((0.1 if parameter.ndim == 1 else 0.02) * noise)


@pytest.mark.parametrize("original", [True, False], ids=["as published", "as in memory"])
@pytest.mark.parametrize("name", tiny.CASES)
def test_text_saves_of_transformers_give_its_logits(
    name: str, original: bool, tmp_path: Path
) -> None:
    """One of the two forms writes a tensor an expert, the other fused ones."""
    text = tiny.text_config(name)
    model = build(text, tiny.tensors_of(text))
    randomise(model, 1)
    model.save_pretrained(tmp_path / "saved", save_original_format=original)
    ids = tiny.prompt(LENGTH)
    expected = reference_logits(model, ids)
    with load(tmp_path / "saved") as session:
        for chunk in CHUNKS:
            got = logits(session, ids, sizes(LENGTH, chunk))
            assert distance(got, expected) < TOLERANCE
            assert np.array_equal(got.argmax(axis=-1), expected.argmax(axis=-1))
        bias = {text["eos_token_id"]: -100.0}
        reply = session.complete(ids, max_tokens=8, logit_bias=bias)
    assert list(reply.token_ids) == greedy(model, ids, 8)


@pytest.mark.parametrize("name", ["dense_tied", "dense_untied", "moe_tied", "moe_untied"])
def test_multimodal_saves_of_transformers_give_its_text_logits(name: str, tmp_path: Path) -> None:
    text = tiny.text_config(name)
    kind = "Qwen3_5Moe" if tiny.is_sparse(text) else "Qwen3_5"
    config = getattr(transformers, f"{kind}Config")(
        text_config=text,
        vision_config={**tiny.VISION, "model_type": None},
        tie_word_embeddings=text["tie_word_embeddings"],
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float().eval()
    randomise(model, 2)
    model.save_pretrained(tmp_path / "saved")
    ids = tiny.prompt(LENGTH)
    expected = reference_logits(model, ids)
    with load(tmp_path / "saved") as session:
        assert distance(session.score(ids), expected) < TOLERANCE
