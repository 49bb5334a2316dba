"""One request while it runs: what it asks for, when it stops, whom it tells.

Everything here is plain Python: a request is checked on the caller's thread before any work.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import TYPE_CHECKING, Any

import attrs

from engine_core.callbacks import says_no
from engine_core.errors import (
    Cancelled,
    ContextExceeded,
    DeadlineExceeded,
    InvalidRequest,
)
from engine_core.events import Completed, Progress
from engine_core.limits import LIMITS
from engine_core.message_parsing import parse_messages
from engine_core.request import GenerateOptions
from engine_core.tool_parsing import check_declared
from engine_core.tools.accept import Toolset
from engine_core.tools.schema import compile_schema
from engine_core.values import shown, text_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine_core.events import Event, Phase, Segment
    from engine_core.messages import Message
    from engine_core.request import GenerateReply
    from engine_core.tools.schema import CompiledSchema

__all__ = ["Control", "Request", "Run", "checked_token_ids"]


def checked_token_ids(token_ids: Sequence[int], subject: str) -> tuple[int, ...]:
    """Check token ids as far as that goes without a vocabulary.

    Args:
        token_ids: At least one id.
        subject: What they are, for the error.

    Returns:
        A copy.

    Raises:
        InvalidRequest: It is no non-empty sequence of non-negative integers, or too long.
    """
    code = f"request.{subject}"
    values = _as_list(token_ids, LIMITS.context_tokens + 1)
    if values is None:
        raise InvalidRequest(
            f"{subject}: must be a sequence of token ids, got {shown(token_ids)}", code=code
        )
    if not 1 <= len(values) <= LIMITS.context_tokens:
        raise InvalidRequest(
            f"{subject}: must hold 1 to {LIMITS.context_tokens} ids, got "
            + ("more" if values else "none"),
            code=code,
        )
    ids = []
    for index, value in enumerate(values):
        try:
            # Older NumPy turns its booleans into numbers, with a warning.
            is_boolean = type(value).__name__ in ("bool", "bool_")
            number = -1 if is_boolean else operator.index(value)
        except TypeError:  # no integer: a float, a text, a row of a matrix
            number = -1
        if not 0 <= number <= LIMITS.tensor_dimension:
            raise InvalidRequest(
                f"{subject}[{index}]: must be a token id, got {shown(value)}", code=code
            )
        ids.append(number)
    return tuple(ids)


def _as_list(values: object, most: int) -> list[Any] | None:
    """Copy the start of a sequence or a one-dimensional array, ``None`` when it is neither."""
    texts = (str, bytes, bytearray, memoryview)
    if isinstance(values, (*texts, AbstractSet, Mapping)) or not hasattr(values, "__getitem__"):
        return None
    try:
        return list(islice(iter(values), most))
    except TypeError:  # an array without a dimension
        return None


@attrs.frozen(kw_only=True, eq=False)
class Request:
    """A checked request.

    Attributes:
        prompt: A conversation, raw text, or token ids.
        options: Checked options.
        is_chat: Whether the prompt is a conversation.
        toolset: Advertised tools with executable schemas.
        response_schema: Executable form of the response schema.
        submitted: When it was made (seconds of the monotonic clock); a deadline counts from here.
    """

    prompt: tuple[Message, ...] | str | tuple[int, ...]
    options: GenerateOptions
    is_chat: bool = False
    toolset: Toolset = attrs.field(factory=Toolset)
    response_schema: CompiledSchema | None = None
    submitted: float = attrs.field(factory=time.monotonic)

    @classmethod
    def chat(cls, messages: Sequence[Any], options: Mapping[str, Any]) -> Request:
        """Check a conversation.

        Args:
            messages: ``Message`` records or OpenAI-style dicts.
            options: Options by name.

        Returns:
            The request.

        Raises:
            InvalidRequest: A message or an option breaks a rule, a schema cannot be executed, or
                the conversation calls a tool that is not declared.
        """
        checked = GenerateOptions.parse(**options)
        turns = parse_messages(messages)
        check_declared(turns, checked.tools)
        declared = Toolset.compile(checked.tools, annotations=checked.schema_annotations)
        return cls(
            prompt=turns,
            options=checked,
            is_chat=True,
            toolset=declared.advertising([tool.name for tool in checked.advertised_tools]),
            response_schema=_response_schema(checked),
        )

    @classmethod
    def completion(cls, prompt: str | Sequence[int], options: Mapping[str, Any]) -> Request:
        """Check a raw prompt.

        Args:
            prompt: Text or token ids.
            options: Options by name; those that only a template can honour are refused.

        Returns:
            The request.

        Raises:
            InvalidRequest: The prompt or an option breaks a rule.
        """
        checked = GenerateOptions.parse(**options)
        for name in _CHAT_ONLY:
            if getattr(checked, name) not in _UNSET:
                raise InvalidRequest(
                    f"{name}: needs a conversation, got a raw prompt",
                    code=f"request.{name}",
                    hint="use generate() with messages, or leave the option out",
                )
        if not isinstance(prompt, str):
            return cls(
                prompt=checked_token_ids(prompt, "prompt"),
                options=checked,
                response_schema=_response_schema(checked),
            )
        size = text_size(prompt, "prompt", "request.prompt")
        if not 1 <= size <= LIMITS.content_bytes_per_message:
            raise InvalidRequest(
                f"prompt: must have 1 to {LIMITS.content_bytes_per_message} bytes, got {size}",
                code="request.prompt",
            )
        return cls(prompt=prompt, options=checked, response_schema=_response_schema(checked))

    @classmethod
    def either(
        cls,
        messages: Sequence[Any] | None,
        prompt: str | Sequence[int] | None,
        options: Mapping[str, Any],
    ) -> Request:
        """Check a conversation or a raw prompt, whichever is given.

        Args:
            messages: A conversation.
            prompt: Text or token ids.
            options: Options by name.

        Returns:
            The request.

        Raises:
            InvalidRequest: Not exactly one is given, or it breaks a rule.
        """
        if messages is not None and prompt is None:
            return cls.chat(messages, options)
        if prompt is not None and messages is None:
            return cls.completion(prompt, options)
        raise InvalidRequest(
            "request: exactly one of messages and prompt must be given, got "
            + ("neither" if prompt is None else "both"),
            code="request.prompt",
        )


def _response_schema(options: GenerateOptions) -> CompiledSchema | None:
    if options.response_schema is None:
        return None
    return compile_schema(
        options.response_schema,
        "response_schema",
        annotations=options.schema_annotations,
        code="request.response_schema",
    )


_CHAT_ONLY = ("tools", "thinking", "reasoning_budget", "template_options", "prefill")
_UNSET: tuple[object, ...] = (None, (), {})


def _never() -> bool:
    return False


@attrs.frozen(kw_only=True, eq=False)
class Control:
    """What the caller's side of a request adds: a way to stop it and a place for its events.

    Attributes:
        is_cancelled: Whether the caller wants it stopped.
        put: Takes an event, waiting for room; ``False`` when nobody reads any more.
    """

    is_cancelled: Callable[[], bool] = _never
    put: Callable[[Event, Callable[[], bool]], bool] | None = None

    def checkpoint(self) -> None:
        """Do nothing while the request is wanted, else raise.

        Raises:
            Cancelled: The caller does not want it any more.
        """
        if self.is_cancelled():
            raise Cancelled("request: was cancelled")


@attrs.define(eq=False)
class Run:
    """A request on its way: polls for cancellation, reports progress, delivers segments."""

    request: Request
    control: Control
    context_limit: int
    prompt_tokens: int = 0
    cached_tokens: int | None = None

    @property
    def options(self) -> GenerateOptions:
        """Options of the request."""
        return self.request.options

    def checkpoint(self) -> None:
        """Do nothing while the request is wanted, else raise.

        Raises:
            Cancelled: The caller or its token cancelled.
            DeadlineExceeded: The request's deadline, or its token's, has passed.
        """
        self.control.checkpoint()
        options = self.options
        if options.cancel is not None:
            options.cancel.checkpoint()
        if (
            options.deadline is not None
            and time.monotonic() - self.request.submitted >= options.deadline
        ):
            raise DeadlineExceeded(
                f"request: must finish in {options.deadline!r} seconds, got no end yet",
                hint="allow more time or ask for fewer tokens",
            )

    def start(self, prompt_tokens: int, *, reserved: int = 0) -> None:
        """Report the prompt, then check that prompt and reply fit the context.

        Args:
            prompt_tokens: Length of the prompt.
            reserved: Tokens that may be forced beyond ``max_tokens``.

        Raises:
            ContextExceeded: They do not fit.
        """
        self.prompt_tokens = prompt_tokens
        self.progress("prompt")
        output = self.options.max_tokens + reserved
        if prompt_tokens + output > self.context_limit:
            raise ContextExceeded(prompt_tokens, output, self.context_limit)

    def progress(self, phase: Phase, *, done_tokens: int = 0, completion_tokens: int = 0) -> None:
        """Report progress.

        Args:
            phase: Where the request stands.
            done_tokens: Prompt tokens in the caches.
            completion_tokens: Tokens emitted.

        Raises:
            Cancelled: The callback said so, or nobody reads the events any more.
            CallbackError: The callback raised.
        """
        callback = self.options.on_progress
        if callback is None and self.control.put is None:
            return
        event = Progress(
            phase=phase,
            prompt_tokens=self.prompt_tokens,
            max_tokens=self.options.max_tokens,
            context_limit=self.context_limit,
            cached_tokens=self.cached_tokens,
            completion_tokens=completion_tokens,
            done_tokens=done_tokens,
        )
        self._put(event)
        if callback is not None and says_no(callback, "on_progress", event):
            raise Cancelled("request: was cancelled by on_progress")

    def deliver(self, segment: Segment) -> bool:
        """Hand a segment to the stream and to the callback.

        Args:
            segment: The segment.

        Returns:
            Whether the caller wants more.

        Raises:
            Cancelled: Nobody reads the events any more.
            CallbackError: The callback raised.
        """
        self._put(segment)
        callback = self.options.on_token
        return callback is None or not says_no(callback, "on_token", segment)

    def complete(self, reply: GenerateReply) -> None:
        """Hand over the reply as the last event.

        Args:
            reply: The finished reply.

        Raises:
            Cancelled: Nobody reads the events any more.
        """
        self._put(Completed(reply=reply))

    def _put(self, event: Event) -> None:
        if self.control.put is not None and not self.control.put(event, self._is_unwanted):
            self.checkpoint()
            raise Cancelled("request: was cancelled, its stream is closed")

    def _is_unwanted(self) -> bool:
        try:
            self.checkpoint()
        except Cancelled:
            return True
        return False
