"""``engine chat``: a conversation on the terminal that keeps its whole history."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from engine_core.cli.generate import report, stream_reply
from engine_core.cli.options import (
    generation_options,
    load_client,
    restore_cache,
    save_cache,
)
from engine_core.errors import EngineError

if TYPE_CHECKING:
    import argparse

    from engine_core.cli.output import Output

__all__ = ["run"]

HELP = "q quits, r resets the conversation, h shows this help; anything else is your message"


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Read messages from standard input until it ends or the user quits.

    Args:
        arguments: Parsed arguments.
        output: Where everything goes.

    Returns:
        Exit code.
    """
    options = generation_options(arguments)
    opening: list[dict[str, Any]] = []
    if arguments.system_prompt is not None:
        opening.append({"role": "system", "content": arguments.system_prompt})
    messages = list(opening)
    with load_client(
        arguments, output, extra_eos_tokens=tuple(arguments.extra_eos_token)
    ) as client:
        restore_cache(client, arguments.prompt_cache_file, output)
        output.note(HELP)
        while (line := _ask(output)) is not None:
            if line == "q":
                break
            if line == "r":
                messages = list(opening)
                output.note("conversation reset")
            elif line == "h":
                output.note(HELP)
            elif line:
                messages.append({"role": "user", "content": line})
                try:
                    reply = stream_reply(client.stream(messages, **options), output)
                except EngineError as error:
                    # The message that failed is taken back, so that the conversation goes on.
                    messages.pop()
                    output.error(error)
                    continue
                if output.as_json:
                    report(reply, client.info.memory.peak, output)
                else:
                    output.line()
                answer: dict[str, Any] = {"role": "assistant", "content": reply.text}
                messages.append(answer)
        if len(messages) > len(opening):
            save_cache(client, arguments.prompt_cache_file, output, messages, **options)
    return 0


def _ask(output: Output) -> str | None:
    """Prompt for one line; ``None`` at the end of input."""
    if sys.stdin is None:  # closed by the parent
        return None
    if sys.stdin.isatty() and not output.as_json:
        output.text("> ")
    line = sys.stdin.readline()
    return line.strip() if line else None
