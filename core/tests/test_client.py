"""The client: requests from threads and event loops, streams, cancellation, closing."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from engine_core import (
    AffinityError,
    Busy,
    CallbackError,
    Cancelled,
    CancelToken,
    CapabilityUnavailable,
    CheckpointError,
    Client,
    ClientClosed,
    Completed,
    ContextExceeded,
    DeadlineExceeded,
    FinishReason,
    InvalidRequest,
    Progress,
    Segment,
    Session,
    TokenKind,
)
from engine_core.limits import LIMITS
from engine_core.plugins import Plugins
from engine_core.testing import scripted
from engine_core.testing.scripted import Scripted, write_scripted_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

HELLO = [{"role": "user", "content": "hello"}]
ENDLESS = "0123456789"


@pytest.fixture(scope="module")
def script() -> Scripted:
    made = Scripted()
    made.say("\n", "hello world")
    made.say("!", ENDLESS, loops=True)
    return made


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins.load(extra=[scripted])


@pytest.fixture(scope="module")
def path(script: Scripted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_checkpoint(tmp_path_factory.mktemp("scripted"), script)


@pytest.fixture(scope="module")
def client(path: Path, plugins: Plugins) -> Iterator[Client]:
    with Client.load(path, plugins=plugins, queue_jobs=2) as loaded:
        yield loaded


def is_idle_and_usable(client: Client) -> bool:
    return client.generate(HELLO).text == "hello world"


def endless(script: Scripted) -> list[int]:
    return [script.id("!")]


# Answers.


def test_client_generate_gives_the_scripted_reply(client: Client, script: Scripted) -> None:
    reply = client.generate(HELLO, max_tokens=20)
    expected = [*script.tokenizer.encode("hello world"), script.eos]
    assert reply.text == "hello world"
    assert list(reply.token_ids) == expected
    assert reply.finish_reason is FinishReason.STOP
    assert reply.reasoning is None
    assert not reply.truncated
    assert reply.usage.completion_tokens == len(expected)
    assert reply.usage.cached_tokens == 0
    assert reply.usage.prompt_tokens == len(
        script.tokenizer.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    )
    assert reply.timings.load_seconds > 0
    assert reply.timings.prefill_seconds > 0
    assert reply.timings.decode_seconds > 0


def test_client_reply_cut_by_its_budget_says_so(client: Client) -> None:
    reply = client.generate(HELLO, max_tokens=1)
    assert reply.finish_reason is FinishReason.LENGTH
    assert reply.truncated
    assert len(reply.token_ids) == 1


def test_client_complete_takes_text_and_ids(client: Client, script: Scripted) -> None:
    by_text = client.complete("say!", max_tokens=12)
    by_ids = client.complete(script.tokenizer.encode("say!"), max_tokens=12)
    assert by_text.text == by_ids.text == "012345678901"
    assert by_text.usage.prompt_tokens == len(script.tokenizer.encode("say!"))


def test_client_score_gives_logits_that_decide_the_greedy_reply(
    client: Client, script: Scripted
) -> None:
    ids = np.array(script.tokenizer.encode("!012"))
    logits = client.score(ids)
    assert logits.dtype == np.float32
    assert logits.shape == (4, script.vocab_size)
    assert list(logits.argmax(axis=1)) == script.tokenizer.encode("0123")


def test_client_logprobs_are_those_of_the_logits(client: Client, script: Scripted) -> None:
    reply = client.complete("!", max_tokens=3, logprobs=True, top_logprobs=2)
    logits = client.score(script.tokenizer.encode("!01")).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert reply.logprobs is not None
    for row, (token, entry) in enumerate(zip(reply.token_ids, reply.logprobs, strict=True)):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(expected[row, token], abs=1e-4)
        assert entry.top[0][0] == token
        assert len(entry.top) == 2


def test_client_stop_text_ends_the_answer_across_tokens(client: Client) -> None:
    reply = client.complete("!", max_tokens=40, stop=["345"])
    assert reply.text == "012"
    assert reply.finish_reason is FinishReason.STOP
    assert len(reply.token_ids) == 6


def test_client_stop_text_that_never_comes_withholds_nothing(client: Client) -> None:
    reply = client.complete("!", max_tokens=5, stop=["4x"])
    assert reply.text == "01234"
    assert reply.finish_reason is FinishReason.LENGTH


def test_client_prefill_is_continued(client: Client) -> None:
    reply = client.generate(HELLO, prefill="well!", max_tokens=4)
    assert reply.text == "0123"


@pytest.mark.parametrize("options", [{"temperature": 1.5, "seed": 3}, {"repetition_penalty": 1.2}])
def test_client_lookahead_changes_no_token(client: Client, options: dict[str, Any]) -> None:
    fast = client.complete("!", max_tokens=25, **options)
    slow = client.complete("!", max_tokens=25, lookahead=False, **options)
    assert fast.token_ids == slow.token_ids


def test_client_padded_rows_are_never_sampled(
    script: Scripted, plugins: Plugins, tmp_path: Path
) -> None:
    path = write_scripted_checkpoint(tmp_path, script, padded_rows=5)
    with Client.load(path, plugins=plugins) as padded:
        assert padded.complete("!", max_tokens=4).text == "0123"
        assert padded.info.vocab_size == script.vocab_size + 5


def test_client_info_describes_what_was_loaded(client: Client, script: Scripted) -> None:
    info = client.info
    assert (info.family, info.model_type) == ("scripted", "scripted")
    assert info.capabilities.chat
    assert info.capabilities.system_prompt
    assert not info.capabilities.tools
    assert info.context_length == 2048
    assert script.eos in info.eos_token_ids
    assert info.vocab_size == info.hidden_size == script.vocab_size
    assert info.layer_count == 1
    rows = script.vocab_size
    assert info.parameter_count == 2 * rows * rows + 4 * 8 * rows
    assert info.weight_bytes == 4 * info.parameter_count
    assert info.compute_dtype == "float32"
    assert info.quantization == ""
    assert info.backend.device in {"cpu", "metal", "cuda"}
    assert info.memory.active >= info.weight_bytes
    kept = 0 if info.backend.device == "cpu" else LIMITS.allocator_cache_bytes
    assert info.memory.limit == kept
    assert len(info.fingerprint) == 64
    assert info.has_tokenizer
    assert info.has_template


# Refusals.


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_tokens": 0}, InvalidRequest),
        ({"tempreature": 1.0}, InvalidRequest),
        ({"speculative_tokens": 2}, CapabilityUnavailable),
        ({"response_schema": {"type": "objekt"}}, InvalidRequest),
        ({"thinking": True}, CapabilityUnavailable),
        (
            {"tools": [{"name": "f", "parameters": {"type": "object"}}]},
            CapabilityUnavailable,
        ),
        ({"max_tokens": 2048}, ContextExceeded),
        ({"context_tokens": 20, "max_tokens": 15}, ContextExceeded),
        ({"logit_bias": {1_000_000: 1.0}}, InvalidRequest),
    ],
)
def test_client_request_that_cannot_be_honoured_is_refused(
    client: Client, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        client.generate(HELLO, **options)
    assert type(caught.value) is error
    assert is_idle_and_usable(client)


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ("", {}),
        ([], {}),
        ([-1], {}),
        ([True], {}),
        ([1.5], {}),
        ([10**7], {}),
        ("x", {"thinking": True}),
        ("x", {"prefill": "y"}),
        ("x", {"template_options": {"a": 1}}),
        ("\ud800", {}),
    ],
)
def test_client_completion_that_breaks_a_rule_is_refused(
    client: Client, prompt: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.complete(prompt, **options)
    assert caught.value.code.startswith("request.")


def test_client_prompt_progress_precedes_the_context_check(client: Client) -> None:
    seen: list[Progress] = []
    with pytest.raises(ContextExceeded) as caught:
        client.generate(HELLO, context_tokens=16, max_tokens=10, on_progress=seen.append)
    assert [event.phase for event in seen] == ["prompt"]
    assert seen[0].prompt_tokens == caught.value.prompt_tokens
    assert seen[0].context_limit == 16


def test_client_load_error_keeps_its_type_and_leaves_no_thread(
    tmp_path: Path, plugins: Plugins
) -> None:
    before = threading.active_count()
    with pytest.raises(CheckpointError) as caught:
        Client.load(tmp_path / "nothing", plugins=plugins)
    assert caught.value.code == "checkpoint.missing_file"
    assert threading.active_count() == before


def test_client_load_is_cancelled_by_its_progress_callback(path: Path, plugins: Plugins) -> None:
    with pytest.raises(Cancelled):
        Client.load(path, plugins=plugins, on_load_progress=lambda done, total: done == 0)
    seen: list[tuple[int, int]] = []
    with Client.load(
        path, plugins=plugins, on_load_progress=lambda *step: seen.append(step)
    ) as loaded:
        assert is_idle_and_usable(loaded)
    assert seen[0] == (0, seen[-1][1])
    assert seen[-1][0] == seen[-1][1] > 0


@pytest.mark.parametrize("arguments", [(), ("some/path",), (Path("some/path"),)])
@pytest.mark.parametrize("kind", [Client, Session])
def test_handle_that_is_not_loaded_says_how_to_load(kind: type, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        kind(*arguments)
    assert caught.value.code == f"request.{kind.__name__.lower()}"
    assert f"{kind.__name__}.load(path)" in str(caught.value)


@pytest.mark.parametrize("option", ["device", "is_cancelled"])
def test_client_load_names_itself_for_an_unknown_option(option: str, path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(InvalidRequest) as caught:
        Client.load(path, **{option: None})
    assert caught.value.code == "request.unknown_option"
    assert str(caught.value) == f"Client.load: options must be known, got {option!r}"
    assert "compute_dtype" in caught.value.hint
    assert threading.active_count() == before


def test_client_other_allocator_limit_is_refused(
    client: Client, path: Path, plugins: Plugins
) -> None:
    with pytest.raises(Exception, match="limit") as caught:
        Client.load(path, plugins=plugins, allocator_cache_bytes=123)
    assert caught.value.code == "backend.allocator_conflict"
    assert is_idle_and_usable(client)


# Callbacks.


def test_client_on_token_gets_segments_on_the_worker(client: Client) -> None:
    threads: set[int] = set()
    pieces: list[Segment] = []

    def on_token(segment: Segment) -> bool:
        threads.add(threading.get_ident())
        pieces.append(segment)
        return True

    reply = client.generate(HELLO, on_token=on_token)
    assert "".join(piece.text for piece in pieces) == reply.text
    assert {piece.kind for piece in pieces} == {TokenKind.TEXT}
    assert [reply.token_ids[piece.ordinal] for piece in pieces] == [p.token_id for p in pieces]
    assert threading.get_ident() not in threads
    assert len(threads) == 1


def test_client_on_token_false_ends_the_reply(client: Client) -> None:
    reply = client.complete("!", max_tokens=50, on_token=lambda segment: segment.ordinal < 3)
    assert reply.finish_reason is FinishReason.ABORTED
    assert reply.text == "0123"
    assert len(reply.token_ids) == 4
    assert not reply.truncated


@pytest.mark.parametrize("phase", ["prompt", "prefill", "decode"])
def test_client_on_progress_false_cancels(client: Client, phase: str) -> None:
    with pytest.raises(Cancelled):
        client.generate(HELLO, on_progress=lambda event: event.phase != phase)
    assert is_idle_and_usable(client)


def test_client_progress_counts_every_token_once(client: Client) -> None:
    seen: list[Progress] = []
    reply = client.complete("!", max_tokens=7, on_progress=seen.append)
    decode = [event.completion_tokens for event in seen if event.phase == "decode"]
    assert decode == list(range(1, len(reply.token_ids) + 1))
    phases = [event.phase for event in seen]
    assert phases.index("prefill") == 1
    prefill = [event for event in seen if event.phase == "prefill"]
    assert prefill[-1].done_tokens == reply.usage.prompt_tokens


@pytest.mark.parametrize("name", ["on_token", "on_progress"])
def test_client_raising_callback_is_a_callback_error_with_cause(client: Client, name: str) -> None:
    cause = ZeroDivisionError("mine")

    def fail(_: object) -> bool:
        raise cause

    with pytest.raises(CallbackError) as caught:
        client.generate(HELLO, **{name: fail})
    assert caught.value.__cause__ is cause
    assert caught.value.code == f"callback.{name}"
    assert is_idle_and_usable(client)


def test_client_raising_logits_processor_is_a_callback_error(client: Client) -> None:
    def fail(_: object, __: object) -> object:
        raise ZeroDivisionError

    with pytest.raises(CallbackError):
        client.generate(HELLO, logits_processors=[fail])
    assert is_idle_and_usable(client)


def test_client_called_inside_its_callback_raises_reentrant_call(client: Client) -> None:
    codes: list[str] = []

    def reenter(_: object) -> bool:
        for call in (
            lambda: client.generate(HELLO),
            lambda: client.complete("!"),
            lambda: client.score([1]),
            lambda: client.stream(HELLO),
            client.clone,
            client.close,
        ):
            with pytest.raises(AffinityError) as caught:
                call()
            codes.append(caught.value.code)
        return False

    client.generate(HELLO, on_token=reenter)
    assert codes == ["reentrant_call"] * 6
    assert is_idle_and_usable(client)


def test_client_cancel_inside_a_callback_cancels_the_request(client: Client) -> None:
    with pytest.raises(Cancelled):
        client.complete("!", max_tokens=1900, on_token=lambda _: client.cancel() is None)
    assert is_idle_and_usable(client)


# Streams.


def test_client_stream_equals_the_reply_and_ends_with_it(client: Client) -> None:
    events = list(client.stream(HELLO))
    last = events[-1]
    assert isinstance(last, Completed)
    assert last.reply.text == "hello world"
    assert "".join(e.text for e in events if isinstance(e, Segment)) == "hello world"
    assert next(e.phase for e in events if isinstance(e, Progress)) == "prompt"
    assert sum(isinstance(event, Completed) for event in events) == 1


def test_client_stream_slow_reader_holds_the_producer_back(client: Client) -> None:
    fed: list[int] = []
    stream = client.stream_complete(
        "!", max_tokens=400, on_token=lambda segment: fed.append(segment.ordinal)
    )
    next(stream)
    deadline = time.monotonic() + 10
    while len(fed) < LIMITS.stream_events // 2 - 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    held = len(fed)
    assert held <= LIMITS.stream_events
    text = "".join(event.text for event in stream if isinstance(event, Segment))
    assert len(text) == len(fed) == 400


@pytest.mark.parametrize("way", ["close", "drop", "with", "cancel_and_wait", "client", "token"])
def test_client_stream_left_early_cancels_the_request(client: Client, way: str) -> None:
    stopped = threading.Event()
    token = CancelToken()

    def watch(_: object) -> bool:
        stopped.clear()
        return True

    stream = client.stream_complete("!", max_tokens=1900, on_token=watch, cancel=token)
    for _ in range(5):
        next(stream)
    match way:
        case "close":
            stream.close()
            assert list(stream) == []
        case "drop":
            del stream
            gc.collect()
        case "with":
            with stream:
                next(stream)
        case "cancel_and_wait":
            stream.cancel_and_wait(30)
            assert list(stream) == []
        case "client":
            client.cancel()
            with pytest.raises(Cancelled):
                list(stream)
        case "token":
            token.cancel()
            with pytest.raises(Cancelled):
                list(stream)
    started = time.monotonic()
    assert is_idle_and_usable(client)
    assert time.monotonic() - started < 30


def test_client_stream_error_arrives_at_the_reader(client: Client) -> None:
    stream = client.stream(HELLO, context_tokens=16, max_tokens=10)
    events: list[Any] = []
    with pytest.raises(ContextExceeded):
        events.extend(stream)
    assert [event.phase for event in events] == ["prompt"]
    assert list(stream) == []


def test_client_stream_keeps_a_dropped_client_alive(path: Path, plugins: Plugins) -> None:
    stream = Client.load(path, plugins=plugins).stream(HELLO)
    gc.collect()
    *_, last = stream
    assert last.reply.text == "hello world"


# Cancelling and bounds.


def test_client_token_cancelled_from_another_thread_ends_generate(client: Client) -> None:
    token = CancelToken()
    started = threading.Event()
    timer = threading.Thread(target=lambda: (started.wait(10), token.cancel()))
    timer.start()
    with pytest.raises(Cancelled):
        client.complete(
            "!", max_tokens=1900, cancel=token, on_token=lambda _: started.set() or True
        )
    timer.join()
    assert is_idle_and_usable(client)


def test_client_deadline_cancels(client: Client) -> None:
    with pytest.raises(DeadlineExceeded):
        client.complete(
            "!", max_tokens=1900, deadline=0.05, on_token=lambda _: time.sleep(0.01) or True
        )
    assert is_idle_and_usable(client)


def test_client_full_queue_is_busy_at_once(client: Client) -> None:
    release = threading.Event()
    running = client.stream_complete("!", max_tokens=3, on_token=lambda _: release.wait(20) or True)
    next(running)
    waiting = [client.stream(HELLO) for _ in range(2)]
    with pytest.raises(Busy):
        client.generate(HELLO)
    release.set()
    for stream in (running, *waiting):
        *_, last = stream
        assert isinstance(last, Completed)
    assert is_idle_and_usable(client)


def test_client_waiting_stream_closed_leaves_the_queue(client: Client) -> None:
    release = threading.Event()
    running = client.stream_complete("!", max_tokens=3, on_token=lambda _: release.wait(20) or True)
    next(running)
    client.stream(HELLO).cancel_and_wait(1)
    release.set()
    list(running)
    assert is_idle_and_usable(client)


# asyncio.


def test_client_async_methods_equal_the_blocking_ones(client: Client, script: Scripted) -> None:
    async def main() -> None:
        reply = await client.agenerate(HELLO)
        assert reply.text == "hello world"
        assert (await client.acomplete("!", max_tokens=3)).text == "012"
        ids = script.tokenizer.encode("!0")
        assert np.array_equal(await client.ascore(ids), client.score(ids))
        events = [event async for event in client.astream(HELLO)]
        assert isinstance(events[-1], Completed)
        assert "".join(e.text for e in events if isinstance(e, Segment)) == "hello world"
        pieces = [
            event.text
            async for event in client.astream_complete("!", max_tokens=200)
            if isinstance(event, Segment)
        ]
        assert "".join(pieces) == (ENDLESS * 20)

    asyncio.run(main())


def test_client_async_request_does_not_block_the_loop(client: Client) -> None:
    release = threading.Event()

    async def main() -> int:
        ticks = 0
        task = asyncio.create_task(
            client.acomplete("!", max_tokens=2, on_token=lambda _: release.wait(20) or True)
        )
        while ticks < 20:
            await asyncio.sleep(0.005)
            ticks += 1
            assert not task.done()
        release.set()
        await task
        return ticks

    assert asyncio.run(main()) == 20


@pytest.mark.parametrize("kind", ["agenerate", "astream"])
def test_client_cancelled_task_cancels_the_request(client: Client, kind: str) -> None:
    started = threading.Event()
    left: list[bool] = []

    async def consume() -> None:
        options: dict[str, Any] = {
            "max_tokens": 1900,
            "on_token": lambda _: started.set() or time.sleep(0.002) or True,
        }
        if kind == "agenerate":
            await client.acomplete("!", **options)
        else:
            async for _ in client.astream_complete("!", **options):
                pass

    async def main() -> None:
        task = asyncio.create_task(consume())
        while not started.is_set():
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        left.append(True)

    asyncio.run(main())
    assert left == [True]
    assert is_idle_and_usable(client)


def test_client_async_stream_closed_or_abandoned_with_its_loop_cancels(client: Client) -> None:
    kept: list[Any] = []

    async def abandon() -> None:
        stream = client.astream_complete("!", max_tokens=1900)
        await anext(stream)
        kept.append(stream)

    async def close() -> None:
        async with client.astream_complete("!", max_tokens=1900) as stream:
            await anext(stream)
        stream = client.astream_complete("!", max_tokens=1900)
        await anext(stream)
        await stream.cancel_and_wait()
        assert [event async for event in stream] == []

    asyncio.run(close())
    asyncio.run(abandon())
    assert is_idle_and_usable(client)
    assert kept


# Closing.


def test_client_close_while_running_cancels_and_refuses(path: Path, plugins: Plugins) -> None:
    client = Client.load(path, plugins=plugins)
    errors: list[type[Exception]] = []
    running = threading.Event()

    def work(signal: bool) -> None:
        try:
            client.complete(
                "!",
                max_tokens=1900,
                on_token=lambda _: (running.set() if signal else None) or time.sleep(0.001) or True,
            )
        except Exception as exc:  # noqa: BLE001
            errors.append(type(exc))

    first = threading.Thread(target=work, args=(True,))
    first.start()
    assert running.wait(20)
    second = threading.Thread(target=work, args=(False,))
    second.start()
    while client._lease.worker.waiting == 0:
        time.sleep(0.005)
    client.close()
    client.close()
    first.join(20)
    second.join(20)
    assert Cancelled in errors
    assert len(errors) == 2
    assert set(errors) <= {Cancelled, ClientClosed}
    for call in (lambda: client.generate(HELLO), client.clone, lambda: client.stream(HELLO)):
        with pytest.raises(ClientClosed):
            call()


def test_client_clones_share_one_worker_that_ends_with_the_last(
    path: Path, plugins: Plugins
) -> None:
    first = Client.load(path, plugins=plugins)
    second = first.clone()
    worker = first._lease.worker
    first.close()
    assert is_idle_and_usable(second)
    with pytest.raises(ClientClosed):
        first.generate(HELLO)
    third = second.clone()
    del second
    gc.collect()
    assert is_idle_and_usable(third)
    third.close()
    assert not worker.is_alive


def test_client_dropped_without_close_ends_its_worker(path: Path, plugins: Plugins) -> None:
    client = Client.load(path, plugins=plugins)
    thread = client._lease.worker._thread
    del client
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()


def test_client_async_context_closes(path: Path, plugins: Plugins) -> None:
    async def main() -> Client:
        async with Client.load(path, plugins=plugins) as client:
            assert (await client.agenerate(HELLO)).text == "hello world"
        return client

    client = asyncio.run(main())
    assert not client._lease.worker.is_alive


def test_client_is_used_by_many_threads_at_once(
    client: Client, path: Path, plugins: Plugins
) -> None:
    with Client.load(path, plugins=plugins, queue_jobs=64) as shared:
        replies: list[str] = []
        threads = [
            threading.Thread(
                target=lambda n=n: replies.append(shared.complete("!", max_tokens=n).text)
            )
            for n in range(1, 17)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(replies) == sorted((ENDLESS * 2)[:n] for n in range(1, 17))


# What a caller's code may do wrong.


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()]
)
@pytest.mark.parametrize("option", ["on_token", "on_progress", "logits_processors"])
def test_client_survives_an_exit_raised_by_a_callback(
    client: Client, option: str, error: BaseException
) -> None:
    def leave(*_: object) -> Any:
        raise error

    value: Any = [leave] if option == "logits_processors" else leave
    with pytest.raises(CallbackError) as caught:
        client.generate(HELLO, **{option: value})
    assert caught.value.__cause__ is error
    assert is_idle_and_usable(client)


def test_client_load_progress_callback_that_exits_is_a_typed_error(
    path: Path, plugins: Plugins
) -> None:
    def leave(*_: object) -> bool:
        raise SystemExit(3)

    with pytest.raises(CallbackError):
        Client.load(path, plugins=plugins, on_load_progress=leave)


@pytest.mark.parametrize("option", ["on_token", "on_progress"])
def test_client_refuses_a_callback_to_await(client: Client, option: str) -> None:
    async def later(_: object) -> bool:
        return False

    options: dict[str, Any] = {option: later}
    with pytest.raises(CallbackError) as caught:
        client.generate(HELLO, **options)
    assert caught.value.code == f"callback.{option}"
    assert "coroutine" in str(caught.value)
    assert is_idle_and_usable(client)


@pytest.mark.parametrize(
    "ids",
    [
        np.array([[1, 2]]),
        np.array(3),
        np.array([1.0]),
        np.array([True]),
        {1, 2},
        {1: 2},
        bytearray(b"ab"),
        memoryview(b"ab"),
        range(10**30),
        [-1],
        [10**30],
        [[1]],
        5,
        None,
    ],
    ids=lambda value: type(value).__name__,
)
def test_client_refuses_what_is_no_list_of_token_ids(client: Client, ids: Any) -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        client.complete(ids)
    with pytest.raises(InvalidRequest, match="token_ids"):
        client.score(ids)


def test_client_astream_whose_loop_was_closed_does_not_end_as_if_complete(client: Client) -> None:
    loop = asyncio.new_event_loop()

    async def begin() -> Any:
        stream = client.astream_complete("!", max_tokens=LIMITS.stream_events * 10)
        await anext(stream)
        return stream

    stream = loop.run_until_complete(begin())
    loop.close()
    asyncio.run(stream.cancel_and_wait())  # the worker has met the closed loop by now
    with pytest.raises(Cancelled):
        asyncio.run(anext(stream))
    assert is_idle_and_usable(client)
