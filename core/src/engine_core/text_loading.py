"""The text side of a load: tokenizer, chat template, what it can render, what ends a reply."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

from engine_core.errors import InvalidRequest
from engine_core.prompting import Prompter
from engine_core.spec import Capabilities
from engine_core.template.probe import (
    AUDIO,
    CHAT,
    IMAGES,
    REASONING_HISTORY,
    SYSTEM_PROMPT,
    THINKING_TOGGLE,
    TOOLS,
    TRANSLATION,
    probe_template,
)
from engine_core.template.source import select_templates
from engine_core.text.eos import eos_token_ids
from engine_core.text.tokenizer import Tokenizer
from engine_core.values import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.checkpoint.reader import Checkpoint
    from engine_core.family import Architecture, TemplateDialect, ToolSyntax
    from engine_core.limits import Limits
    from engine_core.template.probe import ProbeReport
    from engine_core.template.source import TemplateSources

__all__ = ["collect_eos_ids", "load_prompter"]

_PROBED: Final = {
    "chat": CHAT,
    "translation": TRANSLATION,
    "system_prompt": SYSTEM_PROMPT,
    "tools": TOOLS,
    "reasoning_history": REASONING_HISTORY,
    "thinking_toggle": THINKING_TOGGLE,
    "images": IMAGES,
    "audio": AUDIO,
}


def load_prompter(
    checkpoint: Checkpoint,
    dialects: Sequence[TemplateDialect],
    syntaxes: Sequence[ToolSyntax],
    choice: str | bool | None,  # noqa: FBT001 - what the caller wrote
    limits: Limits,
) -> Prompter:
    """Read tokenizer and template and find out what they can do.

    Args:
        checkpoint: The open checkpoint.
        dialects: Dialects to try, most preferred first.
        syntaxes: Tool syntaxes to try.
        choice: Template source of the caller, ``False`` for none, ``None`` for the checkpoint's.
        limits: Bounds.

    Returns:
        The text side; parts that the checkpoint lacks are ``None``.

    Raises:
        TokenizerError: The tokenizer is unusable.
        TemplateError: The template is unusable, or renders no user turn.
        InvalidRequest: ``choice`` is of another kind.
    """
    data = checkpoint.tokenizer_json
    tokenizer = (
        None
        if data is None
        else Tokenizer.from_bytes(data, config=checkpoint.tokenizer_config, limits=limits)
    )
    sources, reason = _sources(checkpoint, choice, limits)
    if sources is None:
        return Prompter(tokenizer=tokenizer, template_reason=reason)
    template, report = probe_template(sources, dialects, syntaxes, limits)
    syntax = next((one for one in syntaxes if one.name == report.tool_syntax), None)
    return Prompter(
        tokenizer=tokenizer,
        template=template,
        end_of_turn=report.end_of_turn,
        capabilities=_capabilities(report),
        tool_syntax=syntax,
        report=report,
        template_digests=_digests(sources),
    )


def collect_eos_ids(
    checkpoint: Checkpoint,
    architecture: Architecture,
    prompter: Prompter,
    extra: Sequence[str],
) -> frozenset[int]:
    """Unite everything that ends a reply.

    Args:
        checkpoint: Its configuration files name ids and a token text.
        architecture: The family's own token texts.
        prompter: Its dialect's end-of-turn texts count when a closed turn ends with one.
        extra: Token texts of the caller.

    Returns:
        The ids.

    Raises:
        ConfigError: A configured id is no token id.
        InvalidRequest: A text of the caller is no single token.
    """
    config = checkpoint.config
    configs = [config, checkpoint.generation_config]
    if "text_config" in config:
        configs.append(config.section("text_config"))
    ids = eos_token_ids(
        prompter.tokenizer,
        configs,
        vocab_size=architecture.vocab_size,
        extra=(*architecture.extra_eos, *prompter.end_of_turn),
    )
    return ids | {_extra_id(prompter.tokenizer, text) for text in extra}


def _extra_id(tokenizer: Tokenizer | None, text: str) -> int:
    found = None if tokenizer is None or not isinstance(text, str) else tokenizer.single_id(text)
    if found is None:
        raise InvalidRequest(
            f"extra_eos_tokens: each must be one token of the vocabulary, got {shown(text)}",
            code="request.extra_eos_tokens",
        )
    return found


def _sources(
    checkpoint: Checkpoint,
    choice: str | bool | None,  # noqa: FBT001 - what the caller wrote
    limits: Limits,
) -> tuple[TemplateSources | None, str]:
    tokenizer_config = checkpoint.tokenizer_config.data
    if choice is False:
        return None, "loaded with template=False"
    if isinstance(choice, str):
        files = {"chat_template.jinja": choice.encode("utf-8", "surrogatepass")}
        without = {k: v for k, v in tokenizer_config.items() if k != "chat_template"}
        return select_templates(files, without, limits=limits), ""
    if choice is not None:
        raise InvalidRequest(
            f"template: must be a template's source, False or None, got {choice!r}",
            code="request.template",
        )
    sources = select_templates(
        checkpoint.template_files, tokenizer_config, checkpoint.processor_config.data, limits
    )
    return sources, "" if sources is not None else "the checkpoint has no chat template"


def _digests(sources: TemplateSources) -> dict[str, str]:
    texts = {"default": sources.default, "tool_use": sources.tool_use}
    return {
        name: hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        for name, text in texts.items()
        if text is not None
    }


def _capabilities(report: ProbeReport) -> Capabilities:
    found: dict[str, Any] = {
        name: report.supports(capability) for name, capability in _PROBED.items()
    }
    reasons = {
        name: report.reason(capability) or "the probe did not show it"
        for name, capability in _PROBED.items()
        if not found[name]
    }
    return Capabilities(**found, tool_syntax=report.tool_syntax, reasons=reasons)
