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


@pytest.fixture(scope="module", params=KINDS)
def kinds(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return KINDS[request.param]


@pytest.fixture(scope="module", params=TEMPLATES)
def session(
    request: pytest.FixtureRequest,
    kinds: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Session]:
    path = write_layered_checkpoint(
        tmp_path_factory.mktemp("layered"), kinds, chat_template=TEMPLATES[request.param]
    )
    with Session.load(path, plugins=Plugins.load(extra=[layered])) as loaded:
        yield loaded


def test_chat_random_conversations_equal_cold_runs(session: Session) -> None:
    run_state_machine_as_test(chat_machine(session), settings=SETTINGS)


def test_token_random_conversations_equal_cold_runs(session: Session) -> None:
    vocab_size = session.info.vocab_size
    run_state_machine_as_test(token_machine(session, vocab_size), settings=SETTINGS)
