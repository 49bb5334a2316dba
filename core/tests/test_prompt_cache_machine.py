"""Random conversations over every cache kind: replies of cold runs, tokens served as promised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from engine_core import Session
from engine_core.plugins import Plugins
from engine_core.testing import layered
from engine_core.testing.conversations import chat_machine, token_machine
from engine_core.testing.layered import (
    HYBRID_KINDS,
    THINKING_TEMPLATE,
    TOOL_TEMPLATE,
    write_layered_checkpoint,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KINDS = {
    "full": ("full", "full"),
    "sliding": ("sliding", "full"),
    "recurrent": ("recurrent", "recurrent"),
    "shared": ("sliding", "full", "shared"),
    "hybrid": HYBRID_KINDS,
}
TEMPLATES = {"plain": TOOL_TEMPLATE, "thinking": THINKING_TEMPLATE}
SETTINGS = settings(
    max_examples=5,
    stateful_step_count=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(
    scope="module", params=[f"{kind}-{template}" for kind in KINDS for template in TEMPLATES]
)
def session(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Session]:
    kind, _, template = request.param.partition("-")
    path = write_layered_checkpoint(
        tmp_path_factory.mktemp("layered"), KINDS[kind], chat_template=TEMPLATES[template]
    )
    with Session.load(path, plugins=Plugins.load(extra=[layered])) as loaded:
        yield loaded


def test_chat_random_conversations_equal_cold_runs(session: Session) -> None:
    run_state_machine_as_test(chat_machine(session), settings=SETTINGS)


@pytest.mark.parametrize("kind", [*KINDS, "none"])
def test_token_random_conversations_equal_cold_runs(kind: str, tmp_path: Path) -> None:
    path = write_layered_checkpoint(tmp_path / "model", KINDS.get(kind, ()))
    with Session.load(path, plugins=Plugins.load(extra=[layered])) as session:
        vocab_size = session.info.vocab_size
        run_state_machine_as_test(token_machine(session, vocab_size), settings=SETTINGS)
