"""Random conversations with every family: tool loops, thinking template, edits, several users."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from engine_core import Session
from engine_core.testing.checkpoints import write_checkpoint
from engine_core.testing.conversations import chat_machine
from engine_core.testing.layered import THINKING_TEMPLATE, TOOL_TEMPLATE
from engine_core.testing.tokenizers import byte_level_tokenizer_json
from engine_core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

PLUGINS = Path(__file__).resolve().parents[1] / "plugins"
TOKENIZER = byte_level_tokenizer_json()
SIZES = {
    "vocab_size": Tokenizer.from_bytes(TOKENIZER).vocab_size,
    "max_position_embeddings": 16_384,
}


def tiny(family: str, name: str) -> Any:
    """The module of a family's tests that draws its tiny checkpoints."""
    path = PLUGINS / family / "tests" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"conversations_{family}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def gemma3() -> tuple[dict[str, Any], Any]:
    module = tiny("gemma3", "tiny")
    config = module.tiny_config() | SIZES
    return config, module.tiny_tensors(config)


def gemma4() -> tuple[dict[str, Any], Any]:
    module = tiny("gemma4", "tiny_gemma4")
    config = module.DENSE | SIZES | {"vocab_size_per_layer_input": SIZES["vocab_size"]}
    return config, module.tensors_of(config)


def laguna() -> tuple[dict[str, Any], Any]:
    module = tiny("laguna", "tiny_laguna")
    config = module.config_of("xs21") | SIZES
    return config, module.tensors_of(config)


def llama() -> tuple[dict[str, Any], Any]:
    module = tiny("llama", "tiny_llama")
    layers = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}
    config = module.BASE | SIZES | layers
    return config, module.tensors_of(config)


def qwen35() -> tuple[dict[str, Any], Any]:
    module = tiny("qwen35", "tiny_qwen35")
    text = module.text_config("irregular") | SIZES
    return module.whole_config(text), module.tensors_of(text)


FAMILIES = {one.__name__: one for one in (gemma3, gemma4, laguna, llama, qwen35)}
TEMPLATES = {"plain": TOOL_TEMPLATE, "thinking": THINKING_TEMPLATE}


@pytest.fixture(params=[f"{family}-{template}" for family in FAMILIES for template in TEMPLATES])
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Session]:
    family, _, template = request.param.partition("-")
    config, tensors = FAMILIES[family]()
    path = write_checkpoint(
        tmp_path / "model",
        config,
        tensors,
        tokenizer=TOKENIZER,
        chat_template=TEMPLATES[template],
    )
    with Session.load(path, compute_dtype="float32") as loaded:
        assert loaded.info.family == family
        yield loaded


def test_random_conversations_equal_cold_runs_and_are_served_as_promised(session: Session) -> None:
    run_state_machine_as_test(
        chat_machine(session),
        settings=settings(
            max_examples=4,
            stateful_step_count=10,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
