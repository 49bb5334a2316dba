"""The prompt cache in the session: what is reused, what is reported, what failures leave behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx
import pytest

import engine_core.decode.prefill as decode_prefill
import engine_core.decode.stepper as decode_stepper
from engine_core import (
    BackendError,
    CallbackError,
    Cancelled,
    Client,
    EngineError,
    FinishReason,
    InvalidRequest,
    ModelError,
    PromptCacheInfo,
    Session,
)
from engine_core.cache.kv import KvCache
from engine_core.cache.layers import cache_nbytes
from engine_core.cache.pool import PromptPool, make_pool
from engine_core.cache.recurrent import RecurrentCache
from engine_core.decode.choice import TokenChooser
from engine_core.plugins import Plugins
from engine_core.testing import layered
from engine_core.testing.conversations import TOOL
from engine_core.testing.layered import (
    HYBRID_KINDS,
    THINKING_TEMPLATE,
    TOOL_TEMPLATE,
    write_layered_checkpoint,
)
from engine_core.testing.layered_model import LayeredModel
from engine_core.text.reply import ReplyDecoder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KINDS = {
    "full": ("full", "full"),
    "sliding": ("sliding", "full"),
    "recurrent": ("recurrent", "recurrent"),
    "hybrid": HYBRID_KINDS,
}
SYSTEM = {"role": "system", "content": "think of the user and name the tool"}
# ``nox -s soak`` runs 500.
SOAK_REQUESTS = int(os.environ.get("ENGINE_SOAK_REQUESTS", "80"))
LONG = "hello world the tool call think user name " * 20


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins.load(extra=[layered])


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("layered")
    return {name: write_layered_checkpoint(folder / name, kinds) for name, kinds in KINDS.items()}


@pytest.fixture(scope="module")
def sessions(paths: dict[str, Path], plugins: Plugins) -> Iterator[dict[str, Session]]:
    loaded = {name: Session.load(path, plugins=plugins) for name, path in paths.items()}
    yield loaded
    for one in loaded.values():
        one.close()


def emptied(session: Session) -> Session:
    """Give the session a pool like new."""
    loaded = session._ready()
    session._loaded = attrs.evolve(loaded, pool=make_pool(None, None))
    return session


@pytest.fixture(params=KINDS)
def any_session(request: pytest.FixtureRequest, sessions: dict[str, Session]) -> Session:
    return emptied(sessions[request.param])


@pytest.fixture
def session(sessions: dict[str, Session]) -> Session:
    return emptied(sessions["hybrid"])


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def opened(session: Session) -> int:
    """Tokens with which the template opens a reply."""
    return len(session._ready().prompter.tokenizer.encode("<|im_start|>assistant\n<think>\n"))


def cold(session: Session, messages: list[dict[str, Any]], **options: Any) -> tuple[int, ...]:
    return session.generate(messages, prompt_cache=False, **options).token_ids


# Reuse and what is reported of it.


def test_second_turn_feeds_only_what_is_new(any_session: Session) -> None:
    messages = [SYSTEM, user("hello")]
    first = any_session.generate(messages, max_tokens=6)
    assert first.usage.cached_tokens == 0
    messages += [assistant("world"), user("call the tool")]
    events: list[Any] = []
    second = any_session.generate(messages, max_tokens=6, on_progress=events.append)
    # All of the first turn but what opened its reply.
    least = first.usage.prompt_tokens - opened(any_session)
    cached = second.usage.cached_tokens
    assert least <= cached < first.usage.prompt_tokens + 6
    prefill = [event for event in events if event.phase == "prefill"]
    assert [event.phase for event in events[:2]] == ["prompt", "prefill"]
    assert events[0].cached_tokens is None
    assert {event.cached_tokens for event in events[1:]} == {cached}
    assert prefill[0].done_tokens == cached
    assert prefill[-1].done_tokens == second.usage.prompt_tokens
    assert second.token_ids == cold(any_session, messages, max_tokens=6)


def test_follow_up_turn_is_one_forward(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state before the opened reply is stored on the way, not by stopping there."""
    fed: list[tuple[int, int]] = []
    forward = LayeredModel.forward

    def watched(self: Any, step: Any, caches: Any) -> Any:
        fed.append((step.positions, step.ids.shape[1]))
        return forward(self, step, caches)

    messages = [SYSTEM, user("hello")]
    session.generate(messages, max_tokens=3)
    monkeypatch.setattr(LayeredModel, "forward", watched)
    for turn in range(3):
        messages += [assistant("name the user"), user(f"think {turn}")]
        fed.clear()
        reply = session.generate(messages, max_tokens=1)
        usage = reply.usage
        assert fed == [(usage.cached_tokens, usage.prompt_tokens - usage.cached_tokens)]
        again = session.generate(messages, max_tokens=1)
        assert again.usage.cached_tokens == usage.prompt_tokens - opened(session)
        assert again.token_ids == cold(session, messages, max_tokens=1)


def test_system_block_serves_other_conversations(any_session: Session) -> None:
    first = any_session.generate([SYSTEM, user("hello")], max_tokens=3)
    other = [SYSTEM, user("the tool")]
    second = any_session.generate(other, max_tokens=3)
    assert 20 <= second.usage.cached_tokens < first.usage.prompt_tokens
    assert second.token_ids == cold(any_session, other, max_tokens=3)
    third = any_session.generate([{**SYSTEM, "content": "name"}, user("hello")], max_tokens=3)
    assert third.usage.cached_tokens < 12


def test_regenerated_and_edited_turns_reuse_their_branch_point(any_session: Session) -> None:
    base = [SYSTEM, user("hello"), assistant("world"), user("call")]
    first = any_session.generate(base, max_tokens=4)
    again = any_session.generate(base, max_tokens=4)
    assert again.token_ids == first.token_ids
    boundary = first.usage.prompt_tokens - opened(any_session)
    assert again.usage.cached_tokens >= boundary
    for text in ("tool", "think", "name"):
        branch = [*base, assistant(text), user("the world")]
        reply = any_session.generate(branch, max_tokens=4)
        assert reply.usage.cached_tokens >= boundary
        assert reply.token_ids == cold(any_session, branch, max_tokens=4)


@pytest.mark.parametrize("template", ["plain", "thinking"])
@pytest.mark.parametrize("kind", ["hybrid", "full", "recurrent"])
def test_agent_loop_reuses_more_on_every_turn(
    kind: str, template: str, tmp_path: Path, plugins: Plugins
) -> None:
    source = {"plain": TOOL_TEMPLATE, "thinking": THINKING_TEMPLATE}[template]
    path = write_layered_checkpoint(tmp_path / "model", KINDS[kind], chat_template=source)
    with Session.load(path, plugins=plugins) as session:
        messages = [SYSTEM, user("call the tool until the world ends")]
        served, fed = [], []
        for turn in range(20):
            reply = session.generate(messages, tools=[TOOL], max_tokens=3)
            served.append(reply.usage.cached_tokens)
            fed.append(reply.usage.prompt_tokens - reply.usage.cached_tokens)
            if turn % 5 == 4:
                assert reply.token_ids == cold(session, messages, tools=[TOOL], max_tokens=3)
            function = {"name": "look", "arguments": {"name": f"name {turn}"}}
            messages += [
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": "think of the tool",
                    "tool_calls": [{"id": f"c{turn}", "type": "function", "function": function}],
                },
                {"role": "tool", "tool_call_id": f"c{turn}", "content": f"world {turn}"},
            ]
        assert served == sorted(set(served))
        # What is fed is the new turn alone: it does not grow with the history.
        assert max(fed[2:]) <= min(fed[2:]) + 3


def test_raw_prompt_sent_again_or_continued_reuses_all_but_its_last_token(
    any_session: Session,
) -> None:
    ids = [(7 * at) % 200 for at in range(90)]
    first = any_session.complete(ids, max_tokens=5)
    again = any_session.complete(ids, max_tokens=5)
    assert again.usage.cached_tokens == 89
    assert again.token_ids == first.token_ids
    longer = [*ids, *first.token_ids[:4], 3, 4, 5]
    third = any_session.complete(longer, max_tokens=5)
    assert third.usage.cached_tokens == 94
    assert (
        third.token_ids == any_session.complete(longer, max_tokens=5, prompt_cache=False).token_ids
    )


def test_prompt_cache_off_neither_reads_nor_writes(any_session: Session) -> None:
    messages = [SYSTEM, user("hello")]
    any_session.generate(messages, max_tokens=3, prompt_cache=False)
    assert any_session.cache_info().entries == 0
    any_session.generate(messages, max_tokens=3)
    before = any_session.cache_info()
    reply = any_session.generate(messages, max_tokens=3, prompt_cache=False)
    assert reply.usage.cached_tokens == 0
    assert any_session.cache_info() == before


def test_caches_of_the_caller_bypass_the_pool(any_session: Session) -> None:
    messages = [SYSTEM, user("hello")]
    any_session.generate(messages, max_tokens=3)
    before = any_session.cache_info()
    caches = any_session.new_caches()
    reply = any_session.generate(messages, max_tokens=3, caches=caches)
    assert reply.usage.cached_tokens == 0
    assert {cache.offset for cache in caches} == {reply.usage.prompt_tokens + 2}
    assert any_session.cache_info() == before


def test_sessions_without_a_budget_keep_nothing(paths: dict[str, Path], plugins: Plugins) -> None:
    with Session.load(paths["hybrid"], plugins=plugins, prompt_cache_bytes=0) as session:
        for _ in range(2):
            assert session.generate([user("hello")], max_tokens=2).usage.cached_tokens == 0
        assert session.cache_info() == PromptCacheInfo()


def test_budget_and_ttl_of_a_client_are_kept(paths: dict[str, Path], plugins: Plugins) -> None:
    with Client.load(
        paths["hybrid"], plugins=plugins, prompt_cache_bytes=400_000, prompt_cache_ttl=3600
    ) as client:
        assert client.cache_info() == PromptCacheInfo(budget_bytes=400_000, ttl_seconds=3600)
        for turn in range(6):
            client.generate([user(f"{LONG} {turn}"), assistant("x"), user("y")], max_tokens=2)
            info = client.cache_info()
            assert 0 < info.bytes <= 400_000
        assert info.evicted > 0
        assert client.info.prompt_cache == info
        seen: list[PromptCacheInfo] = []
        thread = threading.Thread(target=lambda: seen.append(client.cache_info()))
        thread.start()
        thread.join()
        assert seen == [info]


def test_bad_pool_option_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    for options in ({"prompt_cache_bytes": -1}, {"prompt_cache_ttl": 0}):
        with pytest.raises(InvalidRequest):
            Session.load(tmp_path / "missing", **options)


# Cancelling.


def test_cancelled_prefill_publishes_nothing_and_frees_its_memory(any_session: Session) -> None:
    any_session.generate([SYSTEM, user("hello")], max_tokens=2)
    any_session.generate([SYSTEM, user("hello")], max_tokens=2)
    before = any_session.cache_info()
    gc.collect()
    mx.clear_cache()
    active = mx.get_active_memory()
    messages = [SYSTEM, user(LONG)]
    kept: list[BaseException] = []
    for at in range(3):
        reports: list[int] = []

        def stop(event: Any, at: int = at, reports: list[int] = reports) -> bool:
            if event.phase == "prefill":
                reports.append(event.done_tokens)
            return len(reports) <= at and event.done_tokens < event.prompt_tokens

        try:
            any_session.generate(messages, on_progress=stop)
        except Cancelled as exc:
            kept.append(exc)  # its traceback refers to everything the request had
    info = any_session.cache_info()
    assert len(kept) == 3
    assert (info.entries, info.bytes) == (before.entries, before.bytes)
    # On a GPU the last chunk may still run.
    deadline = time.monotonic() + 2
    while mx.get_active_memory() - active >= 100_000 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert mx.get_active_memory() - active < 100_000
    reply = any_session.generate(messages, max_tokens=4)
    assert reply.token_ids == cold(any_session, messages, max_tokens=4)


def test_cancelled_decode_keeps_the_boundary_and_no_reply(any_session: Session) -> None:
    messages = [SYSTEM, user("hello the world")]
    with pytest.raises(Cancelled):
        any_session.generate(
            messages, on_progress=lambda event: event.phase != "decode", max_tokens=9
        )
    lengths = sorted(entry.length for entry in any_session._ready().pool._entries())
    # The system block and the conversation, or the whole prompt where it can be rewound.
    rewinds = all(cache.spare_rows is None for cache in any_session.new_caches())
    assert len(lengths) == (1 if rewinds else 2)
    reply = any_session.generate(messages, max_tokens=4)
    assert reply.usage.cached_tokens == lengths[-1] - rewinds
    assert reply.token_ids == cold(any_session, messages, max_tokens=4)


def test_aborted_reply_is_kept_as_far_as_it_was_fed(any_session: Session) -> None:
    ids = [(5 * at) % 150 for at in range(40)]
    reply = any_session.complete(ids, max_tokens=9, on_token=lambda segment: segment.ordinal < 5)
    assert reply.finish_reason is FinishReason.ABORTED
    longest = max(entry.length for entry in any_session._ready().pool._entries())
    assert longest == len(ids) + len(reply.token_ids) - 1
    longer = [*ids, *reply.token_ids, 1]
    again = any_session.complete(longer, max_tokens=3)
    assert again.usage.cached_tokens == longest
    assert (
        again.token_ids == any_session.complete(longer, max_tokens=3, prompt_cache=False).token_ids
    )


# Faults. Each is injected once into a request that continues a stored conversation; afterwards
# everything that is served must still give the replies of cold runs.


def raises(error: Exception) -> Any:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


class After:
    """Calls the original some times, then fails once, then calls the original again."""

    def __init__(self, original: Any, calls: int, error: Exception) -> None:
        self.original = original
        self.calls = calls
        self.error = error
        self.failed = False

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return lambda *args, **named: self(instance, *args, **named)

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.calls -= 1
        if self.calls == -1:
            self.failed = True
            raise self.error
        return self.original(*args, **named)


DEVICE = BackendError("evaluation: must succeed on the device, got a fault")
SEAMS = {
    "forward": (LayeredModel, "forward", KeyError("weights"), ModelError),
    "head": (LayeredModel, "head", KeyError("weights"), ModelError),
    "append": (KvCache, "append", ValueError("rows"), ModelError),
    "evaluate a chunk": (decode_prefill, "evaluate", DEVICE, BackendError),
    "evaluate a token": (decode_stepper, "evaluate", DEVICE, BackendError),
    "queue a step": (decode_stepper, "queue", DEVICE, BackendError),
    "sampling": (TokenChooser, "choose", InvalidRequest("logits: none"), InvalidRequest),
    "detokenizer": (ReplyDecoder, "push", ModelError("text: broken"), ModelError),
    "pool lookup": (PromptPool, "find", ModelError("pool: broken"), ModelError),
}


@pytest.mark.parametrize("calls", [0, 1, 2, 5])
@pytest.mark.parametrize("seam", SEAMS)
@pytest.mark.parametrize("kind", ["hybrid", "sliding"])
def test_fault_at_a_seam_leaves_no_wrong_state(
    sessions: dict[str, Session],
    kind: str,
    seam: str,
    calls: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = emptied(sessions[kind])
    owner, name, error, expected = SEAMS[seam]
    ids = [(7 * at) % 200 for at in range(30)]
    first = session.complete(ids, max_tokens=4)
    prompts = [[*ids, *first.token_ids[:3], 8, 9], ids, [*ids[:20], 77]]
    want = [session.complete(one, max_tokens=6, prompt_cache=False).token_ids for one in prompts]
    fault = After(getattr(owner, name), calls, error)
    caught: list[EngineError] = []
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fault)
        try:
            session.complete(prompts[0], max_tokens=6, lookahead=calls != 1)
        except EngineError as exc:
            caught.append(exc)
    assert all(isinstance(exc, expected) for exc in caught)
    assert fault.failed or not caught
    if calls == 0:
        assert fault.failed
        assert caught
    for _ in range(2):
        for prompt, tokens in zip(prompts, want, strict=True):
            assert session.complete(prompt, max_tokens=6).token_ids == tokens
    assert session.cache_info().bytes == cache_nbytes(
        cache for entry in session._ready().pool._entries() for cache in entry.caches
    )


def test_device_fault_drops_what_shares_buffers_with_the_failed_request(
    any_session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [(7 * at) % 200 for at in range(30)]
    other = [9, 9, 9, 9]
    any_session.complete(other, max_tokens=2)
    reply = any_session.complete(ids, max_tokens=4)
    shares = any(isinstance(cache, KvCache) for cache in any_session.new_caches())
    with monkeypatch.context() as patch:
        patch.setattr(decode_stepper, "evaluate", raises(DEVICE))
        with pytest.raises(BackendError):
            any_session.complete([*ids, *reply.token_ids[:3], 5], max_tokens=4)
    info = any_session.cache_info()
    assert info.entries == (2 if shares else 4)
    assert (info.failed > 0) == shares
    assert any_session.complete([*other, 3], max_tokens=2).usage.cached_tokens >= 3
    again = any_session.complete(ids, max_tokens=4)
    assert again.usage.cached_tokens == (0 if shares else 29)
    assert again.token_ids == reply.token_ids


def test_forward_failure_while_decoding_keeps_the_boundary(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [SYSTEM, user("hello")]
    with monkeypatch.context() as patch:
        # Opening block, conversation, opened reply, then the first decode step.
        patch.setattr(LayeredModel, "forward", After(LayeredModel.forward, 3, KeyError("gone")))
        with pytest.raises(ModelError):
            session.generate(messages, max_tokens=4)
    assert session.cache_info().boundaries == session.cache_info().entries == 2
    assert session.generate(messages, max_tokens=4).usage.cached_tokens > 30


def test_callback_failure_keeps_what_was_committed(session: Session) -> None:
    ids = [(3 * at) % 150 for at in range(40)]
    seen: list[int] = []

    def fail(segment: Any) -> None:
        seen.append(segment.token_id)
        if segment.ordinal == 4:
            msg = "on purpose"
            raise RuntimeError(msg)

    with pytest.raises(CallbackError):
        session.complete(ids, max_tokens=9, on_token=fail)
    longest = max(entry.length for entry in session._ready().pool._entries())
    assert longest == len(ids) + 4


def test_failed_pool_insert_does_not_fail_the_reply(
    any_session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    import engine_core.cache.pool as pool_module

    messages = [SYSTEM, user("hello")]
    with monkeypatch.context() as patch:
        patch.setattr(pool_module, "detach_caches", raises(DEVICE))
        reply = any_session.generate(messages, max_tokens=4)
    assert reply.token_ids == cold(any_session, messages, max_tokens=4)
    assert any_session.cache_info().entries == 0
    assert any_session.cache_info().failed >= 2
    assert any_session.generate(messages, max_tokens=4).token_ids == reply.token_ids


def test_family_that_leaves_a_cache_unused_is_served_without_reuse(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = RecurrentCache.run

    def forget(self: Any, recurrence: Any, inputs: Any) -> Any:
        out = original(self, recurrence, inputs)
        self.reset()
        return out

    monkeypatch.setattr(RecurrentCache, "run", forget)
    for _ in range(2):
        reply = session.generate([SYSTEM, user("hello")], max_tokens=3)
        assert reply.usage.cached_tokens == 0
    assert session.cache_info().entries == 0
    assert session.cache_info().failed > 0


def test_interrupt_in_the_middle_of_a_forward_drops_what_it_shared(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = [SYSTEM, user("hello")]
    session.generate(base, max_tokens=3)
    with monkeypatch.context() as patch:
        patch.setattr(KvCache, "append", raises(KeyboardInterrupt()))  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            session.generate([*base, assistant("x"), user("y")], max_tokens=3)
    assert session.cache_info().entries == 0
    assert session.generate(base, max_tokens=3).token_ids == cold(session, base, max_tokens=3)


# Memory.


@pytest.fixture
def exact_memory() -> Iterator[None]:
    """Count what is asked for: a freed buffer used again may be larger."""
    before = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(before)


@pytest.mark.usefixtures("exact_memory")
def test_mixed_requests_hold_steady_memory(paths: dict[str, Path], plugins: Plugins) -> None:
    with Session.load(paths["hybrid"], plugins=plugins, prompt_cache_bytes=1_000_000) as session:
        mx.set_cache_limit(0)
        levels = []
        for number in range(SOAK_REQUESTS):
            messages = [
                SYSTEM,
                user(f"hello {number % 7}"),
                assistant("x"),
                user(LONG[: number % 99]),
            ]
            kind = number % 5
            try:
                if kind == 3:
                    session.generate(messages, on_progress=lambda event: event.phase == "prompt")
                elif kind == 4:
                    session.complete([number % 100] * 50, max_tokens=4)
                else:
                    session.generate(messages, max_tokens=4, prompt_cache=kind != 2)
            except Cancelled:
                pass
            info = session.cache_info()
            assert info.bytes <= 1_000_000
            if number >= SOAK_REQUESTS // 2 and number % 5 == 0:
                gc.collect()
                # What the pool holds varies below its budget; nothing else may.
                levels.append(mx.get_active_memory() - info.bytes)
        assert info.evicted > 0
        spread = (max(levels) - min(levels)) / (max(levels) + info.bytes)
        print(
            f"{SOAK_REQUESTS} requests: {min(levels)} to {max(levels)} bytes beside a pool of "
            f"{info.bytes}, spread {spread:.2%}"
        )
        assert spread <= 0.02


def test_closed_session_and_client_report_an_empty_pool(
    paths: dict[str, Path], plugins: Plugins
) -> None:
    with Session.load(paths["hybrid"], plugins=plugins) as session:
        session.generate([user("hello")], max_tokens=3)
        before = session.cache_info()
    with Client.load(paths["hybrid"], plugins=plugins) as client:
        client.generate([user("hello")], max_tokens=3)
        assert client.cache_info() == before
    assert before.entries > 0
    for closed in (session, client):
        assert closed.cache_info() == attrs.evolve(before, entries=0, boundaries=0, bytes=0)


def test_closing_a_session_frees_its_pool(paths: dict[str, Path], plugins: Plugins) -> None:
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    with Session.load(paths["hybrid"], plugins=plugins) as session:
        session.generate([SYSTEM, user(LONG)], max_tokens=3)
        assert mx.get_active_memory() - before > 100_000
    gc.collect()
    assert mx.get_active_memory() - before < 20_000
