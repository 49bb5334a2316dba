"""Random conversations of several users with one session, checked request by request.

Every reply must equal that of a cold run, and the tokens served must be those that the rules of
the prompt cache promise. Needs hypothesis.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from engine_core.errors import CallbackError, Cancelled
from engine_core.generation import Request
from engine_core.testing.prefixes import PromisedPrefixes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine_core.session import Session

__all__ = ["RequestCheck", "chat_machine", "token_machine"]

TEXTS = st.sampled_from(
    ["hello", "hello world", "the tool", "call the tool", "é日本", "name the user name", "0", "x"]
)
SYSTEMS = st.sampled_from([None, "think of the user", "think of the world"])
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "the tool",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
    },
}
REPLY_TOKENS = 5


class _OnPurposeError(Exception):
    """Raised by a callback of the test."""


class RequestCheck:
    """Runs requests twice, with and without the prompt cache, and compares."""

    def __init__(
        self, session: Session, *, max_tokens: int = REPLY_TOKENS, cold_every: int = 1
    ) -> None:
        """Start with an empty pool.

        Args:
            session: A session whose budget no test reaches.
            max_tokens: Longest reply.
            cold_every: Requests to each one that is compared with a cold run.
        """
        self.session = session
        self.max_tokens = max_tokens
        self.cold_every = cold_every
        self.requests = 0
        self.loaded = session._ready()  # noqa: SLF001
        assert self.loaded.pool is not None
        self.loaded.pool.clear()
        self.promised = PromisedPrefixes(self.loaded.spec.answers.architecture.layers)

    def chat(self, messages: Sequence[Any], **options: Any) -> Any:
        """Run a conversation; see :meth:`run`."""
        request = Request.chat(messages, options)
        prompt = self.loaded.prompter.prompt(request)
        assert prompt.outline is not None
        return self.run(
            prompt.ids,
            [self._transcript(messages, options, prompt.ids)],
            self._opening(messages, options, prompt.ids),
            lambda **more: self.session.generate(messages, **options, **more),
        )

    def fail(self, messages: Sequence[Any], at: int, **options: Any) -> None:
        """Let a callback fail in the middle of a reply; what is committed then is stored.

        Args:
            messages: A conversation that was run before.
            at: Ordinal from which on the callback fails.
            **options: Its options.
        """
        failed: list[int] = []

        def on_token(segment: Any) -> None:
            if segment.ordinal >= at:
                failed.append(segment.ordinal)
                raise _OnPurposeError

        ids = self.loaded.prompter.prompt(Request.chat(messages, options)).ids
        cold = self.session.generate(
            messages, max_tokens=self.max_tokens, prompt_cache=False, **options
        )
        with contextlib.suppress(CallbackError):
            self.session.generate(
                messages, max_tokens=self.max_tokens, on_token=on_token, **options
            )
        committed = failed[0] if failed else len(cold.token_ids) - 1
        self.promised.store([*ids, *cold.token_ids[:committed]])

    def cancel(self, messages: Sequence[Any], at: int, **options: Any) -> None:
        """Cancel a request before its prefill completes; nothing of it is stored.

        Args:
            messages: A conversation.
            at: Prefill reports to let pass, at most all but the last.
            **options: Its options.
        """
        reports: list[int] = []

        def on_progress(event: Any) -> bool:
            if event.phase == "prefill":
                reports.append(event.done_tokens)
            return len(reports) <= at and event.done_tokens < event.prompt_tokens

        try:
            self.session.generate(messages, on_progress=on_progress, **options)
        except Cancelled:
            return
        msg = "a request must not outlive its cancellation"
        raise AssertionError(msg)

    def complete(self, ids: Sequence[int], **options: Any) -> Any:
        """Run a raw prompt; see :meth:`run`."""
        return self.run(
            ids,
            [len(ids) - 1],
            0,
            lambda **more: self.session.complete(ids, **options, **more),
        )

    def run(
        self,
        ids: Sequence[int],
        boundaries: Sequence[int],
        opening: int,
        request: Callable[..., Any],
    ) -> Any:
        """Run a request warm and cold.

        Args:
            ids: Its prompt.
            boundaries: Lengths stored when its prefill completes.
            opening: Length of the block that a conversation's first request stores.
            request: Runs it with further options.

        Returns:
            The warm reply.
        """
        events: list[Any] = []
        least, most = self.promised.reusable(ids)
        reply = request(max_tokens=self.max_tokens, on_progress=events.append)
        cached = reply.usage.cached_tokens
        assert least <= cached <= most, (least, cached, most)
        started = next(event for event in events if event.phase == "prefill")
        assert (started.cached_tokens, started.done_tokens) == (cached, cached)
        fed = [event.done_tokens for event in events if event.phase == "prefill"]
        assert fed == sorted(set(fed))
        assert fed[-1] == len(ids)
        self.note(ids, cached, boundaries, opening)
        committed = reply.token_ids[:-1]
        self.promised.store([*ids, *committed], fed_after=cached)
        self.requests += 1
        if self.requests % self.cold_every:
            return reply
        cold = request(max_tokens=self.max_tokens, prompt_cache=False)
        assert cold.usage.cached_tokens == 0
        assert reply.token_ids == cold.token_ids
        return reply

    def note(
        self, ids: Sequence[int], cached: int, boundaries: Sequence[int], opening: int
    ) -> None:
        """Note what a completed prefill has stored.

        Args:
            ids: The prompt.
            cached: Tokens served.
            boundaries: As for :meth:`run`.
            opening: As for :meth:`run`.
        """
        for length in boundaries:
            if length > cached:
                self.promised.store(ids[:length], fed_after=cached)
        if opening > cached:
            # A request that goes on exactly where another ended leaves the block out.
            self.promised.store(ids[:opening], fed_after=cached, is_certain=cached == 0)

    def _transcript(self, messages: Sequence[Any], options: Any, ids: Sequence[int]) -> int:
        return self._agreement(messages, options, ids, add_generation_prompt=False)

    def _opening(self, messages: Sequence[Any], options: Any, ids: Sequence[int]) -> int:
        system = [message for message in messages if message["role"] == "system"]
        if not system and not options.get("tools"):
            return 0
        return min(
            self._agreement([*system, {"role": "user", "content": text}], options, ids)
            for text in ("q", "z")
        )

    def _agreement(
        self, messages: Sequence[Any], options: Any, ids: Sequence[int], **render: Any
    ) -> int:
        """Render and encode in full, and count the tokens shared with a prompt."""
        request = Request.chat(messages, options)
        template, tokenizer = self.loaded.prompter.template, self.loaded.prompter.tokenizer
        assert template is not None
        assert tokenizer is not None
        turns: Any = request.prompt
        rendered = template.render(
            turns,
            request.options.tools,
            thinking=request.options.thinking,
            template_options=request.options.template_options,
            **render,
        )
        other = tokenizer.encode(rendered.text)
        shared = 0
        while shared < min(len(other), len(ids) - 1) and other[shared] == ids[shared]:
            shared += 1
        return shared


def chat_machine(session: Session) -> type[RuleBasedStateMachine]:
    """Make the state machine of chat conversations.

    Args:
        session: A session with a template that renders tools and reasoning.

    Returns:
        A class for ``run_state_machine_as_test``.
    """

    class ChatMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.check = RequestCheck(session)
            self.users: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []

        def run(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> None:
            self.check.chat(messages, **options)

        @rule(system=SYSTEMS, text=TEXTS, has_tools=st.booleans())
        def start(self, system: str | None, text: str, has_tools: Any) -> None:
            messages = [] if system is None else [{"role": "system", "content": system}]
            messages.append({"role": "user", "content": text})
            options = {"tools": [TOOL]} if has_tools else {}
            self.users.append((messages, options))
            self.run(messages, options)

        @precondition(lambda self: self.users)
        @rule(which=st.integers(0, 9), text=TEXTS)
        def ask(self, which: int, text: str) -> None:
            messages, options = self.users[which % len(self.users)]
            messages += [self.answer(messages, options), {"role": "user", "content": text}]
            self.run(messages, options)

        @precondition(lambda self: any(options for _, options in self.users))
        @rule(which=st.integers(0, 9), results=st.integers(1, 2), text=TEXTS, thinks=st.booleans())
        def use_tools(self, which: int, results: int, text: str, thinks: Any) -> None:
            able = [user for user in self.users if user[1]]
            messages, options = able[which % len(able)]
            calls = [
                {
                    "id": f"call{len(messages)}_{index}",
                    "type": "function",
                    "function": {"name": "look", "arguments": {"name": text}},
                }
                for index in range(results)
            ]
            turn: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls}
            if thinks:
                turn["reasoning_content"] = "think"
            messages.append(turn)
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls
            ]
            self.run(messages, options)

        @precondition(lambda self: self.users)
        @rule(which=st.integers(0, 9))
        def regenerate(self, which: int) -> None:
            self.run(*self.users[which % len(self.users)])

        @precondition(lambda self: self.users)
        @rule(which=st.integers(0, 9), turn=st.integers(0, 9), text=TEXTS)
        def edit(self, which: int, turn: int, text: str) -> None:
            messages, options = self.users[which % len(self.users)]
            asked = [at for at, message in enumerate(messages) if message["role"] == "user"]
            at = asked[turn % len(asked)]
            branch = [*messages[:at], {"role": "user", "content": text}]
            self.users.append((branch, options))
            self.run(branch, options)

        @precondition(lambda self: self.users)
        @rule(which=st.integers(0, 9), text=TEXTS, at=st.integers(0, 3))
        def cancel_prefill(self, which: int, text: str, at: int) -> None:
            messages, options = self.users[which % len(self.users)]
            messages += [self.answer(messages, options), {"role": "user", "content": text}]
            self.check.cancel(messages, at, **options)
            self.run(messages, options)

        @precondition(lambda self: self.users)
        @rule(which=st.integers(0, 9), at=st.integers(0, 3))
        def fail_while_decoding(self, which: int, at: int) -> None:
            messages, options = self.users[which % len(self.users)]
            self.check.fail(messages, at, **options)
            self.run(messages, options)

        def answer(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
            reply = session.generate(
                messages, max_tokens=REPLY_TOKENS, prompt_cache=False, **options
            )
            turn = {"role": "assistant", "content": reply.text}
            if reply.reasoning:
                turn["reasoning_content"] = reply.reasoning
            return turn

    return ChatMachine


def token_machine(session: Session, vocab_size: int) -> type[RuleBasedStateMachine]:
    """Make the state machine of conversations in token ids, for checkpoints without a tokenizer.

    Args:
        session: A session.
        vocab_size: V.

    Returns:
        A class for ``run_state_machine_as_test``.
    """
    runs = st.builds(
        lambda start, step, count: [(start + step * at * at) % vocab_size for at in range(count)],
        st.integers(0, vocab_size - 1),
        st.integers(1, 5),
        st.integers(1, 40),
    )

    class TokenMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.check = RequestCheck(session)
            self.users: list[list[int]] = []

        @rule(run=runs, which=st.integers(0, 9), share=st.integers(0, 60))
        def start(self, run: list[int], which: int, share: int) -> None:
            shared = self.users[which % len(self.users)][:share] if self.users else []
            self.users.append([*shared, *run])
            self.check.complete(self.users[-1])

        @precondition(lambda self: self.users)
        @rule(which=st.integers(0, 9), run=runs, kept=st.integers(0, REPLY_TOKENS))
        def go_on(self, which: int, run: list[int], kept: int) -> None:
            ids = self.users[which % len(self.users)]
            reply = session.complete(ids, max_tokens=REPLY_TOKENS, prompt_cache=False)
            ids += [*reply.token_ids[:kept], *run]
            self.check.complete(ids)

        @precondition(lambda self: self.users)
        @rule(which=st.integers(0, 9), back=st.integers(0, 50), run=runs)
        def branch(self, which: int, back: int, run: list[int]) -> None:
            ids = self.users[which % len(self.users)]
            self.users.append([*ids[: max(len(ids) - back, 0)], *run])
            self.check.complete(self.users[-1])

        @precondition(lambda self: self.users)
        @rule(which=st.integers(0, 9))
        def repeat(self, which: int) -> None:
            self.check.complete(self.users[which % len(self.users)])

    return TokenMachine
