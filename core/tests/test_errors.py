"""Typed errors: what they show is fit for a terminal and a JSON line, and they can be sent on."""

from __future__ import annotations

import pickle

import pytest

from engine_core import errors
from engine_core.errors import ContextExceeded, EngineError, InvalidRequest


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("\x1b[2Jboo", "\\x1b[2Jboo"),
        ("\udcff", "\\udcff"),
        ("a\rb\0", "a\\rb\\x00"),
        ("naïve 日本\n", "naïve 日本\n"),
    ],
)
def test_error_message_escapes_what_no_terminal_or_encoder_takes(name: str, shown: str) -> None:
    message = str(EngineError(f"{name}: must exist"))
    assert message == f"{shown}: must exist"
    assert message.encode()


def test_error_message_is_bounded() -> None:
    message = str(EngineError("x" * 10**6))
    assert len(message) < 2100
    assert message.endswith("(1000000 characters)")


@pytest.mark.parametrize("name", sorted(set(errors.__all__) - {"ContextExceeded"}))
def test_error_survives_pickling_with_code_and_hint(name: str) -> None:
    kind = getattr(errors, name)
    made = (
        kind("acceleration:mtp", "no module", hint="do it")
        if name == "CapabilityUnavailable"
        else kind("a\x1b: must be, got b", code="area.name", hint="do it")
    )
    again = pickle.loads(pickle.dumps(made))  # noqa: S301
    assert type(again) is kind
    assert (str(again), again.code, again.hint) == (str(made), made.code, made.hint)


def test_context_exceeded_survives_pickling() -> None:
    again = pickle.loads(pickle.dumps(ContextExceeded(10, 5, 12)))  # noqa: S301
    assert isinstance(again, InvalidRequest)
    assert (again.prompt_tokens, again.max_tokens, again.limit) == (10, 5, 12)
