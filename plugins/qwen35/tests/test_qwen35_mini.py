"""The trained miniature: greedy ids of transformers, hidden states, templates, 4-bit weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from harness_qwen35 import distance
from tiny_qwen35 import is_delta

from engine_core.message_parsing import parse_messages
from engine_core.session import Session
from engine_core.step import StepInput
from engine_core.testing.checkpoints import write_checkpoint
from engine_core.tool_parsing import parse_tools
from engine_qwen35.tools import QWEN_XML

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MINI = Path(__file__).resolve().parent / "fixtures" / "qwen35-mini"
PARITY = MINI / "parity"
GOLDENS = json.loads((MINI / "goldens.json").read_text(encoding="utf-8"))
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in GOLDENS["cases"]}
TOOL_CASES = [name for name, case in CASES.items() if "<tool_call>" in case["text"]]
TEXT_FILES = ("chat_template.jinja", "generation_config.json", "tokenizer.json")


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session.load(MINI, compute_dtype="float32") as loaded:
        yield loaded


def test_fixture_is_the_recorded_one(session: Session) -> None:
    import hashlib

    for name, digest in GOLDENS["sha256"].items():
        assert hashlib.sha256((MINI / name).read_bytes()).hexdigest() == digest
    assert len(CASES) == len(GOLDENS["cases"]) > 10
    assert session.info.eos_token_ids == tuple(GOLDENS["eos_ids"])


@pytest.mark.parametrize("name", CASES)
def test_greedy_ids_equal_transformers(session: Session, name: str) -> None:
    case = CASES[name]
    reply = session.complete(case["prompt_ids"], max_tokens=120)
    assert list(reply.token_ids) == case["greedy_ids"]
    assert reply.finish_reason == case["finish"]


@pytest.mark.parametrize("name", CASES)
def test_rendered_conversations_are_the_recorded_prompts(session: Session, name: str) -> None:
    """Calls get the ids that OpenAI-style histories carry; the template does not show them."""
    case = CASES[name]
    loaded = session._loaded
    assert loaded is not None
    prompter = loaded.prompter
    assert prompter.template is not None
    assert prompter.tokenizer is not None
    rendered = prompter.template.render(
        parse_messages(with_call_ids(case["messages"])),
        parse_tools(case["tools"]),
        thinking=case["template_kwargs"].get("enable_thinking"),
    )
    assert rendered.text == case["prompt"]
    assert prompter.tokenizer.encode(rendered.text) == case["prompt_ids"]
    assert rendered.opens_reasoning is case["thinking"]


def with_call_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    result, open_ids, number = [], [], 0
    for message in messages:
        changed = dict(message)
        if message.get("tool_calls"):
            open_ids = [f"call_{number + i}" for i in range(len(message["tool_calls"]))]
            number += len(open_ids)
            changed["tool_calls"] = [
                {**call, "id": one}
                for call, one in zip(message["tool_calls"], open_ids, strict=True)
            ]
        elif message["role"] == "tool":
            changed["tool_call_id"] = open_ids.pop(0)
        result.append(changed)
    return result


def test_template_capabilities_are_found_by_rendering(session: Session) -> None:
    capabilities = session.info.capabilities
    assert capabilities.chat
    assert capabilities.system_prompt
    assert capabilities.thinking_toggle


def test_hidden_row_and_logits_equal_the_recorded_state(session: Session) -> None:
    """The hidden state is the one after the final norm, which the MTP module was trained on."""
    meta = json.loads((PARITY / "meta.json").read_text(encoding="utf-8"))
    model: Any = session.model
    step = StepInput(ids=mx.array([meta["prompt_ids"]], mx.int32))
    hidden = model.forward(step, session.new_caches()).hidden[:, -1:]
    frontier = np.load(PARITY / "frontier_hidden.npy").reshape(1, -1)
    assert distance(np.array(hidden)[0], frontier) < 1e-4
    logits = np.load(PARITY / "backbone_next_logits.npy").reshape(1, -1)
    assert distance(np.array(model.head(hidden))[0], logits) < 2e-4
    assert int(logits.argmax()) == meta["pending_token"]


def test_module_for_speculation_is_recognised_and_unread(session: Session) -> None:
    loaded = session._loaded
    assert loaded is not None
    plan = loaded.spec.answers.mtp
    assert plan is not None
    assert len(plan.expected) == 15
    model: Any = session.model
    assert "mtp" not in model


# ------------------------------------------------------------------ four bits


def convert(target: Path) -> Path:
    """Write the miniature as MLX's converter does: 4 bits in groups of 64, no MTP module."""
    tensors: dict[str, Any] = {}
    for shard in sorted(MINI.glob("*.safetensors")):
        held: Any = mx.load(str(shard))
        for key, value in held.items():
            if key.startswith("mtp."):
                continue
            name = key.replace("model.language_model.", "language_model.model.", 1)
            if "conv1d" in key:
                value = value.transpose(0, 2, 1)
            elif is_delta(key):
                value = value + 1.0
            stem = name.removesuffix("weight")
            if value.ndim == 2 and value.shape[1] % 64 == 0:
                parts = mx.quantize(value, group_size=64, bits=4)
                for part, array in zip(("weight", "scales", "biases"), parts, strict=True):
                    tensors[stem + part] = raw(array)
            else:
                tensors[name] = raw(value)
    config = json.loads((MINI / "config.json").read_text(encoding="utf-8"))
    quantization = {"group_size": 64, "bits": 4, "mode": "affine"}
    config |= {"quantization": quantization, "quantization_config": quantization}
    files: Mapping[str, bytes] = {name: (MINI / name).read_bytes() for name in TEXT_FILES}
    files = {**files, "tokenizer_config.json": (MINI / "tokenizer_config.json").read_bytes()}
    return write_checkpoint(target, config, tensors, files=files)


def raw(array: mx.array) -> Any:
    if array.dtype == mx.uint32:
        return np.array(array)
    words = np.array(mx.contiguous(array).view(mx.uint16))
    return ("BF16", tuple(array.shape), words.astype("<u2").tobytes())


@pytest.fixture(scope="module")
def four_bit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(tmp_path_factory.mktemp("mini") / "four-bit")


@pytest.fixture(scope="module")
def packed(four_bit: Path) -> Iterator[Session]:
    with Session.load(four_bit, compute_dtype="float32") as loaded:
        yield loaded


@pytest.mark.parametrize("name", TOOL_CASES)
def test_four_bits_still_answer_the_tool_prompts(packed: Session, name: str) -> None:
    case = CASES[name]
    reply = packed.complete(case["prompt_ids"], max_tokens=120)
    assert reply.finish_reason == "stop"
    wanted = QWEN_XML.parse(case["text"], ())
    found = QWEN_XML.parse(reply.text, ())
    assert [one.name for one in found] == [one.name for one in wanted]
    assert [one.readings for one in found] == [one.readings for one in wanted]


def test_four_bit_weights_may_stay_packed(packed: Session, four_bit: Path) -> None:
    case = CASES[TOOL_CASES[0]]
    ids = case["prompt_ids"][-40:]
    with Session.load(four_bit, compute_dtype="float32", quantized_weights="keep") as kept:
        model: Any = kept.model
        assert type(model.language_model.model.embed_tokens).__name__ == "QuantizedEmbedding"
        assert kept.info.quantization
        assert distance(kept.score(ids), packed.score(ids)) < 1e-3
