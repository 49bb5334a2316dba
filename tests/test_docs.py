"""What the documentation names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
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
