"""How the command writes: answers to standard output, everything else to standard error."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any, Final, TextIO

from engine_core.errors import EngineError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["BadUsage", "Output", "OutputError", "prepare_streams"]

BAR_CELLS = 30

# An option in a hint of the library, and what the command calls those that it names otherwise.
_OPTION: Final = re.compile(r"\b(?P<name>\w+)=(?!=)(?P<quote>'?)(?P<value>\w*)(?P=quote)")
_NAMES: Final = {"block": "no_plugin", "cache_dir": "hub_cache"}

# Where the library's hint names another method, what the command can do instead.
_RAW_PROMPT: Final = "engine generate --ignore-chat-template completes the raw prompt"
_CURES: Final = {
    "template.missing": _RAW_PROMPT,
    "template.unusable": _RAW_PROMPT,
    "tokenizer.missing": "add tokenizer.json to the checkpoint",
}


class BadUsage(InvalidRequest):
    """The command line cannot be honoured as it was written; exit code 2."""

    default_code = "cli.usage"


class OutputError(EngineError):
    """Standard output is closed or full."""

    default_code = "cli.output"


def prepare_streams() -> None:
    """Make the standard streams take any text; what an encoding lacks is escaped.

    Bytes on standard input that are no text become lone surrogates, which the request refuses
    with a typed error. A stream the parent closed is left as it is, ``None``.
    """
    for stream, errors in (
        (sys.stdin, "surrogateescape"),
        (sys.stdout, "backslashreplace"),
        (sys.stderr, "backslashreplace"),
    ):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


class Output:
    """Writes text or JSON lines, and a progress bar when standard error is a terminal."""

    def __init__(self, *, as_json: bool, options: Collection[str]) -> None:
        """Make the writer.

        Args:
            as_json: Write one JSON object a line instead of text.
            options: Names of the command's options, ``_`` for ``-``; hints spell them.
        """
        self.as_json = as_json
        self._options = options
        self.shows_progress = _is_terminal(sys.stderr) and not as_json
        self._bar_shown = False

    def text(self, text: str) -> None:
        """Stream a piece of an answer.

        Args:
            text: Written as it is, without a line end.
        """
        self.clear_bar()
        _write(text)

    def line(self, text: str = "") -> None:
        """Write one line to standard output.

        Args:
            text: The line.
        """
        self.clear_bar()
        _write(text + "\n")

    def record(self, type_name: str, /, **fields: Any) -> None:
        """Write one JSON object.

        Args:
            type_name: Value of its ``type`` field.
            **fields: Further JSON-like fields.
        """
        # ASCII, so that the line is valid JSON in whatever encoding standard output has.
        self.line(json.dumps({"type": type_name, **fields}, allow_nan=False, default=str))

    def note(self, text: str) -> None:
        """Write one line to standard error, if anybody listens there.

        Args:
            text: The line.
        """
        self.clear_bar()
        try:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
        except (AttributeError, OSError):  # closed by the parent, or its reader left
            return

    def error(self, error: EngineError) -> None:
        """Report a typed error.

        Args:
            error: Its message, code and hint are shown.
        """
        hint = _CURES.get(error.code) or _OPTION.sub(self._spell, error.hint)
        if self.as_json:
            self.record("error", code=error.code, message=str(error), hint=hint)
            return
        self.note(f"error: {error} [{error.code}]")
        if hint:
            self.note(f"hint: {hint}")

    def _spell(self, option: re.Match[str]) -> str:
        """Write an option of the library as the command's, if it has that one."""
        name = _NAMES.get(option["name"], option["name"])
        if name not in self._options:
            return option[0]
        return f"--{name.replace('_', '-')} {option['value']}".rstrip()

    def finish_line(self) -> None:
        """End an interrupted line on a terminal."""
        self.clear_bar()
        if _is_terminal(sys.stdout):
            self.line()

    def give_up(self) -> None:
        """Send what is still buffered for standard output nowhere, so that nothing can fail on it.

        Otherwise the interpreter tries once more at exit, and complains.
        """
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        except (AttributeError, OSError, ValueError):  # closed, or no file at all
            return

    def progress(self, label: str, done: int, total: int) -> None:
        """Draw a progress bar; nothing when standard error is not a terminal.

        Args:
            label: What is going on.
            done: Units done.
            total: All units.
        """
        if not self.shows_progress or total <= 0:
            return
        filled = min(BAR_CELLS, done * BAR_CELLS // total)
        bar = "#" * filled + "." * (BAR_CELLS - filled)
        sys.stderr.write(f"\r{label} [{bar}] {min(100, done * 100 // total):3d}%")
        sys.stderr.flush()
        self._bar_shown = True
        if done >= total:
            self.clear_bar()

    def clear_bar(self) -> None:
        """Remove the bar before anything else is written."""
        if self._bar_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._bar_shown = False


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def _write(text: str) -> None:
    """Write to standard output; a reader that left is the caller's ``BrokenPipeError``."""
    stream: TextIO | None = sys.stdout
    if stream is None:
        raise OutputError("standard output: must be open, got a closed one")
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as exc:
        raise OutputError(f"standard output: must take everything, got {exc.strerror!r}") from exc
