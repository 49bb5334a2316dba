"""Live comparison with transformers in float32; collected only by ``nox -s oracle``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "oracle")]

from harness import load  # noqa: E402
from record_goldens import (  # noqa: E402
    CONVERSATIONS,
    build,
    greedy,
    logits,
    render,
    unpack_demo,
)
from tiny_llama import CASES, config_of, hub_spelling, prompt, tensors_of  # noqa: E402

from engine_core.limits import Limits  # noqa: E402
from engine_core.session import Session  # noqa: E402
from engine_core.testing.checkpoints import write_checkpoint  # noqa: E402
from engine_core.testing.conformance import load as load_session  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.oracle,
    # transformers and torch warn about their own future releases.
    pytest.mark.filterwarnings("ignore"),
]
LENGTH, LONG = 40, 530
CHUNKS = [None, [36, 1, 1, 1, 1], [7] * 5 + [5], [1] * LENGTH]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", [name for name in CASES if name != "dynamic_at_limit"])
def test_checkpoint_saved_by_transformers_gives_its_logits(
    name: str, seed: int, tmp_path: Path
) -> None:
    config = config_of(name)
    model = build(config, tensors_of(config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.05 * noise if key.endswith("norm.weight") else 0.02 * noise)
    model.save_pretrained(tmp_path)
    ids = prompt(LENGTH)[:32] if name == "llama3_no_original" else prompt(LENGTH)
    expected = logits(model, ids)
    saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert "rope_parameters" in saved
    for config_text in (saved, hub_spelling(saved)):
        (tmp_path / "config.json").write_text(json.dumps(config_text), encoding="utf-8")
        tiny = load(tmp_path)
        for chunks in CHUNKS if len(ids) == LENGTH else [None, [1] * 32]:
            assert np.abs(tiny.logits(ids, chunks) - expected).max() < 5e-5


@pytest.mark.parametrize("name", ["grouped_theta", "llama3_tied", "biased", "linear", "yarn"])
def test_long_prompts_equal_transformers_for_every_chunk_size(name: str, tmp_path: Path) -> None:
    config = config_of(name) | {"max_position_embeddings": 1024}
    tensors = tensors_of(config)
    ids = prompt(LONG)
    expected = logits(build(config, tensors), ids)
    path = write_checkpoint(tmp_path, config, tensors)
    for size in (1, 7, 256, 257, LONG):
        with load_session(path, limits=Limits(prefill_chunk_tokens=size)) as session:
            found = session.score(ids)
        assert np.abs(found - expected).max() < 3e-4, size
        assert np.array_equal(found.argmax(axis=-1), expected.argmax(axis=-1)), size


@pytest.fixture(scope="module")
def demo() -> Path:
    """The packed real checkpoint; the session of nox provides it."""
    return Path(os.environ["ENGINE_DEMO_MODEL"])


@pytest.fixture(scope="module")
def demo_model(demo: Path) -> Any:
    """The same weights in transformers, unpacked from the format's description."""
    return build(*unpack_demo(demo))


@pytest.fixture(scope="module", params=["dequantize", "keep"])
def session(demo: Path, request: pytest.FixtureRequest) -> Iterator[Session]:
    with Session.load(demo, quantized_weights=request.param, compute_dtype="float32") as loaded:
        yield loaded


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_real_weights_give_transformers_logits(
    name: str, demo: Path, demo_model: Any, session: Session
) -> None:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(demo / "tokenizer.json"))
    ids = tokenizer.encode(render(demo, CONVERSATIONS[name]), add_special_tokens=False)
    assert np.abs(session.score(ids) - logits(demo_model, ids)).max() < 2e-4


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_real_weights_give_transformers_greedy_ids(
    name: str, demo: Path, demo_model: Any, session: Session
) -> None:
    goldens = json.loads((TESTS / "goldens/smollm2_chat.json").read_text(encoding="utf-8"))
    case = next(case for case in goldens["cases"] if case["name"] == name)
    chosen, _, ended = greedy(demo_model, case["prompt_ids"], 2)
    assert (chosen, ended) == (case["greedy_ids"], case["ended"])
    reply = session.generate(CONVERSATIONS[name], max_tokens=len(chosen))
    assert list(reply.token_ids) == chosen
    assert reply.usage.prompt_tokens == len(case["prompt_ids"])
