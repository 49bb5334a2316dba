"""Events and the cancel token."""

from __future__ import annotations

import threading
import time

import attrs
import pytest

from engine_core.errors import Cancelled, DeadlineExceeded, InvalidRequest
from engine_core.events import CancelToken, Progress, Segment, TokenKind


def test_token_kind_value_is_its_text() -> None:
    assert [str(kind) for kind in TokenKind] == ["text", "reasoning", "tool_call"]


def test_records_assignment_is_refused() -> None:
    segment = Segment(kind=TokenKind.TEXT, text="a", token_id=1, ordinal=0)
    progress = Progress(phase="prompt", prompt_tokens=3, max_tokens=4)
    assert progress.cached_tokens is None
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        segment.text = "b"  # type: ignore[misc]
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        progress.done_tokens = 1  # type: ignore[misc]


def test_cancel_token_fresh_passes_checkpoint() -> None:
    token = CancelToken(deadline=1000)
    token.checkpoint()
    assert not token.cancelled


def test_cancel_token_cancelled_on_another_thread_raises_here() -> None:
    token = CancelToken()
    thread = threading.Thread(target=token.cancel)
    thread.start()
    thread.join()
    assert token.cancelled
    with pytest.raises(Cancelled) as caught:
        token.checkpoint()
    assert caught.value.code == "request.cancelled"


def test_cancel_token_deadline_passed_raises_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    token = CancelToken(deadline=2.5)
    now[0] = 102.4
    token.checkpoint()
    now[0] = 102.5
    assert token.cancelled
    with pytest.raises(DeadlineExceeded) as caught:
        token.checkpoint()
    assert caught.value.code == "request.deadline"
    token.cancel()
    with pytest.raises(Cancelled) as by_hand:
        token.checkpoint()
    assert by_hand.value.code == "request.cancelled"


@pytest.mark.parametrize("deadline", [0, -1.0, float("nan"), float("inf"), True, "5"])
def test_cancel_token_deadline_out_of_range_is_refused(deadline: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        CancelToken(deadline=deadline)  # type: ignore[arg-type]
    assert caught.value.code == "request.deadline_range"
