"""From a request to prompt ids: what the checkpoint can render, and how it is encoded."""

from __future__ import annotations

import datetime
from functools import partial
from typing import TYPE_CHECKING, cast

import attrs

from engine_core.errors import (
    CapabilityUnavailable,
    InvalidRequest,
    TemplateError,
    TokenizerError,
)
from engine_core.messages import MediaPart, Message, TranslationPart
from engine_core.prompt_key import PromptKey
from engine_core.prompt_outline import Outline
from engine_core.reply_text import ReplyText
from engine_core.spec import Capabilities
from engine_core.text.reply import ReplyDecoder
from engine_core.tools.accept import accept_calls

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine_core.family import ReasoningMarkers, ToolSyntax
    from engine_core.generation import Request
    from engine_core.prompt_key import MediaSpan
    from engine_core.request import GenerateOptions
    from engine_core.template.probe import ProbeReport
    from engine_core.template.render import ChatTemplate
    from engine_core.text.tokenizer import Tokenizer

__all__ = ["Prompt", "Prompter"]


@attrs.frozen(kw_only=True)
class Prompt:
    """A prompt ready to be fed.

    Attributes:
        ids: Token ids, at least one.
        opens_reasoning: Whether the reply starts inside a reasoning span.
        media: Media items at their placeholder tokens.
        outline: Where a conversation can be continued from, ``None`` for a raw prompt.
    """

    ids: tuple[int, ...]
    opens_reasoning: bool = False
    media: tuple[MediaSpan, ...] = ()
    outline: Outline | None = None

    @property
    def key(self) -> PromptKey:
        """What the state after the prompt depends on."""
        return PromptKey(self.ids, self.media)


@attrs.frozen(kw_only=True, eq=False)
class Prompter:
    """The text side of a checkpoint; each part may be missing.

    Attributes:
        tokenizer: ``None`` when the checkpoint has none.
        template: ``None`` when the checkpoint has none or the caller wanted none.
        template_reason: Why there is no template.
        end_of_turn: Texts with which the template closes an assistant turn.
        capabilities: What rendering showed.
        tool_syntax: How the template's calls are read, ``None`` without tools.
        report: What the probe showed, ``None`` without a template.
        template_digests: Template name -> SHA-256 (hex) of the sources in use.
    """

    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None
    template_reason: str = ""
    end_of_turn: tuple[str, ...] = ()
    capabilities: Capabilities = attrs.field(factory=Capabilities)
    tool_syntax: ToolSyntax | None = None
    report: ProbeReport | None = None
    template_digests: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def reasoning(self) -> ReasoningMarkers | None:
        """Markers of a reasoning span, ``None`` when the template's dialect has none."""
        return None if self.template is None else self.template.dialect.reasoning

    def vocabulary(self, rows: int) -> tuple[int, tuple[int, ...]]:
        """Say which logit rows have a token.

        Args:
            rows: V, rows of the model's head.

        Returns:
            Where the padded rows at the end begin, and the ids before that without a token.
        """
        if self.tokenizer is None:
            return rows, ()
        known = min(self.tokenizer.vocab_size, rows)
        return known, self.tokenizer.unknown_ids(known)

    def newline_ids(self) -> tuple[int, ...]:
        """Give the token of a line break, where it is one.

        Returns:
            Its id, or nothing.
        """
        found = None if self.tokenizer is None else self.tokenizer.single_id("\n")
        return () if found is None else (found,)

    def reply_text(self, request: Request, *, opens_reasoning: bool) -> ReplyText:
        """Start the text side of a reply.

        Args:
            request: The request.
            opens_reasoning: Whether the reply starts inside a reasoning span.

        Returns:
            Takes the emitted tokens.

        Raises:
            TokenizerError: Text is to be looked at and there is no tokenizer.
        """
        options = request.options
        if options.stop:
            self._tokenizer("a stop text")
        if request.response_schema is not None:
            self._tokenizer("a response schema")
        if self.tokenizer is None:
            return ReplyText(None)
        # Markup counts only when the model was told of tools.
        syntax = self.tool_syntax if request.toolset.tools else None
        decoder = ReplyDecoder(
            self.tokenizer,
            reasoning=self.reasoning,
            tool_markers=() if syntax is None else syntax.markers,
            armed=syntax is not None,
            delimiters=getattr(syntax, "delimiters", ()),
            open_reasoning=opens_reasoning,
            stops=options.stop,
        )
        if syntax is None:
            return ReplyText(decoder)
        return ReplyText(
            decoder,
            lambda answer, start: accept_calls(answer, syntax, request.toolset, start=start),
        )

    def reasoning_close(self) -> tuple[int, ...]:
        """Encode the text that closes a reasoning span.

        Returns:
            Its ids.

        Raises:
            CapabilityUnavailable: There is no template with reasoning markers.
        """
        if self.reasoning is None or self.tokenizer is None:
            raise CapabilityUnavailable(
                "interaction:reasoning_budget", "its template marks no reasoning"
            )
        return tuple(self.tokenizer.encode(self.reasoning.close))

    def prompt(self, request: Request) -> Prompt:
        """Build the prompt of a request.

        Args:
            request: The request.

        Returns:
            The prompt.

        Raises:
            TokenizerError: Text is to be encoded or decoded and there is no tokenizer.
            TemplateError: There is no template, or it refused.
            CapabilityUnavailable: The conversation needs what the template cannot render.
            InvalidRequest: The prompt is empty.
        """
        options = request.options
        if isinstance(request.prompt, str):
            ids = self._tokenizer("a text prompt").encode(request.prompt, add_special_tokens=True)
            return _prompt(ids)
        if not request.is_chat:
            return Prompt(ids=cast("tuple[int, ...]", request.prompt))
        return self._chat(cast("tuple[Message, ...]", request.prompt), options)

    def _chat(self, messages: Sequence[Message], options: GenerateOptions) -> Prompt:
        tokenizer = self._tokenizer("a conversation")
        if self.template is None:
            raise TemplateError(
                f"chat template: a conversation needs one, got none ({self.template_reason})",
                code="template.missing",
                hint="pass template= when loading, or use complete() with raw text",
            )
        tools = options.advertised_tools
        self._check_capabilities(messages, options)
        prefill = options.prefill or ""
        shield = tokenizer.shield(messages, tools, options.template_options, prefill)
        render = partial(
            self.template.render,
            thinking=options.thinking,
            template_options=options.template_options,
            shield=shield,
            # One time for all renders of a request: a tick between them would part them.
            clock=datetime.datetime.now().astimezone(),
        )
        rendered = render(messages, tools, prefill=prefill)
        prompt = _prompt(
            tokenizer.encode_rendered(rendered.text, shield),
            opens_reasoning=rendered.opens_reasoning,
        )
        outline = Outline(
            messages=messages,
            tools=tools,
            text=rendered.text,
            ids=prompt.ids,
            encode=partial(tokenizer.encode_rendered, shield=shield),
            render=lambda messages, tools, *, opens_reply: (
                render(messages, tools, add_generation_prompt=opens_reply).text
            ),
        )
        return attrs.evolve(prompt, outline=outline)

    def _check_capabilities(self, messages: Sequence[Message], options: GenerateOptions) -> None:
        require = self.capabilities.require
        parts = [part for message in messages for part in message.content]
        if any(isinstance(part, TranslationPart) for part in parts):
            require("translation")
        else:
            require("chat", hint="this template only translates")
        for part in parts:
            if isinstance(part, MediaPart):
                if part.modality == "video":
                    raise CapabilityUnavailable("media:video", "video is not supported")
                require({"image": "images", "audio": "audio"}[part.modality])
        if any(message.role == "system" for message in messages):
            require("system_prompt", hint="put the instructions into the first user turn")
        if any(message.reasoning is not None for message in messages):
            require("reasoning_history", hint="leave the reasoning of earlier turns out")
        if options.advertised_tools or any(m.tool_calls or m.role == "tool" for m in messages):
            require("tools")
        if options.thinking is not None:
            require("thinking_toggle", hint="leave thinking= out")

    def _tokenizer(self, subject: str) -> Tokenizer:
        if self.tokenizer is None:
            raise TokenizerError(
                f"tokenizer: {subject} needs one, got a checkpoint without tokenizer.json",
                code="tokenizer.missing",
                hint="use complete() with token ids, or add tokenizer.json to the checkpoint",
            )
        return self.tokenizer


def _prompt(ids: Sequence[int], *, opens_reasoning: bool = False) -> Prompt:
    if not ids:
        raise InvalidRequest("prompt: must have at least one token, got 0", code="request.prompt")
    return Prompt(ids=tuple(ids), opens_reasoning=opens_reasoning)
