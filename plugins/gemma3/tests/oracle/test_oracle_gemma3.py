"""Live comparison with transformers in float32; collected only when this folder is named."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))

from tiny import F, S, tiny_config, tiny_tensors  # noqa: E402

from engine_core.limits import Limits  # noqa: E402
from engine_core.testing.checkpoints import write_checkpoint  # noqa: E402
from engine_core.testing.conformance import load  # noqa: E402

pytestmark = [
    pytest.mark.oracle,
    # transformers and torch warn about their own future releases.
    pytest.mark.filterwarnings("ignore"),
]
TOLERANCE = 2e-5
PLAIN_ROPE = {
    S: {"rope_type": "default", "rope_theta": 10_000.0},
    F: {"rope_type": "default", "rope_theta": 1_000_000.0},
}
CASES: dict[str, dict[str, Any]] = {
    "linear rope": {},
    "plain rope": {"rope_parameters": PLAIN_ROPE},
    "every third layer full": {"layer_types": [S, S, F, S, S, F, S]},
    "irregular layers": {"layer_types": [S, F, S, S, F, F, S]},
    "final softcap": {"final_logit_softcapping": 2.0},
    "square hidden size": {"hidden_size": 64},
    "window of 257": {"sliding_window": 257},
}
LONG, SHORT = 530, 40
CONTEXT = {"max_position_embeddings": 1024}
REPLY_TOKENS = 12


def prompt(length: int) -> list[int]:
    return [int(i) for i in np.random.Generator(np.random.PCG64(11)).integers(3, 160, length)]


def build(config: dict[str, Any]) -> Any:
    """A transformers model with the tiny checkpoint's weights."""
    fields = copy.deepcopy(config)
    del fields["architectures"], fields["model_type"]
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**fields)).float().eval()
    load_weights(model, tiny_tensors(config))
    return model


def load_weights(model: Any, tensors: dict[str, np.ndarray]) -> None:
    state = {key: torch.from_numpy(value) for key, value in tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()


def logits(model: Any, ids: list[int]) -> np.ndarray:
    """Logits ``[L, V]`` float32 of one uncached pass."""
    with torch.no_grad():
        return np.asarray(model(torch.tensor([ids]), use_cache=False).logits[0].numpy())


def check(path: Path, model: Any) -> None:
    """Compare logits of every chunk size, and greedy ids."""
    long, short = prompt(LONG), prompt(SHORT)
    expected = logits(model, long)
    for size in (1, 7, 256, 257, LONG):
        with load(path, limits=Limits(prefill_chunk_tokens=size)) as session:
            found = session.score(long)
        assert np.abs(found - expected).max() < TOLERANCE, size
        assert np.array_equal(found.argmax(axis=-1), expected.argmax(axis=-1))
    chosen: list[int] = []
    for _ in range(REPLY_TOKENS):
        chosen.append(int(logits(model, [*short, *chosen])[-1].argmax()))
    with load(path) as session:
        never = dict.fromkeys(session.info.eos_token_ids, -100.0)
        assert not set(chosen) & set(never)
        reply = session.complete(short, max_tokens=REPLY_TOKENS, logit_bias=never)
    assert list(reply.token_ids) == chosen


@pytest.mark.parametrize("name", CASES)
def test_checkpoint_saved_by_transformers_gives_its_logits(name: str, tmp_path: Path) -> None:
    model = build(tiny_config(**CONTEXT, **CASES[name]))
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert set(saved["rope_parameters"]) == {S, F}
    check(tmp_path, model)


def test_thetas_beside_a_nested_rope_give_the_logits_of_transformers(tmp_path: Path) -> None:
    """The hybrid spelling: the factor nested, both thetas flat."""
    config = tiny_config(**CONTEXT)
    hybrid = config | {
        "rope_parameters": {
            F: {"rope_type": "linear", "factor": 8.0},
            S: {"rope_type": "default"},
        },
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    }
    check(write_checkpoint(tmp_path, hybrid, tiny_tensors(config)), build(config))


def test_multimodal_checkpoint_gives_the_logits_of_its_text(tmp_path: Path) -> None:
    text = tiny_config(**CONTEXT)
    fields = {key: value for key, value in text.items() if key not in ("architectures",)}
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**fields),
        vision_config=transformers.SiglipVisionConfig(
            hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=3,
            image_size=56, patch_size=14, vision_use_head=False,
        ),
        mm_tokens_per_image=4, boi_token_index=150, eoi_token_index=151, image_token_index=152,
    )  # fmt: skip
    torch.manual_seed(5)
    model = transformers.Gemma3ForConditionalGeneration(config).float().eval()
    weights = {key.removeprefix("model."): value for key, value in tiny_tensors(text).items()}
    load_weights(model.model.language_model, weights)
    model.tie_weights()
    model.save_pretrained(tmp_path)
    check(tmp_path, build(text))
