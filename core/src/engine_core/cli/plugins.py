"""``engine plugins``: which families can be used here, and why the others cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.cli.options import load_plugins

if TYPE_CHECKING:
    import argparse

    from engine_core.cli.output import Output

__all__ = ["run"]


def run(arguments: argparse.Namespace, output: Output) -> int:
    """List every plugin found.

    Args:
        arguments: Parsed arguments.
        output: Where the list goes.

    Returns:
        0, or 1 with ``--strict`` when a plugin is not active or in conflict with another.
    """
    reports = load_plugins(arguments).reports
    for row in reports:
        if output.as_json:
            output.record(
                "plugin",
                name=row.name,
                distribution=row.distribution,
                version=row.version,
                status=row.status,
                reason=row.reason,
            )
            continue
        source = f"{row.distribution} {row.version}".strip()
        reason = f"  {row.reason}" if row.reason else ""
        output.line(f"{row.name:<12} {row.status:<13} {source}{reason}")
    # An active plugin has a reason only when another one claims a name of its own.
    sound = all(row.status == "active" and not row.reason for row in reports)
    return 1 if arguments.strict and not sound else 0
