"""``engine probe``: what a checkpoint's chat template can do, and what showed it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.cli.options import load_plugins, resolve_model

if TYPE_CHECKING:
    import argparse

    from engine_core.cli.output import Output
    from engine_core.prompting import Prompter
    from engine_core.template.probe import ProbeReport

__all__ = ["run"]


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Probe the template without reading weights.

    Args:
        arguments: Parsed arguments.
        output: Where the table goes.

    Returns:
        Exit code: 1 without a template. An unusable template raises the typed error that says why.
    """
    from engine_core.checkpoint.reader import read_checkpoint
    from engine_core.limits import LIMITS
    from engine_core.spec import find_owner
    from engine_core.text_loading import load_prompter

    plugins = load_plugins(arguments)
    with read_checkpoint(resolve_model(arguments)) as checkpoint:
        owner = find_owner(plugins, checkpoint.config, arguments.family)
        prompter = load_prompter(
            checkpoint,
            plugins.template_dialects(owner),
            plugins.tool_syntaxes(owner),
            None,
            LIMITS,
        )
    if prompter.report is None:
        if output.as_json:
            output.record("template", usable=False, reason=prompter.template_reason)
        else:
            output.line(f"no chat template: {prompter.template_reason}")
        return 1
    write = _write_records if output.as_json else _write_table
    write(prompter, prompter.report, output)
    return 0


def _write_records(prompter: Prompter, report: ProbeReport, output: Output) -> None:
    output.record(
        "template",
        usable=True,
        dialect=report.dialect,
        tool_syntax=report.tool_syntax,
        arguments_form=report.arguments_form,
        end_of_turn=list(report.end_of_turn),
        sha256=dict(prompter.template_digests),
    )
    for verdict in report.verdicts:
        output.record(
            "verdict",
            capability=verdict.capability,
            supported=verdict.supported,
            reason=verdict.reason,
        )


def _write_table(prompter: Prompter, report: ProbeReport, output: Output) -> None:
    width = max(len(verdict.capability) for verdict in report.verdicts)
    output.line(f"{'capability':<{width}}  verdict  evidence")
    for verdict in report.verdicts:
        shown = "yes" if verdict.supported else "no"
        output.line(f"{verdict.capability:<{width}}  {shown:<7}  {verdict.reason}")
    facts = {
        "dialect": report.dialect,
        "tool syntax": report.tool_syntax or "none",
        "call arguments": f"written as {'an object' if _is_mapping(report) else 'JSON text'}",
        "turn ends with": " ".join(report.end_of_turn) or "no known token",
        **{f"{name} template": digest for name, digest in prompter.template_digests.items()},
    }
    output.line()
    for name, fact in facts.items():
        output.line(f"{name:<{width}}  {fact}")


def _is_mapping(report: ProbeReport) -> bool:
    return report.arguments_form == "mapping"
