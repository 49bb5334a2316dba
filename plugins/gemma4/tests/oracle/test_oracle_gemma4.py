"""Live comparison with transformers in float32; collected only when this folder is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "oracle")]

import mlx.core as mx  # noqa: E402
from record_goldens_gemma4 import build, greedy, logits  # noqa: E402
from reference_gemma4 import forward  # noqa: E402
from tiny_gemma4 import (  # noqa: E402
    AUDIO,
    CASES,
    DENSE,
    PLAIN,
    TOKENS,
    UNIFIED,
    VISION,
    prompt,
    tensor,
    tensors_of,
)

from engine_core.limits import Limits  # noqa: E402
from engine_core.step import StepInput  # noqa: E402
from engine_core.testing.checkpoints import write_checkpoint  # noqa: E402
from engine_core.testing.conformance import load  # noqa: E402

pytestmark = [
    pytest.mark.oracle,
    # transformers and torch warn about their own future releases.
    pytest.mark.filterwarnings("ignore"),
]
CONDITIONED, PLAIN_NORMS = 2e-5, 3e-4
# Angles of later positions are rounded more coarsely, here and in transformers.
LONG, CONDITIONED_LONG = 530, 1e-4


def saved(model: Any, path: Path) -> dict[str, Any]:
    """Save as transformers does; give the config that it wrote."""
    model.save_pretrained(path)
    config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return config


@pytest.mark.parametrize("name", CASES)
def test_checkpoint_saved_by_transformers_gives_its_logits(name: str, tmp_path: Path) -> None:
    model = build(CASES[name], tensors_of(CASES[name]))
    assert "per_layer_config" in saved(model, tmp_path)
    ids = prompt(40)
    expected = logits(model, ids)
    for size in (512, 1, 7, 16):
        with load(tmp_path, limits=Limits(prefill_chunk_tokens=size)) as session:
            assert np.abs(session.score(ids) - expected).max() < CONDITIONED
    with load(tmp_path) as session:
        reply = session.complete(ids, max_tokens=12)
        assert list(reply.token_ids) == greedy(model, ids)


@pytest.mark.parametrize("name", ["dense", "moe", "unified"])
@pytest.mark.parametrize("window", [8, 100, 257])
def test_long_prompts_equal_transformers_for_every_chunk_size(
    name: str, window: int, tmp_path: Path
) -> None:
    config = CASES[name] | {"sliding_window": window, "max_position_embeddings": 1024}
    tensors = tensors_of(config)
    ids = prompt(LONG)
    expected = logits(build(config, tensors), ids)
    path = write_checkpoint(tmp_path, config, tensors)
    for size in (1, 7, 256, 257, LONG):
        with load(path, limits=Limits(prefill_chunk_tokens=size)) as session:
            found = session.score(ids)
        assert np.abs(found - expected).max() < CONDITIONED_LONG, size
        assert np.array_equal(found.argmax(axis=-1), expected.argmax(axis=-1)), size


@pytest.mark.parametrize("name", ["dense", "moe", "unified"])
def test_large_query_and_key_norms_stay_within_float32(name: str, tmp_path: Path) -> None:
    """With a softmax scale of 1 such weights amplify rounding, transformers' own included.

    No order of operations helps: with every product, norm, rotation and softmax in float64, and
    only their results rounded to float32, 21 rows of such a model are 1.2e-4 from float64 and 100
    rows 4.2e-4. transformers is 1.8e-4 away in one pass, 5.1e-4 with a cache. So the float64
    forward is the measure, and transformers' own distance from it is allowed for.
    """
    config = CASES[name]
    tensors = {
        key: value / 0.3 if key.endswith(("q_norm.weight", "k_norm.weight")) else value
        for key, value in tensors_of(config).items()
    }
    ids = prompt(40)
    double = forward(config, tensors, ids)
    expected = logits(build(config, tensors), ids)
    with load(write_checkpoint(tmp_path, config, tensors)) as session:
        found = session.score(ids)
    assert np.abs(found - double).max() < PLAIN_NORMS
    assert np.abs(found - expected).max() < PLAIN_NORMS + np.abs(expected - double).max()


def multimodal_model(name: str) -> Any:
    """A conditional-generation model with random weights in its towers too."""
    text = {
        key: value
        for key, value in {"dense": DENSE, "plain": PLAIN, "unified": UNIFIED}[name].items()
        if key not in ("architectures", "model_type")
    }
    entries = text.pop("per_layer_config")
    text["per_layer_config"] = {int(key): value for key, value in entries.items()}
    torch.manual_seed(5)
    if name == "unified":
        config = transformers.Gemma4UnifiedConfig(
            text_config=transformers.Gemma4UnifiedTextConfig(**text),
            vision_config=transformers.Gemma4UnifiedVisionConfig(
                patch_size=4, pooling_kernel_size=2, mm_embed_dim=72, mm_posemb_size=32,
                output_proj_dims=72,
            ),
            audio_config=transformers.Gemma4UnifiedAudioConfig(audio_embed_dim=20),
            **TOKENS,
        )  # fmt: skip
        model: Any = transformers.Gemma4UnifiedForConditionalGeneration(config)
    else:
        clipped = {"use_clipped_linears": name == "dense", "standardize": name == "plain"}
        config = transformers.Gemma4Config(
            text_config=transformers.Gemma4TextConfig(**text),
            vision_config=transformers.Gemma4VisionConfig(**(VISION | clipped)),
            audio_config=transformers.Gemma4AudioConfig(**AUDIO) if name == "dense" else None,
            **TOKENS,
        )
        model = transformers.Gemma4ForConditionalGeneration(config)
    weights = tensors_of({"dense": DENSE, "plain": PLAIN, "unified": UNIFIED}[name])
    tower = model.model.language_model
    state = {key.removeprefix("model."): torch.from_numpy(weights[key]) for key in weights}
    tower.load_state_dict(state, strict=True)
    model.tie_weights()
    return model.float().eval()


@pytest.mark.parametrize("name", ["dense", "plain", "unified"])
def test_multimodal_checkpoint_gives_the_logits_of_its_text(name: str, tmp_path: Path) -> None:
    model = multimodal_model(name)
    saved(model, tmp_path)
    ids = prompt(40)
    expected = logits(model, ids)
    with load(tmp_path) as session:
        assert np.abs(session.score(ids) - expected).max() < CONDITIONED


@pytest.mark.parametrize("window", [3, 12])
@pytest.mark.parametrize("name", ["dense", "plain", "unified"])
def test_spans_are_attended_as_transformers_does(name: str, window: int, tmp_path: Path) -> None:
    """Image rows come from the outside; what follows from them is compared."""
    model = multimodal_model(name)
    text = model.config.text_config
    text.sliding_window = window
    for layer in model.model.language_model.layers:
        if layer.self_attn.is_sliding:
            layer.self_attn.sliding_window = window
    config = saved(model, tmp_path)
    assert config["text_config"]["sliding_window"] == window
    spans = [(4, 12), (15, 19)]
    rows = [row for start, stop in spans for row in range(start, stop)]
    ids = [152 if row in rows else token for row, token in enumerate(prompt(26))]
    media = np.stack([tensor(f"media {row}", (72,)) * 4 for row in rows])
    plain = [0 if row in rows else token for row, token in enumerate(ids)]
    with torch.no_grad():
        tower = model.model.language_model
        embeddings = tower.embed_tokens(torch.tensor([plain]))
        embeddings[0, rows] = torch.from_numpy(media)
        kwargs: dict[str, Any] = {}
        if name == "dense":
            kwargs["per_layer_inputs"] = tower.get_per_layer_inputs(torch.tensor([plain]))
        kinds = torch.tensor([[1 if row in rows else 0 for row in range(len(ids))]])
        expected = model(
            inputs_embeds=embeddings, mm_token_type_ids=kinds, use_cache=False, **kwargs
        ).logits[0].numpy()  # fmt: skip
    with load(tmp_path) as session:
        step_embeddings = session.model.embed(mx.array([plain], mx.int32))
        step_embeddings[:, mx.array(rows)] = mx.array(media)
        step = StepInput(
            ids=mx.array([ids], mx.int32), embeddings=step_embeddings, spans=tuple(spans)
        )
        hidden = session.model.forward(step, session.new_caches()).hidden
        found = np.array(session.model.head(hidden))[0]
    assert np.abs(found - expected).max() < CONDITIONED
