from __future__ import annotations

import hashlib
import json
import struct
import subprocess  # noqa: TID251  other processes show that the fingerprint is stable
import sys
import types

import attrs
import pytest

from engine_core.checkpoint.config import CheckpointConfig
from engine_core.errors import CapabilityUnavailable, CheckpointError, PluginError
from engine_core.family import (
    Architecture,
    FamilyInfo,
    MediaPlan,
    MtpPlan,
    NormFold,
    Permute,
    Rename,
    Split,
    TensorInfo,
    WeightPlan,
)
from engine_core.markers import hookimpl
from engine_core.plugins import Plugins
from engine_core.quantization import QuantizationPlan, QuantizationSpec
from engine_core.spec import (
    Capabilities,
    Identity,
    ModelSpec,
    compute_fingerprint,
    describe_quantization,
    resolve_spec_answers,
)

CONFIG = CheckpointConfig({"model_type": "bigram"})
PROCESSOR = CheckpointConfig({"size": 4}, name="processor_config.json")
TENSORS = {
    "m.norm": TensorInfo((4,), "F32"),
    "m.conv": TensorInfo((4, 2, 3), "F32"),
    "m.both": TensorInfo((6, 4), "F32"),
}
ARCHITECTURE = Architecture(
    build=lambda context: None, layers=(), vocab_size=4, hidden_size=2, context_length=8
)


class Recorder:
    """A family plugin that notes every question with its tensors."""

    def __init__(self, fold=None, plan=None):
        self.asked = []
        self.fold = fold
        self.plan = plan or WeightPlan(
            rules=(
                Rename("m.", ""),
                Permute("conv", (0, 2, 1)),
                Split("both", ("upper", "lower"), (2, 4), 0),
            )
        )

    def _note(self, hook, family, tensors):
        with pytest.raises(TypeError):
            tensors["new"] = TensorInfo((1,), "F32")
        self.asked.append((hook, family, {key: info.shape for key, info in tensors.items()}))

    @hookimpl
    def engine_families(self):
        return [FamilyInfo(name="bigram", model_types={"bigram"})]

    @hookimpl
    def engine_weight_plan(self, family, config, tensors):
        self._note("weight_plan", family, tensors)
        return self.plan

    @hookimpl
    def engine_norm_fold(self, family, config, tensors):
        self._note("norm_fold", family, tensors)
        return self.fold

    @hookimpl
    def engine_architecture(self, family, config, tensors):
        self._note("architecture", family, tensors)
        return ARCHITECTURE

    @hookimpl
    def engine_mtp(self, family, config, tensors):
        self._note("mtp", family, tensors)
        return MtpPlan(expected={})

    @hookimpl
    def engine_media(self, family, config, tensors, processor):
        assert processor is PROCESSOR
        self._note("media", family, tensors)
        return MediaPlan(modalities={"image"})


def resolve(recorder, tensors=TENSORS):
    plugins = Plugins.load(extra=[recorder])
    owner = plugins.resolve_owner("bigram")
    return resolve_spec_answers(plugins, owner, CONFIG, tensors, PROCESSOR)


def test_resolve_asks_each_question_once_in_order():
    recorder = Recorder(fold=NormFold(keys={"norm"}))
    answers = resolve(recorder)
    stored = {"norm": (4,), "conv": (4, 2, 3), "upper": (2, 4), "lower": (4, 4)}
    mapped = stored | {"conv": (4, 3, 2)}
    verbatim = {key: info.shape for key, info in TENSORS.items()}
    assert recorder.asked == [
        ("weight_plan", "bigram", verbatim),
        ("norm_fold", "bigram", stored),
        ("architecture", "bigram", mapped),
        ("mtp", "bigram", mapped),
        ("media", "bigram", mapped),
    ]
    assert answers.weight_plan is recorder.plan
    assert answers.norm_fold is recorder.fold
    assert answers.architecture is ARCHITECTURE
    assert answers.mtp == MtpPlan(expected={})
    assert answers.media == MediaPlan(modalities={"image"})
    assert {key: info.shape for key, info in answers.weights.infos.items()} == mapped


@pytest.mark.parametrize(("key", "word"), [("missing", "no such tensor"), ("conv", "shape")])
def test_resolve_fold_of_a_wrong_tensor_fails_before_the_next_question(key, word):
    recorder = Recorder(fold=NormFold(keys={"norm", key}))
    with pytest.raises(PluginError, match=word) as caught:
        resolve(recorder)
    assert caught.value.code == "plugin.answer"
    assert [hook for hook, *_ in recorder.asked] == ["weight_plan", "norm_fold"]


def test_resolve_plan_that_does_not_fit_stops_the_load():
    recorder = Recorder(plan=WeightPlan(rules=(Split("m.both", ("a", "b"), (1, 1), 0),)))
    with pytest.raises(CheckpointError):
        resolve(recorder)
    assert [hook for hook, *_ in recorder.asked] == ["weight_plan"]


def test_resolve_owner_with_required_hooks_only():
    plugin = types.ModuleType("small")
    plugin.engine_families = hookimpl(lambda: [FamilyInfo(name="bigram", model_types={"bigram"})])
    plugin.engine_weight_plan = hookimpl(lambda: WeightPlan(rules=()))
    plugin.engine_architecture = hookimpl(lambda: ARCHITECTURE)
    answers = resolve(plugin)
    assert (answers.norm_fold, answers.mtp, answers.media) == (None, None, None)


def identity(**changes):
    base = Identity(
        config="c" * 64,
        shards={"model-1.safetensors": "1" * 64, "model-2.safetensors": "2" * 64},
        tokenizer={"tokenizer.json": "3" * 64},
        template={"default": "4" * 64},
        adapters={},
        family="bigram of engine-bigram",
        family_version="1.0",
        core_version="2026.11.0",
        compute_dtype="float32",
        quantization="",
    )
    return attrs.evolve(base, **changes)


CHANGES = {
    "config": {"config": "c" * 63 + "d"},
    "a shard": {"shards": {"model-1.safetensors": "1" * 64, "model-2.safetensors": "2" * 63 + "3"}},
    "swapped shards": {
        "shards": {"model-1.safetensors": "2" * 64, "model-2.safetensors": "1" * 64}
    },
    "a missing shard": {"shards": {"model-1.safetensors": "1" * 64}},
    "tokenizer": {"tokenizer": {"tokenizer.json": "5" * 64}},
    "tokenizer configuration": {
        "tokenizer": {"tokenizer.json": "3" * 64, "tokenizer_config.json": "6" * 64}
    },
    "template": {"template": {"default": "7" * 64}},
    "no template": {"template": {}},
    "adapter": {"adapters": {"lora": "8" * 64}},
    "family": {"family": "bigram of engine-other"},
    "family version": {"family_version": "1.1"},
    "core version": {"core_version": "2026.11.1"},
    "compute dtype": {"compute_dtype": "bfloat16"},
    "quantization": {
        "quantization": describe_quantization(QuantizationPlan({"a": QuantizationSpec()}))
    },
    "quantization bits": {
        "quantization": describe_quantization(QuantizationPlan({"a": QuantizationSpec(bits=8)}))
    },
    "quantized path": {
        "quantization": describe_quantization(QuantizationPlan({"b": QuantizationSpec()}))
    },
}


def test_fingerprint_differs_after_any_change():
    prints = [identity().fingerprint()]
    prints += [identity(**change).fingerprint() for change in CHANGES.values()]
    assert len(set(prints)) == len(CHANGES) + 1
    assert {len(one) for one in prints} == {64}


def test_every_identity_field_is_changed_by_the_test_above():
    changed = {name for change in CHANGES.values() for name in change}
    assert changed == {field.name for field in attrs.fields(Identity)}


def test_identity_has_no_default_that_could_be_forgotten():
    assert all(field.default is attrs.NOTHING for field in attrs.fields(Identity))


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_fingerprint_is_equal_in_other_processes(seed):
    program = """
import json, sys
from engine_core.spec import Identity
fields = json.loads(sys.argv[1])
print(Identity(**fields).fingerprint(), hash("seed"))
"""
    fields = json.dumps(attrs.asdict(identity()))
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", program, fields],
        capture_output=True,
        check=True,
        env={"PYTHONHASHSEED": seed},
    )
    assert done.stdout.split()[0].decode() == identity().fingerprint()


def test_compute_fingerprint_ignores_order_only():
    one = compute_fingerprint({"a": "1", "b": "2"})
    assert one == compute_fingerprint({"b": "2", "a": "1"})
    others = [{"a": "2", "b": "1"}, {"a": "1b2"}, {"a": "1", "b2": ""}, {"a1": "", "b": "2"}, {}]
    assert len({one, *map(compute_fingerprint, others)}) == 1 + len(others)
    # A file name of undecodable bytes is text too.
    assert compute_fingerprint({"\udcff": "1"}) != compute_fingerprint({"\udcfe": "1"})


def test_compute_fingerprint_matches_its_written_form():
    """SHA-256 over a tag and each name and value behind an eight-byte big-endian length."""
    pairs = (b"a", b"xyz", "é".encode(), b"")
    written = b"engine fingerprint 1"
    for text in pairs:
        written += struct.pack(">Q", len(text)) + text
    assert compute_fingerprint({"é": "", "a": "xyz"}) == hashlib.sha256(written).hexdigest()


def test_describe_quantization_is_empty_without_packed_layers():
    assert describe_quantization(QuantizationPlan()) == ""


def test_capabilities_missing_one_is_a_typed_error_with_its_reason():
    capabilities = Capabilities(chat=True, reasons={"tools": "the template ignores tools"})
    capabilities.require("chat")
    assert capabilities.reason("chat") == ""
    with pytest.raises(CapabilityUnavailable, match="the template ignores tools") as caught:
        capabilities.require("tools")
    assert caught.value.capability == "interaction:tools"
    assert capabilities.reason("audio")
    names = {
        field.name
        for field in attrs.fields(Capabilities)
        if field.name not in ("tool_syntax", "reasons")
    }
    for name in names - {"chat"}:
        with pytest.raises(CapabilityUnavailable):
            capabilities.require(name)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": True},
        {"tool_syntax": "hermes"},
        {"chat": True, "reasons": {"chat": "x"}},
        {"reasons": {"flying": "x"}},
    ],
)
def test_capabilities_contradicting_itself_is_refused(fields):
    with pytest.raises(ValueError, match="capabilities"):
        Capabilities(**fields)


def test_model_spec_is_frozen():
    spec = ModelSpec(
        family="bigram",
        model_type="bigram",
        plugin="bigram (engine-bigram 1.0)",
        answers=resolve(Recorder()),
        capabilities=Capabilities(),
        fingerprint=identity().fingerprint(),
    )
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        spec.fingerprint = ""
