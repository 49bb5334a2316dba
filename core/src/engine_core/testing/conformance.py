"""One class a family subclasses to run the whole conformance suite.

    class TestConformance(FamilyConformance):
        family = "bigram"

        def tiny_config(self) -> dict[str, object]: ...
        def tiny_tensors(self) -> Mapping[str, np.ndarray]: ...
        def reference_logits(self, ids: Sequence[int]) -> np.ndarray: ...

``reference_logits`` must be written independently of the model, from the formulas, in NumPy
float64. A subclass may override a test only with ``@pytest.mark.xfail(reason=...)``; a test of
this kit that disappeared makes ``test_kit_is_complete`` fail.
"""

from __future__ import annotations

import importlib.metadata
import os
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

from engine_core.errors import CheckpointError, EngineError
from engine_core.limits import Limits
from engine_core.markers import ENTRY_POINT_GROUP
from engine_core.testing.checkpoints import write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from engine_core.session import Session
    from engine_core.step import CausalLM

__all__ = ["FamilyConformance"]

QUANTIZED_TOLERANCE = 2e-3


class FamilyConformance(ABC):
    """What every family must satisfy; subclass it in the family's own tests.

    Attributes:
        family: ``FamilyInfo.name``.
        tolerance: Largest difference between engine and reference logits, float32.
        prompt_tokens: Length of the test prompt; make it more than twice any window.
        chunk_sizes: Prefill chunk sizes that must agree.
    """

    family: ClassVar[str]
    tolerance: ClassVar[float] = 3e-4
    prompt_tokens: ClassVar[int] = 40
    chunk_sizes: ClassVar[tuple[int, ...]] = (1, 7, 16, 257)

    # ------------------------------------------------------------------ what a family provides

    @abstractmethod
    def tiny_config(self) -> dict[str, Any]:
        """Give a small ``config.json`` that uses every layer kind of the family."""

    @abstractmethod
    def tiny_tensors(self) -> Mapping[str, np.ndarray]:
        """Give float32 checkpoint tensors for it, every norm and scalar random."""

    @abstractmethod
    def reference_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Compute logits ``[T, V]`` in float64 from the formulas, not through the model."""

    # ------------------------------------------------------------------ fixtures

    def prompt(self) -> list[int]:
        """Fixed ids below the vocabulary size."""
        vocabulary = int(self.tiny_config_section()["vocab_size"])
        generator = np.random.Generator(np.random.PCG64(7))
        return [int(i) for i in generator.integers(0, vocabulary, self.prompt_tokens)]

    def tiny_config_section(self) -> dict[str, Any]:
        """The part of the config that holds the text model's sizes."""
        config = self.tiny_config()
        section: dict[str, Any] = config.get("text_config", config)
        return section

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        """The tiny checkpoint on disk."""
        return write_checkpoint(tmp_path / "tiny", self.tiny_config(), self.tiny_tensors())

    @pytest.fixture
    def session(self, checkpoint: Path) -> Iterator[Session]:
        """The tiny checkpoint loaded in float32."""
        with load(checkpoint) as loaded:
            yield loaded

    # ------------------------------------------------------------------ plugin

    def test_entry_point_is_found_and_active(self) -> None:
        """Troubleshooting: the entry point's name must be the family name."""
        from engine_core.plugins import Plugins

        names = {point.name for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
        assert self.family in names
        rows = {row.name: row for row in Plugins.load().reports}
        assert rows[self.family].status == "active", rows[self.family].reason

    def test_plugin_module_is_import_light(self) -> None:
        """Troubleshooting: import MLX and other heavy modules inside functions."""
        points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=self.family)
        module = next(iter(points)).module
        heavy = "{'mlx', 'mlx.core', 'jinja2', 'jsonschema', 'tokenizers'}"
        code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
        result = subprocess.run(  # noqa: S603
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert result.stdout.strip() == "[]"
        assert result.stderr == ""

    def test_claims_are_not_empty(self) -> None:
        """Troubleshooting: ``engine_families`` must name at least one model type."""
        from engine_core.plugins import Plugins

        model_type = self.tiny_config().get("model_type")
        owner = Plugins.load().resolve_owner(model_type, (), family=None)
        assert owner.family.name == self.family
        assert model_type in owner.family.model_types

    # ------------------------------------------------------------------ checkpoint

    def test_missing_tensor_is_refused(self, tmp_path: Path) -> None:
        """Troubleshooting: the architecture must not make a required layer optional."""
        tensors = dict(self.tiny_tensors())
        victim = max(tensors, key=len)
        del tensors[victim]
        path = write_checkpoint(tmp_path / "missing", self.tiny_config(), tensors)
        with pytest.raises(EngineError) as caught, load(path):
            pass
        assert caught.value.code

    def test_extra_tensor_is_refused(self, tmp_path: Path) -> None:
        """Troubleshooting: a plan must not drop keys it does not know."""
        tensors = {**self.tiny_tensors(), "surprise.weight": np.zeros((2, 2), np.float32)}
        path = write_checkpoint(tmp_path / "extra", self.tiny_config(), tensors)
        with pytest.raises(CheckpointError) as caught, load(path):
            pass
        assert "surprise.weight" in str(caught.value)

    def test_misshapen_tensor_is_refused(self, tmp_path: Path) -> None:
        """Troubleshooting: shapes must follow from the configuration."""
        tensors = dict(self.tiny_tensors())
        victim = max((key for key in tensors if tensors[key].ndim == 2), key=len)
        tensors[victim] = np.zeros((3, 5), np.float32)
        path = write_checkpoint(tmp_path / "misshapen", self.tiny_config(), tensors)
        with pytest.raises(EngineError) as caught, load(path):
            pass
        assert caught.value.code

    def test_sharded_checkpoint_gives_equal_logits(self, session: Session, tmp_path: Path) -> None:
        """Troubleshooting: a plan may combine tensors of different shards."""
        path = write_checkpoint(
            tmp_path / "sharded", self.tiny_config(), self.tiny_tensors(), shards=2
        )
        with load(path) as sharded:
            ids = self.prompt()
            assert np.array_equal(sharded.score(ids), session.score(ids))

    def test_fingerprint_is_stable_and_sensitive(self, session: Session, tmp_path: Path) -> None:
        """Troubleshooting: nothing random may enter the answers of the hooks."""
        same = write_checkpoint(tmp_path / "same", self.tiny_config(), self.tiny_tensors())
        with load(same) as again:
            assert again.info.fingerprint == session.info.fingerprint
        tensors = dict(self.tiny_tensors())
        key = next(iter(tensors))
        tensors[key] = tensors[key].copy()
        tensors[key].flat[0] += 1
        other = write_checkpoint(tmp_path / "other", self.tiny_config(), tensors)
        with load(other) as changed:
            assert changed.info.fingerprint != session.info.fingerprint

    # ------------------------------------------------------------------ numbers

    def test_logits_equal_reference(self, session: Session) -> None:
        """Troubleshooting: compare layer by layer; a norm folded twice or never is common."""
        ids = self.prompt()
        difference = np.abs(session.score(ids) - self.reference_logits(ids)).max()
        assert difference < self.tolerance

    def test_greedy_ids_equal_reference(self, session: Session) -> None:
        """Troubleshooting: as for the logits; ties within the tolerance are passed over."""
        ids = self.prompt()[:12]
        reply = session.complete(ids, max_tokens=6, prompt_cache=False)
        for token in reply.token_ids:
            row = self.reference_logits(ids)[-1]
            assert row[token] > row.max() - 2 * self.tolerance
            ids = [*ids, token]

    def test_chunked_prefill_equals_one_pass(self, session: Session, checkpoint: Path) -> None:
        """Troubleshooting: masks and positions must not depend on where a chunk begins."""
        ids = self.prompt()
        whole = session.score(ids)
        for size in self.chunk_sizes:
            with load(checkpoint, limits=Limits(prefill_chunk_tokens=size)) as chunked:
                assert np.abs(chunked.score(ids) - whole).max() < 1e-4, size

    def test_lookahead_changes_nothing(self, session: Session) -> None:
        """Troubleshooting: forward must not keep state outside the caches."""
        ids = self.prompt()
        choices: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "seed": 11})
        for options in choices:
            fast = session.complete(ids, max_tokens=12, prompt_cache=False, **options)
            slow = session.complete(
                ids, max_tokens=12, prompt_cache=False, lookahead=False, **options
            )
            assert fast.token_ids == slow.token_ids

    def test_caches_keep_and_fork_like_a_fresh_feed(self, session: Session) -> None:
        """Troubleshooting: recurrent layers must give ``run`` every input of the recurrence."""
        from engine_core.cache.layers import fork_caches, keep_caches, mark_caches

        ids, feed = self.prompt(), partial(_feed, session.model)
        half = len(ids) // 2
        other = ids[half : half + 6][::-1]
        for kept in (0, 1, 3, 6):
            caches = session.new_caches()
            feed(caches, 0, ids[:half])
            marks = mark_caches(caches)
            feed(caches, half, ids[half : half + 6])
            keep_caches(caches, marks, kept)
            branch = fork_caches(caches)
            result = feed(caches, half + kept, other)
            forked = feed(branch, half + kept, other)
            fresh = session.new_caches()
            feed(fresh, 0, ids[: half + kept])
            expected = feed(fresh, half + kept, other)
            assert np.abs(result - expected).max() < 1e-4, kept
            assert np.abs(forked - expected).max() < 1e-4, kept

    def test_planned_forks_are_like_a_fresh_feed(self, session: Session) -> None:
        """Troubleshooting: a recurrence gives the slots after each of ``ends``, not only the last.

        This is how the state before the opened reply is stored while a prompt is fed.
        """
        from engine_core.cache.layers import fork_caches, plan_fork

        ids, feed = self.prompt(), partial(_feed, session.model)
        half = len(ids) // 2
        for rows, after in ((1, 1), (5, 7), (9, 16)):
            caches = session.new_caches()
            feed(caches, 0, ids[:half])
            assert plan_fork(caches, half + rows, after)
            feed(caches, half, ids[half : half + rows + after])
            branch = fork_caches(caches, half + rows)
            result = feed(branch, half + rows, ids[half : half + 6])
            fresh = session.new_caches()
            feed(fresh, 0, ids[: half + rows])
            expected = feed(fresh, half + rows, ids[half : half + 6])
            assert np.abs(result - expected).max() < 1e-4, (rows, after)

    def test_quantized_checkpoint_stays_close(self, session: Session, tmp_path: Path) -> None:
        """Troubleshooting: parameter paths must equal mapped keys, so layers can be replaced."""
        tensors, quantization = quantize(self.tiny_tensors())
        if not quantization:
            assert not any(t.ndim == 2 and t.shape[1] % 32 == 0 for t in tensors.values())
            return
        config = {**self.tiny_config(), "quantization": quantization}
        path = write_checkpoint(tmp_path / "packed", config, tensors)
        ids = self.prompt()
        with (
            load(path, quantized_weights="keep") as kept,
            load(path, quantized_weights="dequantize") as dense,
        ):
            scale = np.abs(session.score(ids)).max()
            difference = np.abs(kept.score(ids) - dense.score(ids)).max()
            assert difference < QUANTIZED_TOLERANCE * max(1.0, scale)
            assert kept.info.quantization

    # ------------------------------------------------------------------ behaviour

    def test_nothing_is_printed_and_environment_is_kept(
        self, checkpoint: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """Troubleshooting: libraries neither print nor set environment variables."""
        before = dict(os.environ)
        with load(checkpoint) as session:
            session.complete(self.prompt()[:4], max_tokens=2)
        assert capfd.readouterr() == ("", "")
        assert dict(os.environ) == before

    def test_no_connection_and_no_process(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Troubleshooting: everything must come from the checkpoint directory."""

        def refuse(*_: object, **__: object) -> None:
            msg = "loading must not open a connection or start a process"
            raise AssertionError(msg)

        monkeypatch.setattr(socket.socket, "connect", refuse)
        monkeypatch.setattr(subprocess, "Popen", refuse)
        with load(checkpoint) as session:
            session.complete(self.prompt()[:4], max_tokens=2)

    def test_requests_do_not_influence_each_other(self, session: Session) -> None:
        """Troubleshooting: a model holds no request state."""
        ids = self.prompt()
        first = session.complete(ids, max_tokens=8, prompt_cache=False).token_ids
        session.complete(ids[::-1], max_tokens=8, prompt_cache=False)
        assert session.complete(ids, max_tokens=8, prompt_cache=False).token_ids == first

    def test_stored_prefixes_give_the_replies_of_cold_runs(self, session: Session) -> None:
        """Troubleshooting: a cache must hold all that later rows depend on, and nothing else."""
        from hypothesis import HealthCheck, settings
        from hypothesis.stateful import run_state_machine_as_test

        from engine_core.testing.conversations import token_machine

        machine = token_machine(session, int(self.tiny_config_section()["vocab_size"]))
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=4,
                stateful_step_count=10,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )

    def test_kit_is_complete(self) -> None:
        """Troubleshooting: override a kit test only with ``xfail(reason=...)``, delete none."""
        for name, original in vars(FamilyConformance).items():
            if not name.startswith("test_"):
                continue
            current = getattr(type(self), name, None)
            assert callable(current), f"{name} was deleted"
            if current is original:
                continue
            marks = [m for m in getattr(current, "pytestmark", []) if m.name == "xfail"]
            assert marks, f"{name} is overridden without xfail"
            assert marks[0].kwargs.get("reason"), f"{name} needs a reason"


def load(path: Path, **options: Any) -> Session:
    """Load a checkpoint for numbers only, in float32.

    Args:
        path: Checkpoint directory.
        **options: Further options of ``Session.load``.

    Returns:
        A session bound to this thread.
    """
    from engine_core.session import Session

    return Session.load(path, template=False, compute_dtype="float32", **options)


def quantize(tensors: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Pack every matrix whose columns allow it, as MLX's converter does (4 bits, groups of 32).

    Args:
        tensors: Dense checkpoint tensors.

    Returns:
        Tensors with packed triples, and the ``quantization`` section; empty when nothing fits.
    """
    import mlx.core as mx

    result: dict[str, Any] = {}
    packed = False
    for key, tensor in tensors.items():
        if not key.endswith(".weight") or tensor.ndim != 2 or tensor.shape[1] % 32:
            result[key] = tensor
            continue
        weight, scales, biases = mx.quantize(mx.array(tensor), group_size=32, bits=4)
        stem = key.removesuffix("weight")
        result[key] = np.array(weight)
        result[f"{stem}scales"] = np.array(scales)
        result[f"{stem}biases"] = np.array(biases)
        packed = True
    return result, {"group_size": 32, "bits": 4} if packed else {}


def _feed(
    model: CausalLM, caches: Sequence[Any], start: int, token_ids: Sequence[int]
) -> np.ndarray:
    """Run one forward call; its logits ``[L, V]`` in float32."""
    import mlx.core as mx

    from engine_core.step import StepInput

    step = StepInput(ids=mx.array([list(token_ids)], mx.int32), positions=start)
    hidden = model.forward(step, caches).hidden
    return np.asarray(model.head(hidden)[0].astype(mx.float32))
