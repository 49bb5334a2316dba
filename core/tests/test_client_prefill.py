"""Cancelling in the middle of a long prefill: no chunk follows the one that runs."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import TYPE_CHECKING, Any

import pytest

from engine_core import Cancelled, CancelToken, Client
from engine_core.limits import LIMITS
from engine_core.plugins import Plugins
from engine_core.testing import layered
from engine_core.testing.layered import write_layered_checkpoint
from engine_core.testing.layered_model import LayeredModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CHUNKS = 8
LONG = [(7 * at) % 200 for at in range(CHUNKS * LIMITS.prefill_chunk_tokens)]
SHORT = [3, 1, 4, 1, 5, 9, 2, 6]
SECONDS = 30


class Gate:
    """Holds a request inside the forward of its third chunk until it is let go."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.rows: list[int] = []
        self.inside = threading.Event()
        self.go = threading.Event()

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return lambda step, caches: self.forward(instance, step, caches)

    def forward(self, instance: Any, step: Any, caches: Any) -> Any:
        self.rows.append(step.ids.shape[1])
        if len(self.rows) == 3:
            self.inside.set()
            assert self.go.wait(SECONDS)
        return self.original(instance, step, caches)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    path = write_layered_checkpoint(tmp_path_factory.mktemp("layered"))
    with Client.load(path, plugins=Plugins.load(extra=[layered])) as made:
        yield made


@pytest.fixture
def client(loaded: Client) -> Iterator[Client]:
    """The client; afterwards nothing of the cancelled request is stored and it answers rightly."""
    want = loaded.complete(SHORT, max_tokens=5, prompt_cache=False).token_ids
    before = loaded.cache_info()
    yield loaded
    assert loaded.complete(SHORT, max_tokens=5, prompt_cache=False).token_ids == want
    assert loaded.cache_info().entries == before.entries
    assert loaded.cache_info().bytes == before.bytes


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, client: Client) -> Iterator[Gate]:
    made = Gate(LayeredModel.forward)
    with monkeypatch.context() as patch:
        patch.setattr(LayeredModel, "forward", made)
        yield made
        made.go.set()
        client.complete(SHORT, max_tokens=1, prompt_cache=False)  # waits for its turn
    assert made.rows.count(LIMITS.prefill_chunk_tokens) == 3


@pytest.mark.parametrize("way", ["token", "client", "progress"])
def test_blocking_request_cancelled_in_its_prefill_feeds_no_further_chunk(
    client: Client, gate: Gate, way: str
) -> None:
    token = CancelToken()
    ended: list[BaseException] = []
    reports: list[int] = []

    def on_progress(event: Any) -> bool:
        if event.phase == "prefill":
            reports.append(event.done_tokens)
        return way != "progress" or event.done_tokens < 3 * LIMITS.prefill_chunk_tokens

    def ask() -> None:
        with pytest.raises(Cancelled) as caught:
            client.complete(LONG, max_tokens=2, cancel=token, on_progress=on_progress)
        ended.append(caught.value)

    thread = threading.Thread(target=ask)
    thread.start()
    assert gate.inside.wait(SECONDS)
    if way == "token":
        token.cancel()
    elif way == "client":
        client.cancel()
    gate.go.set()
    thread.join(SECONDS)
    assert len(ended) == 1
    assert reports == sorted(set(reports))
    assert len(reports) <= 4


@pytest.mark.parametrize("way", ["close", "cancel_and_wait", "drop"])
def test_stream_left_in_its_prefill_feeds_no_further_chunk(
    client: Client, gate: Gate, way: str
) -> None:
    stream = client.stream_complete(LONG, max_tokens=2)
    assert gate.inside.wait(SECONDS)
    if way == "close":
        stream.close()
    elif way == "drop":
        del stream
        gc.collect()
    else:
        threading.Timer(0.05, gate.go.set).start()
        stream.cancel_and_wait(SECONDS)
        assert len(gate.rows) == 3


@pytest.mark.parametrize("way", ["task", "streaming task", "aclose", "drop"])
def test_asyncio_request_cancelled_in_its_prefill_feeds_no_further_chunk(
    client: Client, gate: Gate, way: str
) -> None:
    async def read(stream: Any) -> None:
        async for _ in stream:
            pass

    async def main() -> None:
        stream = None if way == "task" else client.astream_complete(LONG, max_tokens=2)
        job = client.acomplete(LONG, max_tokens=2) if stream is None else read(stream)
        task = asyncio.create_task(job)
        # The loop runs while the worker is inside a forward.
        async with asyncio.timeout(SECONDS):
            while not gate.inside.is_set():
                await asyncio.sleep(0.001)
        if way == "aclose":
            closing = asyncio.create_task(stream.aclose())
            await asyncio.sleep(0)
            gate.go.set()
            await closing
            await task
            return
        task.cancel()
        del stream
        gate.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
