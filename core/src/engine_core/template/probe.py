"""What a chat template can do, found by rendering, never by searching its source.

The probe renders small synthetic conversations through the production engine and looks for their
texts in the prompts. A failed or ambiguous check disables one capability, not the template; only
a template that serves neither chat nor translation is an error.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any, Final

import attrs

from engine_core.errors import TemplateError
from engine_core.limits import LIMITS, Limits
from engine_core.template import probe_samples as samples
from engine_core.template.probe_media import probe_media
from engine_core.template.probe_samples import PROBE_TOOLS
from engine_core.template.probe_tools import ToolFinding, probe_tools, tool_histories
from engine_core.template.render import ArgumentsForm, ChatTemplate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.family import ReasoningMarkers, TemplateDialect, ToolSyntax
    from engine_core.messages import Message, ToolDecl
    from engine_core.template.source import TemplateSources

__all__ = ["CAPABILITIES", "ProbeReport", "Verdict", "probe_template"]

CHAT: Final = "task:chat"
TRANSLATION: Final = "task:translation"
SYSTEM_PROMPT: Final = "interaction:system_prompt"
TOOLS: Final = "interaction:tools"
REASONING_HISTORY: Final = "interaction:reasoning_history"
THINKING_TOGGLE: Final = "interaction:thinking_toggle"
IMAGES: Final = "media:images"
AUDIO: Final = "media:audio"
CAPABILITIES: Final = (
    CHAT,
    TRANSLATION,
    SYSTEM_PROMPT,
    TOOLS,
    REASONING_HISTORY,
    THINKING_TOGGLE,
    IMAGES,
    AUDIO,
)
_UNITS_SHARE: Final = 8
_CLOCK: Final = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


@attrs.frozen(kw_only=True)
class Verdict:
    """One capability.

    Attributes:
        capability: One of ``CAPABILITIES``.
        supported: Whether it was shown.
        reason: What was shown, or the first check that failed.
    """

    capability: str
    supported: bool
    reason: str


@attrs.frozen(kw_only=True)
class ProbeReport:
    """What a template can do.

    Attributes:
        verdicts: One a capability, in the order of ``CAPABILITIES``.
        dialect: Name of the dialect that serves it best.
        tool_syntax: Name of the one syntax that reads its calls, ``None`` without tools.
        arguments_form: How it wants the arguments of a call.
        end_of_turn: Token texts with which it closes an assistant turn.
    """

    verdicts: tuple[Verdict, ...]
    dialect: str
    tool_syntax: str | None = None
    arguments_form: ArgumentsForm = "mapping"
    end_of_turn: tuple[str, ...] = ()

    def supports(self, capability: str) -> bool:
        """Tell whether a capability was shown.

        Args:
            capability: One of ``CAPABILITIES``.

        Returns:
            Whether it was.
        """
        return any(
            verdict.supported for verdict in self.verdicts if verdict.capability == capability
        )

    def reason(self, capability: str) -> str:
        """Give the evidence for a verdict.

        Args:
            capability: One of ``CAPABILITIES``.

        Returns:
            The reason; empty for an unknown name.
        """
        return next((one.reason for one in self.verdicts if one.capability == capability), "")


def probe_template(
    sources: TemplateSources,
    dialects: Sequence[TemplateDialect],
    syntaxes: Sequence[ToolSyntax],
    limits: Limits = LIMITS,
) -> tuple[ChatTemplate, ProbeReport]:
    """Choose dialect, tool syntax and argument form for a template, and say what it can do.

    Args:
        sources: The checkpoint's templates.
        dialects: Candidates, most preferred first; the one that serves most capabilities wins.
        syntaxes: Tool syntaxes; exactly one must read the template's calls.
        limits: Bounds.

    Returns:
        The template ready for use, and the report.

    Raises:
        TemplateError: No dialect is given, a template is invalid, or it serves neither chat nor
            translation.
    """
    if not dialects:
        raise TemplateError("chat template: needs a dialect, got none", code="template.dialect")
    compiled = ChatTemplate.compile(sources, dialects[0], limits)
    best: tuple[ChatTemplate, ProbeReport] | None = None
    for dialect in dialects:
        candidate = _probe_dialect(attrs.evolve(compiled, dialect=dialect), syntaxes)
        if best is None or _rank(candidate[1]) > _rank(best[1]):
            best = candidate
    if best is None or not (best[1].supports(CHAT) or best[1].supports(TRANSLATION)):
        reason = best[1].reason(CHAT) if best is not None else ""
        raise TemplateError(
            f"chat template: must render a user turn or a translation, got neither, {reason}",
            code="template.unusable",
            hint="load with template=False for raw completion, or pass another template",
        )
    template, report = best
    syntax = next((one for one in syntaxes if one.name == report.tool_syntax), None)
    prober = _Prober(template=template, syntax=syntax)
    media = (prober.media(IMAGES, "images"), prober.media(AUDIO, "audio"))
    return template, attrs.evolve(report, verdicts=(*report.verdicts, *media))


def _rank(report: ProbeReport) -> tuple[bool, bool, int]:
    count = sum(verdict.supported for verdict in report.verdicts)
    return report.supports(CHAT), report.supports(TOOLS), count


def _probe_dialect(
    template: ChatTemplate, syntaxes: Sequence[ToolSyntax]
) -> tuple[ChatTemplate, ProbeReport]:
    prober = _Prober(template=template)
    chat, translation = prober.chat(), prober.translation()
    finding, syntax, form = _choose_syntax(template, syntaxes if chat.supported else ())
    template = attrs.evolve(template, arguments_form=form, tool_markers=_tool_markers(syntax))
    prober = _Prober(template=template, syntax=syntax)
    report = ProbeReport(
        verdicts=(
            chat,
            translation,
            prober.system_prompt(),
            Verdict(capability=TOOLS, supported=finding.supported, reason=finding.reason),
            prober.reasoning_history(),
            prober.thinking_toggle(),
        ),
        dialect=template.dialect.name,
        tool_syntax=None if syntax is None else syntax.name,
        arguments_form=template.arguments_form,
        end_of_turn=prober.end_of_turn(),
    )
    return template, report


def _tool_markers(syntax: ToolSyntax | None) -> tuple[str, ...]:
    """Every text that a reply may hold as a control token because of its calls."""
    if syntax is None:
        return ()
    markers = (marker for pair in syntax.markers for marker in pair)
    return (*markers, *getattr(syntax, "delimiters", ()))


def _choose_syntax(
    template: ChatTemplate, syntaxes: Sequence[ToolSyntax]
) -> tuple[ToolFinding, ToolSyntax | None, ArgumentsForm]:
    failed = ToolFinding(supported=False, reason="no tool syntax can be tried")
    forms: tuple[ArgumentsForm, ...] = ("mapping", "json")
    for form in forms:
        prober = _Prober(template=attrs.evolve(template, arguments_form=form))
        findings = [(syntax, probe_tools(prober.with_tools, syntax)) for syntax in syntaxes]
        passed = [(syntax, finding) for syntax, finding in findings if finding.supported]
        if len(passed) > 1:
            names = [syntax.name for syntax, _ in passed]
            reason = f"several syntaxes read its calls: {', '.join(names)}"
            return ToolFinding(supported=False, reason=reason), None, "mapping"
        if passed:
            return passed[0][1], passed[0][0], form
        if findings and form == "mapping":
            failed = findings[0][1]
    return failed, None, "mapping"


@attrs.frozen(kw_only=True)
class _Prober:
    """Renders samples; ``syntax`` is set once tools are known to work.

    With tools, every other capability must hold on their path too.
    """

    template: ChatTemplate
    syntax: ToolSyntax | None = None

    def text(
        self, messages: Sequence[Message], tools: Sequence[ToolDecl] = (), **options: Any
    ) -> str | None:
        """Render, or ``None`` when the template cannot."""
        share = self.template.limits.template_work_units // _UNITS_SHARE
        limits = attrs.evolve(self.template.limits, template_work_units=share)
        template = attrs.evolve(self.template, limits=limits)
        try:
            return template.render(messages, tools, clock=_CLOCK, **options).text
        except TemplateError:
            return None

    def with_tools(self, messages: Sequence[Message], tools: Sequence[ToolDecl]) -> str | None:
        """Render with tools."""
        return self.text(messages, tools)

    def _tool_sets(self) -> list[list[ToolDecl]]:
        """The paths on which a capability must hold."""
        declared = [tool.declaration for tool in PROBE_TOOLS]
        return [[]] if self.syntax is None else [[], declared]

    def _tool_loops(self, reasoning: str | None) -> list[list[Message]]:
        if self.syntax is None:
            return []
        return [history for _, history, _ in tool_histories(self.syntax.probe_rounds, reasoning)]

    def chat(self) -> Verdict:
        """One user turn renders and keeps its text."""
        try:
            text = self.template.render([samples.user()], clock=_CLOCK).text
        except TemplateError as exc:
            return Verdict(capability=CHAT, supported=False, reason=str(exc))
        kept = samples.USER in text
        reason = "a user turn renders with its text" if kept else "the user's text is lost"
        return Verdict(capability=CHAT, supported=kept, reason=reason)

    def translation(self) -> Verdict:
        """A translation renders its text, not its keys, and the target language matters."""
        german, french = (self.text([samples.translation(code)]) for code in ("de", "fr"))
        if german is None or french is None:
            reason = "a translation does not render"
        elif samples.TRANSLATE not in german:
            reason = "the text to translate is lost"
        elif "source_lang_code" in german:
            reason = "the translation's own keys leak into the prompt"
        elif german == french:
            reason = "the target language changes nothing"
        else:
            reason = "a translation renders and follows the target language"
            return Verdict(capability=TRANSLATION, supported=True, reason=reason)
        return Verdict(capability=TRANSLATION, supported=False, reason=reason)

    def system_prompt(self) -> Verdict:
        """A system turn keeps its text and is no user turn, with tools and in tool loops too."""
        reason = "a system turn renders as its own role"
        supported = True
        for tools in self._tool_sets():
            text = self.text([samples.system(), samples.user()], tools)
            where = " with tools" if tools else ""
            if text is None:
                supported, reason = False, f"a system turn does not render{where}"
            elif samples.SYSTEM not in text or samples.USER not in text:
                supported, reason = False, f"the system text or the user's is lost{where}"
            elif text == self.text([samples.user(samples.SYSTEM), samples.user()], tools):
                supported, reason = False, f"a system turn looks like a user turn{where}"
            if not supported:
                break
        for history in self._tool_loops(None) if supported else ():
            text = self.text([samples.system(), *history], self._tool_sets()[-1])
            if text is None or samples.SYSTEM not in text:
                supported, reason = False, "the system text is lost in a tool loop"
        return Verdict(capability=SYSTEM_PROMPT, supported=supported, reason=reason)

    def reasoning_history(self) -> Verdict:
        """Reasoning of earlier turns reaches the prompt inside the markers."""
        markers = self.template.dialect.reasoning
        if markers is None:
            reason = "the dialect has no reasoning markers"
            return Verdict(capability=REASONING_HISTORY, supported=False, reason=reason)
        kept = []
        answered, plain = (
            [samples.user(), samples.assistant(reasoning=reasoning)]
            for reasoning in (samples.REASONING, None)
        )
        follow_up = samples.user(samples.FOLLOW_UP)
        if self._keeps(markers, [*answered, follow_up], [*plain, follow_up]):
            kept.append("an older turn")
        if self._keeps(markers, answered, plain, add_generation_prompt=False):
            kept.append("the last turn")
        loops = zip(self._tool_loops(samples.REASONING), self._tool_loops(None), strict=True)
        in_loops = [
            self._keeps(markers, with_it, without, tools=self._tool_sets()[-1])
            for with_it, without in loops
        ]
        if in_loops and all(in_loops):
            kept.append("a tool loop")
        supported = bool(kept) and all(in_loops)
        if supported:
            reason = f"reasoning is kept in {', '.join(kept)}"
        elif kept:
            reason = "reasoning is lost in a tool loop"
        else:
            reason = "reasoning of earlier turns is not in the prompt, or not inside its markers"
        return Verdict(capability=REASONING_HISTORY, supported=supported, reason=reason)

    def _keeps(
        self,
        markers: ReasoningMarkers,
        with_it: Sequence[Message],
        without: Sequence[Message],
        tools: Sequence[ToolDecl] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> bool:
        text = self.text(with_it, tools, add_generation_prompt=add_generation_prompt)
        other = self.text(without, tools, add_generation_prompt=add_generation_prompt)
        return text is not None and text != other and _inside(markers, text)

    def thinking_toggle(self) -> Verdict:
        """Switching thinking changes the prompt, with tools and in tool loops too."""
        reason = "switching thinking on or off changes the prompt"
        supported = True
        conversations: list[tuple[list[Message], list[ToolDecl]]] = [
            ([samples.user()], tools) for tools in self._tool_sets()
        ]
        conversations += [(loop, self._tool_sets()[-1]) for loop in self._tool_loops(None)]
        for messages, tools in conversations:
            on, off = (self.text(messages, tools, thinking=mode) for mode in (True, False))
            where = " with tools" if tools else ""
            if on is None or off is None:
                supported, reason = False, f"a thinking switch does not render{where}"
            elif samples.USER not in on or samples.USER not in off:
                supported, reason = False, f"the user's text is lost with a switch{where}"
            elif on == off:
                supported, reason = False, f"switching thinking changes nothing{where}"
            if not supported:
                break
        return Verdict(capability=THINKING_TOGGLE, supported=supported, reason=reason)

    def media(self, capability: str, kind: str) -> Verdict:
        """Whether items render, with tools and in tool loops too; nothing reads them so far."""
        paths = [([samples.user()], tools) for tools in self._tool_sets()]
        paths += [(loop, self._tool_sets()[-1]) for loop in self._tool_loops(None)]
        reason = probe_media(self.with_tools, kind, paths) or f"{kind} render, but are not read"
        return Verdict(capability=capability, supported=False, reason=reason)

    def end_of_turn(self) -> tuple[str, ...]:
        """The dialect's end-of-turn texts with which a closed assistant turn really ends."""
        closed = None
        for asked in (samples.user(), samples.translation("de")):
            if closed is None:
                closed = self.text([asked, samples.assistant()], add_generation_prompt=False)
        if closed is None:
            return ()
        text = closed.rstrip()
        return tuple(one for one in self.template.dialect.end_of_turn if text.endswith(one))


def _inside(markers: ReasoningMarkers, text: str) -> bool:
    """Tell whether the sample reasoning stands between an opener and the next closer."""
    at = text.find(samples.REASONING)
    if at < 0:
        return False
    opened = text.rfind(markers.open, 0, at)
    closed = text.find(markers.close, at + len(samples.REASONING))
    return 0 <= opened < at < closed and markers.close not in text[opened:at]
