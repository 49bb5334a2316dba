"""Conversation records: messages, their parts, tools, calls and usage.

The records are values: frozen, comparable, free of MLX. ``engine_core.message_parsing`` turns
what a caller passes (these records or OpenAI-style dicts) into checked records.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import attrs

from engine_core.errors import InvalidRequest
from engine_core.limits import LIMITS
from engine_core.values import FrozenDict, freeze_json, shown

__all__ = [
    "AudioPart",
    "FinishReason",
    "ImagePart",
    "MediaPart",
    "Message",
    "Part",
    "Role",
    "TextPart",
    "ToolCall",
    "ToolDecl",
    "TranslationPart",
    "Usage",
    "VideoPart",
]

# One slash is enough: a path object joins two into one.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")

Role = Literal["system", "user", "assistant", "tool"]
"""Who speaks. ``developer`` is read as ``system``."""


class FinishReason(enum.StrEnum):
    """Why a reply ended; the first member that holds wins."""

    TOOL_CALLS = "tool_calls"
    STOP = "stop"
    ABORTED = "aborted"
    LENGTH = "length"


@attrs.frozen
class TextPart:
    """Plain text.

    Attributes:
        text: Any Unicode text, also empty.
    """

    text: str


def _encoded(data: object) -> bytes:
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise InvalidRequest(
            f"media part: data must be bytes, got {type(data).__name__}",
            code="request.messages.content",
        )
    return bytes(data)


def _local_path(path: object) -> Path:
    if not isinstance(path, (str, os.PathLike)) or isinstance(path, bytes):
        raise InvalidRequest(
            f"media part: path must be a local file name, got {type(path).__name__}",
            code="request.messages.content",
        )
    name = os.fspath(path)
    if not isinstance(name, str) or not name or "\0" in name or _SCHEME.match(name):
        raise InvalidRequest(
            f"media part: path must be a local file name, got {shown(name)}",
            code="request.messages.content",
            hint="nothing is fetched; read the item yourself and pass its bytes",
        )
    return Path(name)


def _bytes_repr(data: bytes | None) -> str:
    return "None" if data is None else f"<{len(data)} bytes>"


@attrs.frozen
class MediaPart:
    """An encoded media item, either in memory or in a local file.

    A file is opened when the request runs, never here, and never by URL.

    Attributes:
        data: The encoded bytes (PNG, WAV and so on).
        path: The local file; exactly one of ``data`` and ``path`` is given.
    """

    modality: ClassVar[str] = ""

    data: bytes | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(_encoded),
        repr=_bytes_repr,
    )
    path: Path | None = attrs.field(default=None, converter=attrs.converters.optional(_local_path))

    def __attrs_post_init__(self) -> None:
        """Refuse a part with no source or with two."""
        if (self.data is None) == (self.path is None):
            raise InvalidRequest(
                f"{self.modality} part: exactly one of data and path must be given, got "
                + ("neither" if self.data is None else "both"),
                code="request.messages.content",
            )


@attrs.frozen
class ImagePart(MediaPart):
    """An image on a user turn."""

    modality: ClassVar[str] = "image"


@attrs.frozen
class AudioPart(MediaPart):
    """A sound on a user turn."""

    modality: ClassVar[str] = "audio"


@attrs.frozen
class VideoPart(MediaPart):
    """A video on a user turn."""

    modality: ClassVar[str] = "video"


@attrs.frozen(kw_only=True)
class TranslationPart:
    """A text to translate; the only part of its user turn.

    Attributes:
        source_lang: Language code of the text, e.g. ``"en"``.
        target_lang: Language code wanted, e.g. ``"de-DE"``.
        text: The text.
    """

    source_lang: str
    target_lang: str
    text: str


Part = TextPart | ImagePart | AudioPart | VideoPart | TranslationPart
"""One piece of a message's content."""


def _frozen_object(subject: str, code: str, max_bytes: int, value: object) -> Mapping[str, Any]:
    if isinstance(value, FrozenDict):
        return value
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{subject}: must be a mapping, got {shown(value)}", code=code)
    frozen: Mapping[str, Any]
    frozen, _ = freeze_json(
        value,
        subject,
        max_bytes=max_bytes,
        max_depth=LIMITS.json_depth,
        max_digits=LIMITS.json_number_digits,
        code=code,
    )
    return frozen


def _frozen_parameters(value: object) -> Mapping[str, Any]:
    return _frozen_object(
        "tool declaration parameters", "request.tools.parameters", LIMITS.tool_schema_bytes, value
    )


def _frozen_arguments(value: object) -> Mapping[str, Any]:
    return _frozen_object(
        "tool call arguments", "request.messages.tool_calls", LIMITS.arguments_bytes, value
    )


@attrs.frozen(kw_only=True)
class ToolDecl:
    """A function the model may call.

    Attributes:
        name: Function name.
        description: What it does, may be empty.
        parameters: JSON Schema of its arguments; copied and frozen.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = attrs.field(
        factory=lambda: {"type": "object", "properties": {}}, converter=_frozen_parameters
    )


@attrs.frozen(kw_only=True)
class ToolCall:
    """A call that a model made.

    Attributes:
        id: Unique within the conversation; a tool result names it.
        name: Function name.
        arguments: Argument name -> JSON value; copied and frozen.
    """

    id: str
    name: str
    arguments: Mapping[str, Any] = attrs.field(factory=dict, converter=_frozen_arguments)


def _parts(content: str | Sequence[Part] | None) -> tuple[Part, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (TextPart(content),)
    if not isinstance(content, (list, tuple)):
        raise InvalidRequest(
            f"message: content must be text or a list of parts, got {shown(content)}",
            code="request.messages.content",
        )
    return tuple(content)


def _calls(calls: Sequence[ToolCall] | None) -> tuple[ToolCall, ...]:
    return () if calls is None else tuple(calls)


@attrs.frozen(kw_only=True)
class Message:
    """One turn of a conversation.

    Attributes:
        role: Who speaks.
        content: Parts in order; a plain ``str`` becomes one text part, ``None`` no part.
        reasoning: Reasoning of an assistant turn, ``None`` when there is none.
        tool_calls: Calls of an assistant turn, in order.
        tool_call_id: On a tool turn: the call that it answers.
        name: On a tool turn: the function; elsewhere the speaker's name.
    """

    role: Role
    content: tuple[Part, ...] = attrs.field(default=(), converter=_parts)
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = attrs.field(default=(), converter=_calls)
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        """The text parts, joined without a separator."""
        return "".join(part.text for part in self.content if isinstance(part, TextPart))


@attrs.frozen(kw_only=True)
class Usage:
    """Token counts of one request.

    Attributes:
        prompt_tokens: Tokens of the rendered prompt, cached ones included.
        cached_tokens: Prompt tokens served by the prompt pool.
        completion_tokens: Emitted tokens; end-of-sequence and forced tokens count.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together (tokens)."""
        return self.prompt_tokens + self.completion_tokens
