"""Ends of the conversation at and beside the end of a prefill chunk, before openings of any length.

Replies are those of cold runs, and the tokens served are those the prompt cache promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest

from engine_core import Session
from engine_core.generation import Request
from engine_core.limits import LIMITS
from engine_core.plugins import Plugins
from engine_core.testing import layered
from engine_core.testing.conversations import RequestCheck
from engine_core.testing.layered import (
    HYBRID_KINDS,
    THINKING_TEMPLATE,
    TOOL_TEMPLATE,
    write_layered_checkpoint,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK = 32
# More rows than a sliding layer takes back, fewer than a chunk, and more than one.
OPENINGS = {
    "short": TOOL_TEMPLATE,
    "long": THINKING_TEMPLATE,
    "longer": THINKING_TEMPLATE.replace("<think>\\n", "<think>\\n" + "0x1y" * 12),
}
KINDS = {"hybrid": HYBRID_KINDS, "sliding": ("sliding", "full")}


@pytest.fixture(scope="module", params=[f"{kind}-{name}" for kind in KINDS for name in OPENINGS])
def session(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Session]:
    kind, _, opening = request.param.partition("-")
    path = write_layered_checkpoint(
        tmp_path_factory.mktemp("layered"), KINDS[kind], chat_template=OPENINGS[opening]
    )
    limits = attrs.evolve(LIMITS, prefill_chunk_tokens=CHUNK)
    with Session.load(path, plugins=Plugins.load(extra=[layered]), limits=limits) as loaded:
        yield loaded


def lengthened(
    check: RequestCheck, messages: list[dict[str, Any]], options: dict[str, Any], beside: int
) -> list[dict[str, Any]]:
    """Make the last turn so long that the conversation ends beside the end of a chunk."""
    *before, last = messages
    for count in range(4 * CHUNK):
        longer = [*before, {**last, "content": last["content"] + ("0x" * 2 * CHUNK)[:count]}]
        prompt = check.loaded.prompter.prompt(Request.chat(longer, options))
        assert prompt.outline is not None
        _, served = check.promised.reusable(prompt.ids)
        fed = prompt.outline.transcript() - served
        if fed > CHUNK and (fed - beside) % CHUNK == 0:
            return longer
    msg = "no length ends there"
    raise AssertionError(msg)


@pytest.mark.parametrize("prefill", ["", "0x" * 20])
@pytest.mark.parametrize("beside", [-1, 0, 1])
def test_conversation_ends_beside_the_end_of_a_chunk(
    session: Session, beside: int, prefill: str
) -> None:
    check = RequestCheck(session, max_tokens=3)
    options = {"prefill": prefill} if prefill else {}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    for turn in range(2):
        messages = lengthened(check, messages, options, beside)
        # At the last ones the state before the opened reply was passed already.
        for reports in range(5):
            check.cancel(messages, reports, **options)
        check.chat(messages, **options)
        check.chat(messages, **options)
        messages += [
            {"role": "assistant", "content": f"world {turn}"},
            {"role": "user", "content": "name"},
        ]
