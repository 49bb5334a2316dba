"""The ``engine`` command: the only code of the project that prints.

Exit codes: 0 done, 1 the request failed, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program name; ``sys.argv[1:]`` when omitted.

    Returns:
        The exit code.
    """
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # before a command had started
        return 130


def _run(argv: Sequence[str]) -> int:
    from engine_core.cli.output import BadUsage, Output, OutputError, prepare_streams
    from engine_core.cli.parser import build_parser
    from engine_core.errors import EngineError

    prepare_streams()
    arguments = build_parser().parse_args(argv)
    output = Output(as_json=arguments.json, options=vars(arguments))
    try:
        try:
            return int(arguments.run(arguments, output))
        except KeyboardInterrupt:
            output.finish_line()
            return 130
        except OutputError:
            raise
        except EngineError as error:
            output.error(error)
            return 2 if isinstance(error, BadUsage) else 1
    except BrokenPipeError:
        # The reader went away (`engine generate ... | head`): nothing is left to say.
        output.give_up()
        return 0
    except OutputError as error:
        output.note(f"error: {error} [{error.code}]")
        output.give_up()
        return 1
