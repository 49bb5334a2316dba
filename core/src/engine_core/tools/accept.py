"""From the text of a finished reply to tool calls: what is certain becomes a call, the rest stays.

A model's markup is a proposal by someone untrusted. It becomes a call only when it is complete,
names exactly one advertised tool, and exactly one of its readings satisfies that tool's schema.
Everything else stays in the reply's text, character by character.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import attrs

from engine_core.errors import EngineError, InvalidRequest, PluginError
from engine_core.limits import LIMITS, Limits
from engine_core.messages import ToolCall, ToolDecl
from engine_core.tools.coerce import NO_LITERALS, CoercionError, allowed_types, coerce_reading
from engine_core.tools.schema import CompiledSchema, compile_schema
from engine_core.tools.validation import violation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from engine_core.family import Proposal, ToolSyntax

__all__ = ["Acceptance", "Toolset", "accept_calls", "new_call_id"]


@attrs.frozen(kw_only=True)
class Toolset:
    """Declared tools with their executable schemas.

    Attributes:
        tools: Tools that the model is told about, names unique.
        schemas: Tool name -> schema of its arguments.
    """

    tools: tuple[ToolDecl, ...] = ()
    schemas: Mapping[str, CompiledSchema] = attrs.field(factory=dict)

    @classmethod
    def compile(cls, tools: Sequence[ToolDecl], *, annotations: Sequence[str] = ()) -> Toolset:
        """Check the schemas of declared tools.

        Args:
            tools: Declarations, names unique.
            annotations: Keywords to accept as annotations, see ``compile_schema``.

        Returns:
            The tools, ready to check calls.

        Raises:
            InvalidRequest: A schema cannot be executed, or allows no object.
        """
        code = "request.tools.parameters"
        schemas = {}
        for index, tool in enumerate(tools):
            subject = f"tools[{index}].parameters"
            schema = compile_schema(tool.parameters, subject, annotations=annotations, code=code)
            types = allowed_types(schema.root)
            if "object" not in types:
                raise InvalidRequest(
                    f"{subject}: must allow an object, got {', '.join(sorted(types)) or 'nothing'}",
                    code=code,
                    hint="arguments are an object with one member a parameter",
                )
            schemas[tool.name] = schema
        return cls(tools=tuple(tools), schemas=schemas)

    def advertising(self, names: Sequence[str]) -> Toolset:
        """Keep some of the tools.

        Args:
            names: Names to keep.

        Returns:
            The smaller set, in the order of declaration.
        """
        kept = tuple(tool for tool in self.tools if tool.name in names)
        return Toolset(tools=kept, schemas={tool.name: self.schemas[tool.name] for tool in kept})


@attrs.frozen(kw_only=True)
class Acceptance:
    """A finished answer taken apart.

    Attributes:
        runs: The text before, between and after the accepted calls; one more than calls.
        calls: Accepted calls in order.
        refusals: Why each other proposal is none, in order.
    """

    runs: tuple[str, ...]
    calls: tuple[ToolCall, ...] = ()
    refusals: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The answer without the accepted spans."""
        return "".join(self.runs)


def new_call_id() -> str:
    """Draw a call id.

    Returns:
        An id that no other call has, in this process or another.
    """
    return f"call_{secrets.token_hex(12)}"


def accept_calls(
    answer: str,
    syntax: ToolSyntax,
    toolset: Toolset,
    *,
    start: int = 0,
    new_id: Callable[[], str] = new_call_id,
    limits: Limits = LIMITS,
) -> Acceptance:
    """Take the certain calls out of a finished answer.

    Args:
        answer: The completed text after the reasoning, with all markup.
        syntax: How the model writes calls.
        toolset: Advertised tools.
        start: Where a call may begin; text before it was delivered already (characters).
        new_id: Makes the id of a call.
        limits: Bounds.

    Returns:
        Text and calls.

    Raises:
        PluginError: The syntax failed, which its contract forbids.
    """
    runs: list[str] = []
    calls: list[ToolCall] = []
    refusals: list[str] = []
    at = 0
    literals = getattr(syntax, "literals", NO_LITERALS)
    for proposal in _proposals(answer, syntax, toolset):
        begin, end = proposal.span
        if not max(at, start) <= begin < end <= len(answer) or len(calls) == limits.reply_calls:
            refusals.append("a call must stand after the one before, within bounds")
            continue
        try:
            arguments = _arguments(proposal, toolset, literals, limits)
            call = ToolCall(id=new_id(), name=proposal.name, arguments=arguments)
        except EngineError as error:
            refusals.append(str(error))
            continue
        calls.append(call)
        runs.append(answer[at:begin])
        at = end
    runs.append(answer[at:])
    return Acceptance(runs=tuple(runs), calls=tuple(calls), refusals=tuple(refusals))


def _proposals(answer: str, syntax: ToolSyntax, toolset: Toolset) -> Sequence[Proposal]:
    if not toolset.tools:
        return ()
    try:
        return sorted(syntax.parse(answer, toolset.tools), key=lambda proposal: proposal.span)
    except Exception as exc:
        # A plugin's code may raise anything.
        raise PluginError(
            f"tool syntax {syntax.name!r}: must not raise for any text, got {type(exc).__name__}",
            code="plugin.tool_syntax",
            hint="report this to the plugin's author",
        ) from exc


def _arguments(
    proposal: Proposal, toolset: Toolset, literals: Mapping[str, Any], limits: Limits
) -> Mapping[str, Any]:
    """Find the one valid reading of a proposal."""
    schema = toolset.schemas.get(proposal.name)
    if schema is None:
        raise _refused("must name an advertised tool")
    valid: list[Mapping[str, Any]] = []
    failure: EngineError | None = None
    for reading in proposal.readings:
        try:
            arguments = coerce_reading(reading, schema, literals, limits)
        except CoercionError as error:
            failure = error
            continue
        # A budget that runs out leaves it open whether this is the only reading: nothing is caught.
        broken = violation(schema, arguments, limits)
        if broken is None:
            valid.append(arguments)
        else:
            failure = _refused(f"arguments must satisfy the schema, but {broken}")
    if len(valid) == 1:
        return valid[0]
    if valid:
        raise _refused(f"must have one meaning, but {len(valid)} readings are valid")
    raise failure if failure is not None else _refused("must have a reading")


def _refused(rule: str) -> InvalidRequest:
    return InvalidRequest(f"tool call: {rule}", code="tools.refused")
