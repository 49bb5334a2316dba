"""What the documentation names exists."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from engine_core.cache.recurrent import RecurrentCache

ROOT = Path(__file__).resolve().parent.parent
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
FAMILY = (ROOT / "docs" / "writing-a-family.md").read_text(encoding="utf-8")
FAULTS = (ROOT / "docs" / "known-faults.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([\w./-]+\.py)::(\w+)`", FAULTS)))


def test_faults_name_tests() -> None:
    # Every row of a table names one, or points to the row above.
    rows = [line for line in FAULTS.splitlines() if re.match(r"\| \d", line)]
    assert len(rows) > 30
    assert all("::" in row or "the same (case" in row for row in rows)


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_named_test_exists(file: str, name: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    assert re.search(rf"^(?:def|class) {name}\b", text, re.MULTILINE)


def test_module_map_names_every_module() -> None:
    module_map = DESIGN.split("## Module map")[1].split("\n## ")[0]
    named = set(re.findall(r"[a-z0-9_]+", "".join(re.findall(r"`[^`]+`", module_map))))
    core = ROOT / "core" / "src" / "engine_core"
    whole = ("cli", "testing")  # described as packages
    modules = {path for path in core.rglob("*.py") if not path.stem.startswith("__")}
    missing = {path.stem for path in modules if path.parent.name not in whole} - named
    assert len(modules) > 100
    assert not missing


def test_recurrence_of_the_family_page_is_a_moving_average() -> None:
    snippets = re.findall(r"```python\n(.*?)```", FAMILY, re.DOTALL)
    (snippet,) = (text for text in snippets if "def recurrence(" in text)
    scope: dict[str, object] = {}
    exec(snippet, scope)  # noqa: S102
    generator = np.random.default_rng(5)
    decay, values = generator.uniform(size=(2, 2, 9, 3)).astype(np.float32)
    lengths = (9, 6)
    state, expected = np.zeros((2, 3)), []
    for row in range(9):
        moved = decay[:, row] * state + (1 - decay[:, row]) * values[:, row]
        state = np.where([[row < length] for length in lengths], moved, state)
        expected.append(state)

    cache = RecurrentCache(shapes=((2, 3),), dtypes=(mx.float32,))
    assert cache.plan_fork(4, 5)
    inputs = (mx.array(decay), mx.array(values))
    out = cache.run(scope["recurrence"], inputs, mx.array(lengths))  # type: ignore[arg-type]

    np.testing.assert_allclose(out, np.stack(expected, axis=1), atol=1e-6)
    np.testing.assert_allclose(cache.slots[0], expected[8], atol=1e-6)
    np.testing.assert_allclose(cache.fork_at(4).slots[0], expected[3], atol=1e-6)
