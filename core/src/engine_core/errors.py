"""Typed errors: the class says what kind, ``code`` is stable, ``hint`` says what to do.

Every message reads *subject: rule, got value*. Callers match ``code`` (or the class), never
the prose. Errors cross the worker thread as the same object, so type and cause survive.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Final

__all__ = [
    "AffinityError",
    "BackendError",
    "BackendUnavailable",
    "Busy",
    "CacheError",
    "CallbackError",
    "Cancelled",
    "CapabilityUnavailable",
    "CertificateError",
    "CheckpointError",
    "ClientClosed",
    "ConfigError",
    "ContextExceeded",
    "DeadlineExceeded",
    "EngineError",
    "InvalidRequest",
    "ModelError",
    "PluginConflictError",
    "PluginError",
    "TemplateError",
    "TokenizerError",
    "UnsupportedModelError",
    "WorkerDied",
]


_MESSAGE_CHARS: Final = 2000
_UNPRINTABLE: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class EngineError(Exception):
    """Base of every error this engine raises on purpose.

    Attributes:
        code: Stable machine-readable name, e.g. ``"checkpoint.tensor_missing"``.
        hint: One sentence on what to do about it; empty when there is nothing to add. Options
            stand in it as ``name=``, with a value or without, so that the command line finds them.
    """

    default_code: ClassVar[str] = "engine"

    def __init__(self, message: str, *, code: str | None = None, hint: str = "") -> None:
        """Build the error.

        Args:
            message: ``subject: rule, got value``; lower case, no full stop.
            code: Stable name; the class default when omitted.
            hint: One sentence on what to do.
        """
        super().__init__(_printable(message))
        self.code = code or self.default_code
        self.hint = hint


def _printable(message: str) -> str:
    """Escape what a terminal or an encoder would choke on, and cut a runaway message.

    Names of files, tensors and tokens come from strangers: they may hold terminal escapes, lone
    surrogates (a file name that is no UTF-8) or a million characters.
    """
    if len(message) > _MESSAGE_CHARS:
        message = f"{message[:_MESSAGE_CHARS]}... ({len(message)} characters)"
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], message)


class BackendUnavailable(EngineError):
    """MLX is not importable here, or two MLX backends overwrite each other."""

    default_code = "backend.unavailable"


class BackendError(EngineError):
    """An evaluation failed on the device; the message carries MLX's own."""

    default_code = "backend.failed"


class AffinityError(EngineError):
    """A thread-bound object was used from another thread, process or callback."""

    default_code = "affinity.wrong_thread"


class PluginError(EngineError):
    """A plugin could not be loaded or answered a hook with something unusable."""

    default_code = "plugin.failed"


class PluginConflictError(PluginError):
    """Two distributions claim the same name; neither wins."""

    default_code = "plugin.conflict"


class UnsupportedModelError(EngineError):
    """No active plugin owns this checkpoint."""

    default_code = "model.unsupported"


class ConfigError(EngineError):
    """A configuration file holds a value that this engine cannot honour."""

    default_code = "config.invalid"


class CheckpointError(EngineError):
    """A checkpoint file is damaged, hostile, incomplete or inconsistent."""

    default_code = "checkpoint.invalid"


class CertificateError(EngineError):
    """A certificate does not bind this checkpoint."""

    default_code = "certificate.invalid"


class TokenizerError(EngineError):
    """The tokenizer is missing, unusable or refused an input."""

    default_code = "tokenizer.invalid"


class TemplateError(EngineError):
    """The chat template is missing, refused its input or exceeded its budget."""

    default_code = "template.failed"


class ModelError(EngineError):
    """A forward pass could not be carried out or produced unusable numbers."""

    default_code = "model.failed"


class CacheError(EngineError):
    """A layer cache was used against its contract; its state did not change."""

    default_code = "cache.misuse"


class InvalidRequest(EngineError):
    """A request breaks a rule, or its own options leave no token to choose."""

    default_code = "request.invalid"


class CapabilityUnavailable(EngineError):
    """The request needs something that this checkpoint was not shown to support.

    Attributes:
        capability: Name such as ``"interaction:tools"``.
        reason: Why it is unavailable.
    """

    default_code = "capability.unavailable"

    def __init__(self, capability: str, reason: str, *, hint: str = "") -> None:
        """Build the error.

        Args:
            capability: Capability name, e.g. ``"task:chat"``.
            reason: What the probe or the configuration showed.
            hint: One sentence on what to do.
        """
        super().__init__(f"{capability}: not available for this checkpoint, {reason}", hint=hint)
        self.capability = capability
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, str], dict[str, Any]]:
        """Keep the two-argument constructor picklable and copyable, the hint with it."""
        return (type(self), (self.capability, self.reason), vars(self))


class ContextExceeded(InvalidRequest):
    """Prompt and requested output do not fit the context window (tokens).

    Attributes:
        prompt_tokens: Length of the rendered prompt.
        max_tokens: Requested output.
        limit: Effective context length.
    """

    default_code = "request.context_exceeded"

    def __init__(self, prompt_tokens: int, max_tokens: int, limit: int) -> None:
        """Build the error.

        Args:
            prompt_tokens: Length of the rendered prompt in tokens.
            max_tokens: Requested output in tokens.
            limit: Effective context length in tokens.
        """
        super().__init__(
            f"request: prompt + max_tokens must fit {limit} context tokens, "
            f"got {prompt_tokens} + {max_tokens}",
            hint="shorten the conversation or pass a smaller max_tokens=",
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.limit = limit

    def __reduce__(self) -> tuple[type, tuple[int, int, int]]:
        """Keep the three-argument constructor picklable and copyable."""
        return (type(self), (self.prompt_tokens, self.max_tokens, self.limit))


class CallbackError(EngineError):
    """A caller's callback (``on_token``, ``on_progress``, a logits processor) raised."""

    default_code = "callback.failed"


class Cancelled(EngineError):
    """The request was cancelled before it finished; nothing of its reply was kept."""

    default_code = "request.cancelled"


class DeadlineExceeded(Cancelled):
    """The request's own deadline (seconds) passed."""

    default_code = "request.deadline"


class Busy(EngineError):
    """The bounded job queue is full; the request was not queued."""

    default_code = "client.busy"


class ClientClosed(EngineError):
    """The client was closed (or belongs to another process)."""

    default_code = "client.closed"


class WorkerDied(EngineError):
    """The worker thread ended unexpectedly; every waiter gets this."""

    default_code = "client.worker_died"
