"""The tool part of the capability probe: declarations, calls and results, read back."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import attrs

from engine_core.family import Typed
from engine_core.template import probe_samples as samples
from engine_core.template.probe_samples import CONTROL_TOOLS, PROBE_TOOLS, Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from engine_core.family import Proposal, ToolSyntax
    from engine_core.messages import Message, ToolDecl

    Render = Callable[[Sequence[Message], Sequence[ToolDecl]], str | None]

__all__ = ["ToolFinding", "probe_tools", "tool_histories"]

MAX_CANDIDATES: Final = 256
MAX_CANDIDATE_CHARS: Final = 64 * 1024
MAX_CANDIDATE_CHARS_TOTAL: Final = 256 * 1024
_JSON_STEP = re.compile(r'"(?:[^"\\]|\\.)*+"|[{}]', re.DOTALL)


@attrs.frozen(kw_only=True)
class ToolFinding:
    """What one syntax made of a template.

    Attributes:
        supported: Whether every check passed.
        reason: The first failed check, or what was shown.
    """

    supported: bool
    reason: str


def _declarations(tools: Sequence[Sample]) -> list[ToolDecl]:
    return [tool.declaration for tool in tools]


def tool_histories(
    rounds: int, reasoning: str | None = None
) -> list[tuple[tuple[Sample, ...], list[Message], list[Message]]]:
    """Make the tool conversations that a syntax must survive.

    Args:
        rounds: Call and result pairs: 1, or 2 (in one turn, and in two turns).
        reasoning: Reasoning of the calling turns.

    Returns:
        Called samples, the history, and the same history with results as user turns.
    """
    used = PROBE_TOOLS[:rounds]
    groups: list[list[tuple[Sample, ...]]]
    groups = [[used]] if rounds == 1 else [[used], [(tool,) for tool in used]]
    histories = []
    for turns in groups:
        pair: list[list[Message]] = []
        for as_user in (False, True):
            messages = [samples.user()]
            for called in turns:
                messages.append(samples.sample_calls(called, reasoning))
                messages += samples.sample_results(called, as_user=as_user)
            pair.append(messages)
        histories.append((used, pair[0], pair[1]))
    return histories


def probe_tools(render: Render, syntax: ToolSyntax) -> ToolFinding:
    """Check one syntax against a template.

    Args:
        render: Renders a conversation with tools; ``None`` when the template refuses it.
        syntax: How calls are read.

    Returns:
        The finding.
    """
    failure = _check_declarations(render) or _check_histories(render, syntax)
    if failure is not None:
        return ToolFinding(supported=False, reason=failure)
    return ToolFinding(
        supported=True,
        reason=f"two declarations appear and vary; {syntax.probe_rounds} call(s) with results "
        f"are read back by the syntax {syntax.name!r}",
    )


def _check_declarations(render: Render) -> str | None:
    shown = []
    for own, other in ((PROBE_TOOLS, CONTROL_TOOLS), (CONTROL_TOOLS, PROBE_TOOLS)):
        text = render([samples.user()], _declarations(own))
        if text is None:
            return "a conversation with declared tools does not render"
        if samples.USER not in text:
            return "the user's text is lost when tools are declared"
        if not all(tool.name in text and tool.parameter in text for tool in own):
            return "declared tools do not appear in the prompt"
        if any(tool.name in text or tool.parameter in text for tool in other):
            return "tools appear that were not declared"
        shown.append(text)
    return None if shown[0] != shown[1] else "other declarations give the same prompt"


def _check_histories(render: Render, syntax: ToolSyntax) -> str | None:
    declared = _declarations(PROBE_TOOLS)
    before = render([samples.user()], declared)
    for called, history, as_user in tool_histories(syntax.probe_rounds):
        text = render(history, declared)
        if text is None or before is None:
            return f"a history of {len(called)} call(s) and result(s) does not render"
        for tool in called:
            if text.count(tool.name) <= before.count(tool.name) or tool.argument not in text:
                return "a call in the history does not appear in the prompt"
            if tool.result not in text:
                return "a tool result in the history does not appear in the prompt"
        if text == render(as_user, declared):
            return "a tool result looks like a user turn"
        if not _reads_back(syntax, before, text, called, declared):
            return f"the calls in the prompt are not read back by the syntax {syntax.name!r}"
    return None


def _reads_back(
    syntax: ToolSyntax,
    before: str,
    text: str,
    called: Sequence[Sample],
    declared: Sequence[ToolDecl],
) -> bool:
    """Tell whether the history adds exactly the sample calls, in order."""
    examples = _proposals(syntax, before, declared)
    found = _proposals(syntax, text, declared)
    if [_spelling(one) for one in found[: len(examples)]] != [_spelling(one) for one in examples]:
        return False
    added = found[len(examples) :]
    return len(added) == len(called) and all(map(_is_call_of, added, called))


def _spelling(proposal: Proposal) -> tuple[str, Any]:
    return proposal.name, proposal.readings


def _is_call_of(proposal: Proposal, sample: Sample) -> bool:
    return proposal.name == sample.name and any(
        reading.keys() == {sample.parameter}
        and _plain(reading[sample.parameter]) == sample.argument
        for reading in proposal.readings
    )


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Typed) else value


def _proposals(syntax: ToolSyntax, text: str, declared: Sequence[ToolDecl]) -> list[Proposal]:
    if syntax.markers:
        return list(syntax.parse(text, declared))
    # A syntax without markers reads whole replies: offer it every object in the prompt.
    return [
        proposal
        for candidate in _objects(text)
        for proposal in syntax.parse(candidate, declared)
        if any(proposal.name == tool.name for tool in declared)
    ]


def _objects(text: str) -> Iterator[str]:
    """Find outermost balanced objects, a bounded number of bounded length."""
    at = total = 0
    for _ in range(MAX_CANDIDATES):
        start = text.find("{", at)
        if start < 0:
            return
        end = _object_end(text, start)
        at = start + 1 if end is None else end
        if end is not None:
            total += end - start
            if total > MAX_CANDIDATE_CHARS_TOTAL:
                return
            yield text[start:end]


def _object_end(text: str, start: int) -> int | None:
    depth = 0
    for match in _JSON_STEP.finditer(text, start, start + MAX_CANDIDATE_CHARS):
        if match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
            if depth == 0:
                return match.end()
    return None
