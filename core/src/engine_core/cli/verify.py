"""``engine verify``: load a checkpoint completely, digests checked, and run one token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.cli.options import load_client

if TYPE_CHECKING:
    import argparse

    from engine_core.cli.output import Output

__all__ = ["run"]


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Load, run one token, and print the identity of what was loaded.

    Args:
        arguments: Parsed arguments.
        output: Where the facts go.

    Returns:
        Exit code; an unusable checkpoint raises the typed error that says why.
    """
    with load_client(arguments, output) as client:
        reply = client.runtime_probe()
        info = client.info
        if output.as_json:
            output.record(
                "verified",
                family=info.family,
                fingerprint=info.fingerprint,
                load_seconds=info.load_seconds,
                first_token=reply.token_ids[0],
            )
            return 0
        output.line(f"verified     {info.family} ({info.model_type}), {info.compute_dtype}")
        output.line(f"fingerprint  {info.fingerprint}")
        output.line(f"parameters   {info.parameter_count}")
        output.line(f"loaded in    {info.load_seconds:.2f} s")
        for note in info.notes:
            output.line(f"note         {note}")
    return 0
