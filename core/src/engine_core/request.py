"""What a request may ask for and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import attrs

from engine_core import option_checks as checks
from engine_core.limits import LIMITS
from engine_core.tool_parsing import parse_tools, read_tool_name
from engine_core.tools.schema import OPTIONAL_ANNOTATIONS
from engine_core.values import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import mlx.core as mx

    from engine_core.events import CancelToken, Progress, Segment
    from engine_core.messages import FinishReason, ToolCall, ToolDecl, Usage
    from engine_core.tools.outcome import StructuredResult, ToolChoiceResult

__all__ = [
    "GenerateOptions",
    "GenerateReply",
    "Speculation",
    "Timings",
    "TokenLogprob",
    "ToolChoice",
]

_MODES = ("auto", "none", "required")


@attrs.frozen(kw_only=True)
class ToolChoice:
    """Whether and which tool the model is to call.

    Attributes:
        mode: ``auto`` leaves it to the model, ``none`` advertises no tool, ``required`` wants
            some call, ``named`` wants a call of ``name``.
        name: Function name, with ``named`` only.
    """

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None


def _tool_choice(option: str, value: object) -> ToolChoice:
    if isinstance(value, ToolChoice):
        value = {"name": value.name} if value.mode == "named" else value.mode
    if isinstance(value, str):
        for mode in _MODES:
            if value == mode:
                return ToolChoice(mode=mode)  # type: ignore[arg-type]
        checks.refuse(option, f"must be one of {', '.join(_MODES)} or name a tool", shown(value))
    kind = value.get("type", "function") if isinstance(value, Mapping) else None
    if isinstance(value, Mapping) and isinstance(kind, str) and kind == "function":
        function = value.get("function", value)
        if isinstance(function, Mapping) and set(function) - {"type"} == {"name"}:
            name = read_tool_name(function["name"], option, f"request.{option}", LIMITS)
            return ToolChoice(mode="named", name=name)
    rule = "must be a mode or {'type': 'function', 'function': {'name': ...}}"
    return checks.refuse(option, rule, shown(value))


def _cancel(option: str, value: object) -> CancelToken:
    from engine_core.events import CancelToken

    if not isinstance(value, CancelToken):
        checks.refuse(option, "must be a CancelToken", shown(value))
    return value


_CHECKS: dict[str, checks.Check] = {
    "tools": lambda _, value: parse_tools(value),
    "tool_choice": _tool_choice,
    "schema_annotations": checks.members(OPTIONAL_ANNOTATIONS),
    "response_schema": checks.json_object(LIMITS.tool_schema_bytes),
    "max_tokens": checks.integer(1, LIMITS.max_tokens),
    "temperature": checks.number(0.0, LIMITS.temperature),
    "top_p": checks.number(0.0, 1.0),
    "top_k": checks.integer(0, LIMITS.tensor_dimension),
    "min_p": checks.number(0.0, 1.0),
    "min_tokens_to_keep": checks.integer(1, LIMITS.tensor_dimension),
    "xtc_probability": checks.number(0.0, 1.0),
    # Above one half at most one token can pass the threshold, so nothing could be excluded.
    "xtc_threshold": checks.number(0.0, 0.5),
    "repetition_penalty": checks.number(0.0, LIMITS.repetition_penalty, above=True),
    "repetition_context_size": checks.integer(1, LIMITS.context_tokens),
    "presence_penalty": checks.number(-LIMITS.penalty, LIMITS.penalty),
    "frequency_penalty": checks.number(-LIMITS.penalty, LIMITS.penalty),
    "logit_bias": checks.logit_bias,
    "logits_processors": checks.callbacks,
    "seed": checks.integer(0, 2**64 - 1),
    "stop": checks.stop_strings,
    "logprobs": checks.boolean,
    "top_logprobs": checks.integer(0, LIMITS.top_logprobs),
    "thinking": checks.boolean,
    "reasoning_budget": checks.integer(1, LIMITS.reasoning_budget),
    "template_options": checks.json_object(LIMITS.tool_schema_bytes),
    "prefill": checks.text(LIMITS.content_bytes_per_message),
    "speculative_tokens": checks.integer(0, LIMITS.speculative_tokens),
    "prompt_cache": checks.boolean,
    "lookahead": checks.boolean,
    "context_tokens": checks.integer(1, LIMITS.context_tokens),
    "on_token": checks.callback,
    "on_progress": checks.callback,
    "cancel": _cancel,
    "deadline": checks.number(0.0, LIMITS.deadline_seconds, above=True),
}

# What other tools call the same thing.
_ALIASES = {
    "chat_template_kwargs": "template_options",
    "enable_thinking": "thinking",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "num_draft_tokens": "speculative_tokens",
    "response_format": "response_schema",
    "stop_sequences": "stop",
    "temp": "temperature",
    "timeout": "deadline",
}
# Template variables that the engine itself sets.
_RESERVED = ("add_generation_prompt", "bos_token", "eos_token", "messages", "tools")


def _with_checks(_: type, fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    """Give every option its check as a converter; an option without a check cannot exist."""

    def converter(field: attrs.Attribute[Any]) -> Callable[[Any], Any]:
        check = _CHECKS[field.name]

        def convert(value: Any) -> Any:
            given = field.default if value is None else value
            return None if given is None else check(field.name, given)

        return convert

    return [field.evolve(converter=converter(field)) for field in fields]


@attrs.frozen(kw_only=True, field_transformer=_with_checks)
class GenerateOptions:
    """Options of one request, each checked and normalised; greedy by default.

    ``None`` means the default, for every option.

    Attributes:
        tools: Tools the model may call (records or OpenAI-style dicts).
        tool_choice: ``"auto"``, ``"none"``, ``"required"`` or a named function.
        schema_annotations: Keywords of tool and response schemas that are to check nothing,
            out of ``$schema`` and ``format``; each is refused unless it is listed here.
        response_schema: JSON Schema that the final text is checked against. Decoding is not
            constrained; ``reply.structured`` says whether the text satisfies it.
        max_tokens: Longest reply, 1 to 1,048,576 tokens.
        temperature: 0 (greedy) to 2.
        top_p: Nucleus mass, 0 to 1; 1 is off.
        top_k: Number of likeliest tokens kept; 0 is off.
        min_p: Least probability relative to the likeliest token, 0 to 1; 0 is off.
        min_tokens_to_keep: Tokens that ``min_p`` and ``xtc`` always leave.
        xtc_probability: Chance of excluding top choices, 0 to 1; 0 is off.
        xtc_threshold: Least probability of an excluded token, 0 to 0.5.
        repetition_penalty: Divides positive logits of repeated tokens; 1 is off.
        repetition_context_size: Latest tokens that the penalties look at.
        presence_penalty: Subtracted once from a repeated token's logit, -2 to 2.
        frequency_penalty: Subtracted a repetition, -2 to 2.
        logit_bias: Token id -> number added to its logit, -100 to 100.
        logits_processors: Callables ``(token_ids, logits [V]) -> logits [V]``, on the worker.
        seed: Seed of this request's draws, ``None`` for a fresh one.
        stop: Texts that end the answer; not looked for in reasoning and accepted calls. In a call
            that was refused, which is known at the end of the reply, it drops the text after it.
        logprobs: Whether the reply carries log-probabilities (nats).
        top_logprobs: Likeliest alternatives reported a token, 0 to 64; needs ``logprobs``.
        thinking: Template switch; ``None`` passes nothing to the template.
        reasoning_budget: Longest reasoning in tokens, at most ``max_tokens``.
        template_options: Further template variables.
        prefill: Start of the assistant's reply.
        speculative_tokens: Draft depth, 0 to 8; 0 is off.
        prompt_cache: Whether the prompt pool serves and keeps this request.
        lookahead: Whether the next step is queued before a token is read.
        context_tokens: Context limit of this request, ``None`` for the model's own.
        on_token: ``(segment) -> bool | None``, on the worker; ``False``, or what equals it
            and is no number (``numpy.False_``), ends the reply.
        on_progress: ``(progress) -> bool | None``, on the worker; the same answer cancels.
        cancel: Token that cancels the request from any thread.
        deadline: Seconds after which the request is cancelled.
    """

    tools: tuple[ToolDecl, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    schema_annotations: tuple[str, ...] = ()
    response_schema: Mapping[str, Any] | None = None
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = MappingProxyType({})
    logits_processors: tuple[Callable[[Sequence[int], mx.array], mx.array], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    thinking: bool | None = None
    reasoning_budget: int | None = None
    template_options: Mapping[str, Any] = MappingProxyType({})
    prefill: str | None = None
    speculative_tokens: int = 0
    prompt_cache: bool = True
    lookahead: bool = True
    context_tokens: int | None = None
    on_token: Callable[[Segment], bool | None] | None = None
    on_progress: Callable[[Progress], bool | None] | None = None
    cancel: CancelToken | None = None
    deadline: float | None = None

    @classmethod
    def parse(cls, **options: Any) -> GenerateOptions:
        """Check options as a caller wrote them.

        Args:
            **options: Options by name.

        Returns:
            The checked options.

        Raises:
            InvalidRequest: A name is unknown, a value breaks its rule (code
                ``request.<option>``), or two options contradict each other.
        """
        for name in options:
            if name not in _CHECKS:
                raise checks.unknown_option("request", name, _CHECKS, _ALIASES)
        return cls(**options)

    @property
    def advertised_tools(self) -> tuple[ToolDecl, ...]:
        """The declared tools that the model is told about."""
        if self.tool_choice.mode == "none":
            return ()
        named = self.tool_choice.name
        return tuple(tool for tool in self.tools if named is None or tool.name == named)

    def __attrs_post_init__(self) -> None:
        """Refuse options that contradict each other."""
        _check_tool_choice(self.tool_choice, self.tools)
        if self.top_logprobs and not self.logprobs:
            checks.refuse("top_logprobs", "needs logprobs=True", str(self.top_logprobs))
        if self.reasoning_budget is not None:
            if self.thinking is False:
                checks.refuse("reasoning_budget", "needs thinking", "thinking=False")
            if self.reasoning_budget > self.max_tokens:
                rule = f"must be at most max_tokens ({self.max_tokens})"
                checks.refuse("reasoning_budget", rule, str(self.reasoning_budget))
        if self.context_tokens is not None and self.max_tokens > self.context_tokens:
            rule = f"must be at most context_tokens ({self.context_tokens})"
            checks.refuse("max_tokens", rule, str(self.max_tokens))
        for name in _RESERVED:
            if name in self.template_options:
                checks.refuse("template_options", "must leave the engine's own variables", name)
        if self.thinking is not None and "enable_thinking" in self.template_options:
            hint = "pass thinking= alone"
            checks.refuse("template_options", "thinking is given already", "enable_thinking", hint)


def _check_tool_choice(choice: ToolChoice, tools: Sequence[ToolDecl]) -> None:
    if choice.mode == "required" and not tools:
        checks.refuse("tool_choice", "must have tools to choose from", "'required' without tools")
    if choice.mode == "named" and choice.name not in {tool.name for tool in tools}:
        checks.refuse("tool_choice", "must name a declared tool", shown(choice.name))


@attrs.frozen(kw_only=True)
class Timings:
    """Measured wall-clock times.

    Attributes:
        load_seconds: Loading of the model, the same for each of its replies.
        prefill_seconds: From the start of the request's run to its first logits.
        decode_seconds: From there to the end of the reply.
    """

    load_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def prompt_tokens_per_second(self, usage: Usage) -> float:
        """Give the prefill speed over the tokens really fed.

        Args:
            usage: Usage of the same reply.

        Returns:
            Tokens a second; 0 when no time was measured.
        """
        return _rate(usage.prompt_tokens - usage.cached_tokens, self.prefill_seconds)

    def decode_tokens_per_second(self, usage: Usage) -> float:
        """Give the decode speed.

        Args:
            usage: Usage of the same reply.

        Returns:
            Tokens a second; 0 when no time was measured.
        """
        return _rate(usage.completion_tokens, self.decode_seconds)


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


@attrs.frozen(kw_only=True)
class TokenLogprob:
    """Log-probabilities at one emitted token.

    Attributes:
        token_id: The emitted id.
        logprob: Its log-probability (nats).
        top: Likeliest ids with their log-probabilities, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@attrs.frozen(kw_only=True)
class Speculation:
    """What speculative decoding did for one reply.

    Attributes:
        rounds: Verification rounds.
        drafted: Tokens proposed.
        accepted_by_depth: Accepted tokens at each draft depth, first depth first.
        disabled_reason: Why the reply was decoded without it although asked for; empty otherwise.
    """

    rounds: int = 0
    drafted: int = 0
    accepted_by_depth: tuple[int, ...] = ()
    disabled_reason: str = ""


@attrs.frozen(kw_only=True)
class GenerateReply:
    """A finished reply.

    Attributes:
        text: The answer.
        reasoning: The reasoning, ``None`` when there is none.
        tool_calls: Accepted calls in order.
        finish_reason: Why it ended.
        usage: Token counts.
        token_ids: Every emitted token id, end-of-sequence included.
        speculation: Speculative decoding, ``None`` when it was not asked for.
        logprobs: One record an emitted token, ``None`` when not asked for.
        truncated: Whether the token budget cut it.
        timings: Measured times.
        tool_choice: Whether a required or named call was made, ``None`` when none was asked for.
        structured: The text as JSON against the response schema, ``None`` without one.
    """

    text: str
    finish_reason: FinishReason
    usage: Usage
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...] = ()
    speculation: Speculation | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    truncated: bool = False
    timings: Timings = Timings()
    tool_choice: ToolChoiceResult | None = None
    structured: StructuredResult | None = None
