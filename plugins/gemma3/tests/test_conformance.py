"""The conformance kit, and numbers against the independent NumPy forward."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from engine_core.testing.checkpoints import write_checkpoint
from engine_core.testing.conformance import FamilyConformance, load

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def sibling(name: str) -> Any:
    """Import a helper beside this file (importlib mode puts no folder on the path)."""
    spec = importlib.util.spec_from_file_location(
        f"engine_gemma3_tests_{name}", Path(__file__).with_name(f"{name}.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


reference = sibling("reference_gemma3")
tiny = sibling("tiny")


class TestGemma3(FamilyConformance):
    family = "gemma3"
    tolerance = 5e-5

    def tiny_config(self) -> dict[str, Any]:
        return tiny.tiny_config()

    def tiny_tensors(self) -> Mapping[str, np.ndarray]:
        return tiny.tiny_tensors(self.tiny_config())

    def reference_logits(self, ids: Sequence[int]) -> np.ndarray:
        return reference.forward(self.tiny_config(), self.tiny_tensors(), list(ids))


IDS = [int(i) for i in np.random.Generator(np.random.PCG64(3)).integers(0, 160, 40)]


def check(path: Path, config: dict[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """Compare the loaded checkpoint with the reference on the plain spelling."""
    expected = reference.forward(config, tensors, IDS)
    with load(path) as session:
        assert np.abs(session.score(IDS) - expected).max() < 5e-5


PREFIXES: dict[str, Callable[[str], str]] = {
    "bare": lambda key: key.removeprefix("model."),
    "hub multimodal": lambda key: "language_model." + key,
    "transformers in memory": lambda key: key.replace("model.", "model.language_model.", 1),
    "without inner level": lambda key: key.replace("model.", "language_model.", 1),
}


@pytest.mark.parametrize("spelling", PREFIXES)
def test_every_prefix_gives_the_same_logits(tmp_path: Path, spelling: str) -> None:
    config = tiny.tiny_config()
    tensors = tiny.tiny_tensors(config)
    renamed = {PREFIXES[spelling](key): value for key, value in tensors.items()}
    path = write_checkpoint(tmp_path / "renamed", config, renamed)
    check(path, config, tensors)


@pytest.mark.parametrize(
    "changes",
    [
        {"final_logit_softcapping": 2.0},
        {"layer_types": [tiny.S, tiny.F, tiny.S, tiny.S, tiny.F, tiny.F, tiny.S]},
        {"sliding_window": 1},
        {"query_pre_attn_scalar": 16, "hidden_size": 64},
    ],
    ids=["softcap", "irregular layers", "window of one", "plain scalar"],
)
def test_variants_equal_reference(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = tiny.tiny_config(**changes)
    tensors = tiny.tiny_tensors(config)
    check(write_checkpoint(tmp_path / "variant", config, tensors), config, tensors)


def test_flat_spelling_equals_nested_one(tmp_path: Path) -> None:
    """The hub's era: flat thetas, ``rope_scaling``, a pattern instead of ``layer_types``."""
    config = tiny.tiny_config(layer_types=[tiny.S, tiny.S, tiny.F] * 2 + [tiny.S])
    tensors = tiny.tiny_tensors(config)
    flat = {k: v for k, v in config.items() if k not in ("rope_parameters", "layer_types")}
    flat |= {
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"type": "linear", "factor": 8.0},
        "_sliding_window_pattern": 3,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
    check(write_checkpoint(tmp_path / "flat", flat, tensors), config, tensors)


def test_thetas_beside_a_nested_rope_equal_nested_ones(tmp_path: Path) -> None:
    """The hybrid spelling: the factor nested, both thetas flat."""
    config = tiny.tiny_config()
    tensors = tiny.tiny_tensors(config)
    hybrid = config | {
        "rope_parameters": {
            tiny.F: {"rope_type": "linear", "factor": 8.0},
            tiny.S: {"rope_type": "default"},
        },
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    }
    check(write_checkpoint(tmp_path / "hybrid", hybrid, tensors), config, tensors)


@pytest.mark.parametrize("top", [{}, {"vocab_size": 262_208}], ids=["absent", "another"])
def test_vocabulary_of_the_text_section_counts(top: dict[str, Any], tmp_path: Path) -> None:
    config = tiny.tiny_config()
    tensors = tiny.tiny_tensors(config)
    whole = {"model_type": "gemma3", "text_config": config, **top}
    renamed = {"language_model." + key: value for key, value in tensors.items()}
    check(write_checkpoint(tmp_path / "whole", whole, renamed), config, tensors)


def test_multimodal_checkpoint_loads_as_text(tmp_path: Path) -> None:
    """Tower tensors are recognised, checked by shape and never read."""
    config = tiny.tiny_config()
    tensors = tiny.tiny_tensors(config)
    vision = {"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 12}
    vision |= {"patch_size": 2, "image_size": 4}
    whole = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": config,
        "vision_config": vision,
    }
    tower = tower_tensors()
    renamed = {"language_model." + key: value for key, value in tensors.items()}
    path = write_checkpoint(tmp_path / "whole", whole, renamed | tower)
    check(path, config, tensors)
    broken = {**tower, "multi_modal_projector.mm_soft_emb_norm.weight": np.zeros(9, np.float32)}
    path = write_checkpoint(tmp_path / "broken", whole, renamed | broken)
    with pytest.raises(Exception, match="mm_soft_emb_norm"), load(path):
        pass


def tower_tensors() -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.vision_model.embeddings.patch_embedding.weight": (8, 3, 2, 2),
        "vision_tower.vision_model.embeddings.patch_embedding.bias": (8,),
        "vision_tower.vision_model.embeddings.position_embedding.weight": (4, 8),
        "vision_tower.vision_model.post_layernorm.weight": (8,),
        "vision_tower.vision_model.post_layernorm.bias": (8,),
        "multi_modal_projector.mm_input_projection_weight": (8, 72),
        "multi_modal_projector.mm_soft_emb_norm.weight": (8,),
    }
    layer = "vision_tower.vision_model.encoder.layers.0."
    for norm in ("layer_norm1", "layer_norm2"):
        shapes |= {f"{layer}{norm}.weight": (8,), f"{layer}{norm}.bias": (8,)}
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        shapes |= {f"{layer}self_attn.{name}.weight": (8, 8), f"{layer}self_attn.{name}.bias": (8,)}
    shapes |= {f"{layer}mlp.fc1.weight": (12, 8), f"{layer}mlp.fc1.bias": (12,)}
    shapes |= {f"{layer}mlp.fc2.weight": (8, 12), f"{layer}mlp.fc2.bias": (8,)}
    return {key: tiny.draw(key, shape) for key, shape in shapes.items()}
