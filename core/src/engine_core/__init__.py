"""Run language models locally on MLX; every model family is a plugin.

Names are imported when they are first used, so that ``import engine_core`` is quick and works
without a usable MLX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_core.checkpoint.resolve import resolve_hub
    from engine_core.client import Client
    from engine_core.errors import (
        AffinityError,
        BackendError,
        BackendUnavailable,
        Busy,
        CacheError,
        CallbackError,
        Cancelled,
        CapabilityUnavailable,
        CertificateError,
        CheckpointError,
        ClientClosed,
        ConfigError,
        ContextExceeded,
        DeadlineExceeded,
        EngineError,
        InvalidRequest,
        ModelError,
        PluginConflictError,
        PluginError,
        TemplateError,
        TokenizerError,
        UnsupportedModelError,
        WorkerDied,
    )
    from engine_core.events import CancelToken, Completed, Progress, Segment, TokenKind
    from engine_core.info import ClientInfo, PromptCacheInfo
    from engine_core.limits import Limits
    from engine_core.messages import (
        AudioPart,
        FinishReason,
        ImagePart,
        Message,
        TextPart,
        ToolCall,
        ToolDecl,
        TranslationPart,
        Usage,
        VideoPart,
    )
    from engine_core.plugins import Plugins
    from engine_core.request import GenerateOptions, GenerateReply, Timings
    from engine_core.session import Session

    __version__: str

__all__ = [
    "AffinityError",
    "AudioPart",
    "BackendError",
    "BackendUnavailable",
    "Busy",
    "CacheError",
    "CallbackError",
    "CancelToken",
    "Cancelled",
    "CapabilityUnavailable",
    "CertificateError",
    "CheckpointError",
    "Client",
    "ClientClosed",
    "ClientInfo",
    "Completed",
    "ConfigError",
    "ContextExceeded",
    "DeadlineExceeded",
    "EngineError",
    "FinishReason",
    "GenerateOptions",
    "GenerateReply",
    "ImagePart",
    "InvalidRequest",
    "Limits",
    "Message",
    "ModelError",
    "PluginConflictError",
    "PluginError",
    "Plugins",
    "Progress",
    "PromptCacheInfo",
    "Segment",
    "Session",
    "TemplateError",
    "TextPart",
    "Timings",
    "TokenKind",
    "TokenizerError",
    "ToolCall",
    "ToolDecl",
    "TranslationPart",
    "UnsupportedModelError",
    "Usage",
    "VideoPart",
    "WorkerDied",
    "__version__",
    "resolve_hub",
]

_MODULES = {
    "checkpoint.resolve": ("resolve_hub",),
    "client": ("Client",),
    "events": ("CancelToken", "Completed", "Progress", "Segment", "TokenKind"),
    "info": ("ClientInfo", "PromptCacheInfo"),
    "limits": ("Limits",),
    "messages": (
        "AudioPart",
        "FinishReason",
        "ImagePart",
        "Message",
        "TextPart",
        "ToolCall",
        "ToolDecl",
        "TranslationPart",
        "Usage",
        "VideoPart",
    ),
    "plugins": ("Plugins",),
    "request": ("GenerateOptions", "GenerateReply", "Timings"),
    "session": ("Session",),
}
# Every public name that stands in no other module is an error.
_HOMES = dict.fromkeys(__all__, "errors") | {
    name: module for module, names in _MODULES.items() for name in names
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use and keep it."""
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("engine-core")
    elif name in _HOMES:
        value = getattr(import_module(f"engine_core.{_HOMES[name]}"), name)
    else:
        msg = f"module 'engine_core' has no attribute {name!r}"
        raise AttributeError(msg)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names beside what is loaded."""
    return sorted({*globals(), *__all__})
