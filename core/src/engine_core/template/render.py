"""Conversations to prompt text: dialect, template, prefill."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import attrs

from engine_core.errors import InvalidRequest
from engine_core.limits import LIMITS, Limits
from engine_core.messages import Message, Part, TextPart, ToolCall, ToolDecl, TranslationPart
from engine_core.template.environment import CompiledTemplate, plain_copy
from engine_core.values import FrozenDict, FrozenList

if TYPE_CHECKING:
    from engine_core.family import ReasoningMarkers, TemplateDialect, TemplateInput
    from engine_core.template.source import TemplateSources

__all__ = ["ArgumentsForm", "ChatTemplate", "Rendered", "Shield"]

ArgumentsForm = Literal["mapping", "json"]
"""How a template wants the arguments of a call: as a mapping or as a JSON string."""

Shield = Callable[[str], str]
"""Replaces control-token text inside content, so that it is not read as control tokens."""

RecordT = TypeVar("RecordT", Message, TextPart, TranslationPart, ToolCall, ToolDecl)

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})


@attrs.frozen(kw_only=True)
class Rendered:
    """A prompt.

    Attributes:
        text: The prompt with the prefill at its end.
        opens_reasoning: Whether the reply starts inside a reasoning span.
    """

    text: str
    opens_reasoning: bool = False


@attrs.frozen(kw_only=True)
class ChatTemplate:
    """A compiled chat template with the dialect that feeds it; usable on any thread.

    Attributes:
        default: Template of ordinary requests.
        tool_use: Template of requests with tools, ``None`` when ``default`` serves both.
        dialect: Turns records into what the template reads.
        arguments_form: How the template wants call arguments.
        tool_markers: Texts with which the template's calls are written. They and the dialect's
            reasoning markers belong in an assistant's text and are left as they are there.
        special_tokens: Token texts the template may name: ``bos_token``, ``eos_token``.
        limits: Bounds of every render.
    """

    default: CompiledTemplate
    dialect: TemplateDialect
    tool_use: CompiledTemplate | None = None
    arguments_form: ArgumentsForm = "mapping"
    tool_markers: tuple[str, ...] = ()
    special_tokens: Mapping[str, str] = attrs.field(factory=dict)
    limits: Limits = attrs.field(default=LIMITS, repr=False)
    _own_markers: re.Pattern[str] | None = attrs.field(init=False, repr=False, eq=False)

    @_own_markers.default
    def _compile_own_markers(self) -> re.Pattern[str] | None:
        """Compile the search for what an assistant's text may hold; once, not per request."""
        reasoning = self.dialect.reasoning
        markers = {*self.tool_markers}
        if reasoning is not None:
            markers |= {reasoning.open, reasoning.close}
        longest_first = sorted(markers, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if markers else None

    @classmethod
    def compile(
        cls, sources: TemplateSources, dialect: TemplateDialect, limits: Limits = LIMITS
    ) -> ChatTemplate:
        """Compile the templates of a checkpoint.

        Args:
            sources: Chosen template texts and special tokens.
            dialect: Turns records into what the template reads.
            limits: Bounds.

        Returns:
            The template.

        Raises:
            TemplateError: A template is invalid or not allowed.
        """
        tool_use = sources.tool_use
        return cls(
            default=CompiledTemplate.compile(sources.default, limits),
            tool_use=None if tool_use is None else CompiledTemplate.compile(tool_use, limits),
            dialect=dialect,
            special_tokens=sources.special_tokens,
            limits=limits,
        )

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDecl] = (),
        *,
        add_generation_prompt: bool = True,
        thinking: bool | None = None,
        template_options: Mapping[str, Any] | None = None,
        prefill: str = "",
        shield: Shield | None = None,
        clock: datetime.datetime | None = None,
    ) -> Rendered:
        """Render a conversation.

        Args:
            messages: The conversation in order.
            tools: Advertised tools.
            add_generation_prompt: End with the opening of an assistant turn.
            thinking: Passed as ``enable_thinking``; ``None`` passes nothing.
            template_options: Further template variables.
            prefill: Start of the assistant's reply, appended after the generation prompt.
            shield: Applied to every text of the conversation, of the tools and of the prefill.
                Text of the assistant keeps the markers that belong there.
            clock: The one time the template sees; now when omitted.

        Returns:
            The prompt.

        Raises:
            InvalidRequest: An option takes a name of the engine's own, or a prefill comes
                without a generation prompt.
            TemplateError: The template refused, failed or exceeded a bound.
        """
        options = dict(template_options or {})
        _check_options(options, thinking=thinking)
        if prefill and not add_generation_prompt:
            raise InvalidRequest(
                "prefill: needs a generation prompt to continue, got none",
                code="request.prefill",
            )
        if thinking is not None:
            options["enable_thinking"] = thinking
        start = prefill
        if shield is not None:
            own = self._sparing(shield)
            messages = [
                _shield_message(message, shield, own if message.role == "assistant" else shield)
                for message in messages
            ]
            tools = [_shield_tool(tool, shield) for tool in tools]
            start = own(prefill)
        prepared = self.dialect.prepare(messages, tools, options)
        variables = self._variables(prepared, options, add_generation_prompt=add_generation_prompt)
        template = self.default
        if self.tool_use is not None and prepared.tools:
            template = self.tool_use
        text = template.render(
            variables,
            units=self.limits.template_work_units + len(variables["messages"]) ** 2,
            clock=clock if clock is not None else datetime.datetime.now().astimezone(),
        )
        return Rendered(
            text=text + start,
            opens_reasoning=_opens_reasoning(text, prefill, self.dialect.reasoning),
        )

    def _sparing(self, shield: Shield) -> Shield:
        """Make the shield of text that the assistant wrote.

        Each run between two markers is shielded as a text of its own: a template that takes a
        marked span out must not join what stood around it to a control token.
        """
        pattern = self._own_markers
        if pattern is None:
            return shield

        def spare(text: str) -> str:
            parts = pattern.split(text)
            return "".join(part if at % 2 else shield(part) for at, part in enumerate(parts))

        return spare

    def _variables(
        self, prepared: TemplateInput, options: Mapping[str, Any], *, add_generation_prompt: bool
    ) -> dict[str, Any]:
        messages = plain_copy(list(prepared.messages), "messages")
        if self.arguments_form == "json":
            for message in messages:
                _write_arguments(message)
        variables = {
            **self.special_tokens,
            **plain_copy(prepared.variables, "dialect variables"),
            **plain_copy(options, "template_options"),
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        if prepared.tools:
            variables["tools"] = plain_copy(list(prepared.tools), "tools")
        return variables


def _check_options(options: Mapping[str, Any], *, thinking: bool | None) -> None:
    reserved = _RESERVED if thinking is None else _RESERVED | {"enable_thinking"}
    for name in options:
        if name in reserved:
            raise InvalidRequest(
                f"template_options: must leave the engine's own variables, got {name!r}",
                code="request.template_options",
            )


def _write_arguments(message: dict[str, Any]) -> None:
    for call in message.get("tool_calls", ()):
        function = call.get("function", call)
        if isinstance(function.get("arguments"), dict):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)


def _opens_reasoning(text: str, prefill: str, markers: ReasoningMarkers | None) -> bool:
    if markers is None:
        return False
    if text.rstrip().endswith(markers.open):
        return markers.close not in prefill
    return prefill.lstrip().startswith(markers.open) and markers.close not in prefill


def _shield_message(message: Message, shield: Shield, prose: Shield) -> Message:
    """Shield a turn: ``prose`` takes what its speaker wrote freely, ``shield`` the rest."""
    name, call_id, reasoning = message.name, message.tool_call_id, message.reasoning
    return _evolved(
        message,
        content=tuple(_shield_part(part, shield, prose) for part in message.content),
        reasoning=None if reasoning is None else prose(reasoning),
        tool_calls=tuple(_shield_call(call, shield) for call in message.tool_calls),
        tool_call_id=None if call_id is None else shield(call_id),
        name=None if name is None else shield(name),
    )


def _shield_part(part: Part, shield: Shield, prose: Shield) -> Part:
    if isinstance(part, TextPart):
        return _evolved(part, text=prose(part.text))
    if isinstance(part, TranslationPart):
        return _evolved(
            part,
            source_lang=shield(part.source_lang),
            target_lang=shield(part.target_lang),
            text=shield(part.text),
        )
    return part


def _shield_call(call: ToolCall, shield: Shield) -> ToolCall:
    return _evolved(
        call,
        id=shield(call.id),
        name=shield(call.name),
        arguments=_shield_json(call.arguments, shield),
    )


def _shield_tool(tool: ToolDecl, shield: Shield) -> ToolDecl:
    return _evolved(
        tool,
        name=shield(tool.name),
        description=shield(tool.description),
        parameters=_shield_json(tool.parameters, shield),
    )


def _shield_json(value: Any, shield: Shield) -> Any:
    """Shield every text in a JSON value; frozen as before, so its bounds are not checked anew."""
    if isinstance(value, str):
        return shield(value)
    if isinstance(value, (dict, Mapping)):
        entries = {shield(key): _shield_json(entry, shield) for key, entry in value.items()}
        return value if entries == value else FrozenDict(entries)
    if isinstance(value, (list, tuple)):
        items = [_shield_json(entry, shield) for entry in value]
        return value if items == value else FrozenList(items)
    return value


def _evolved(record: RecordT, **shielded: Any) -> RecordT:
    """Put shielded fields into a record; one that they leave as it was, as most do, stays."""
    if [getattr(record, name) for name in shielded] == list(shielded.values()):
        return record
    return attrs.evolve(record, **shielded)
