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
    from engine_core.cli.output import Output
    from engine_core.cli.parser import build_parser
    from engine_core.errors import EngineError, InvalidRequest

    arguments = build_parser().parse_args(sys.argv[1:] if argv is None else argv)
    output = Output(as_json=arguments.json)
    try:
        return int(arguments.run(arguments, output))
    except KeyboardInterrupt:
        output.finish_line()
        return 130
    except InvalidRequest as error:
        output.error(error)
        return 2 if error.code.startswith("cli.") else 1
    except EngineError as error:
        output.error(error)
        return 1
    except BrokenPipeError:
        # The reader went away (`engine generate ... | head`): nothing is left to say.
        sys.stderr.close()
        return 0
