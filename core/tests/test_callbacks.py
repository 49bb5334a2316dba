"""What callbacks may answer: ``False`` and what equals it, unless it is a number, says no."""

from __future__ import annotations

import io
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest

from engine_core import CallbackError, Cancelled, Client, FinishReason
from engine_core.callbacks import call_back, says_no
from engine_core.plugins import Plugins
from engine_core.testing.playback import Playback
from engine_core.testing.tokenizers import byte_level_tokenizer_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NO: list[Any] = [False, np.False_, np.array(False), mx.array(False)]
YES: list[Any] = [
    None,
    True,
    np.True_,
    np.array(True),
    0,
    0.0,
    1,
    np.int64(0),
    Decimal(0),
    "",
    "no",
    [],
    {},
]


class Unequal:
    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError

    __hash__ = None  # type: ignore[assignment]


class WithoutTextError(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


UNCLEAR: list[Any] = [np.array([False, True]), Unequal()]


def test_error_without_a_text_is_a_callback_error() -> None:
    def fail() -> None:
        raise WithoutTextError

    with pytest.raises(CallbackError, match=r"^on_token: must not raise, got .*WithoutTextError"):
        call_back(fail, "on_token")


@pytest.mark.parametrize("answer", NO, ids=repr)
def test_says_no_to_false_and_its_equals(answer: object) -> None:
    assert says_no(lambda: answer, "on_token") is True


@pytest.mark.parametrize("answer", YES, ids=repr)
def test_says_yes_to_everything_else(answer: object) -> None:
    assert says_no(lambda: answer, "on_token") is False


@pytest.mark.parametrize("answer", UNCLEAR, ids=["array", "raises"])
def test_answer_without_a_truth_value_is_a_typed_error(answer: object) -> None:
    with pytest.raises(CallbackError) as caught:
        says_no(lambda: answer, "on_token")
    assert caught.value.code == "callback.on_token"


@pytest.fixture(scope="module")
def playback() -> Playback:
    return Playback(byte_level_tokenizer_json())


@pytest.fixture(scope="module")
def path(playback: Playback, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return playback.write_checkpoint(tmp_path_factory.mktemp("playback"), source)


@pytest.fixture(scope="module")
def client(playback: Playback, path: Path) -> Iterator[Client]:
    with Client.load(path, plugins=Plugins.load(extra=[playback])) as loaded:
        yield loaded


MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("answer", NO, ids=repr)
def test_on_token_ends_the_reply(client: Client, playback: Playback, answer: Any) -> None:
    reply = playback.answer(client, MESSAGES, "hello world tool", on_token=lambda _: answer)
    assert reply.finish_reason is FinishReason.ABORTED
    assert len(reply.token_ids) == 1


def test_on_token_that_gives_a_count_of_zero_ends_nothing(
    client: Client, playback: Playback
) -> None:
    options: dict[str, Any] = {"on_token": lambda _: io.StringIO().write("")}
    reply = playback.answer(client, MESSAGES, "hello world", **options)
    assert (reply.text, reply.finish_reason) == ("hello world", FinishReason.STOP)


@pytest.mark.parametrize("answer", NO, ids=repr)
def test_on_progress_cancels(client: Client, answer: Any) -> None:
    with pytest.raises(Cancelled, match="on_progress"):
        client.generate(MESSAGES, max_tokens=2, on_progress=lambda _: answer)


@pytest.mark.parametrize("answer", NO, ids=repr)
def test_on_load_progress_cancels(path: Path, playback: Playback, answer: Any) -> None:
    plugins = Plugins.load(extra=[playback])
    with pytest.raises(Cancelled, match="on_load_progress"):
        Client.load(path, plugins=plugins, on_load_progress=lambda *_: answer)
