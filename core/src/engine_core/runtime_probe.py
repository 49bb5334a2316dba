"""The smallest request that shows that a loaded model runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from engine_core.generation import Request
from engine_core.messages import Message, TranslationPart

if TYPE_CHECKING:
    from engine_core.info import ClientInfo

__all__ = ["probe_request"]

_TEXT: Final = "Hello"


def probe_request(info: ClientInfo) -> Request:
    """Choose a request that this checkpoint can serve.

    Args:
        info: What is loaded.

    Returns:
        One greedy token, thinking off, nothing stored. A template that only translates gets a
        translation: plain text would fail inside it. Without a template, one token id.
    """
    options: dict[str, Any] = {"max_tokens": 1, "prompt_cache": False}
    if not (info.has_template and info.has_tokenizer):
        return Request.completion([0], options)
    content: Any = _TEXT
    if not info.capabilities.chat:
        content = [TranslationPart(source_lang="en", target_lang="de", text=_TEXT)]
    if info.capabilities.thinking_toggle:
        options["thinking"] = False
    return Request.chat([Message(role="user", content=content)], options)
