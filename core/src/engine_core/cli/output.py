"""How the command writes: answers to standard output, everything else to standard error."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_core.errors import EngineError

__all__ = ["Output"]

BAR_CELLS = 30


class Output:
    """Writes text or JSON lines, and a progress bar when standard error is a terminal."""

    def __init__(self, *, as_json: bool) -> None:
        """Make the writer.

        Args:
            as_json: Write one JSON object a line instead of text.
        """
        self.as_json = as_json
        self.shows_progress = sys.stderr.isatty() and not as_json
        self._bar_shown = False

    def text(self, text: str) -> None:
        """Stream a piece of an answer.

        Args:
            text: Written as it is, without a line end.
        """
        self.clear_bar()
        sys.stdout.write(text)
        sys.stdout.flush()

    def line(self, text: str = "") -> None:
        """Write one line to standard output.

        Args:
            text: The line.
        """
        self.clear_bar()
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def record(self, type_name: str, /, **fields: Any) -> None:
        """Write one JSON object.

        Args:
            type_name: Value of its ``type`` field.
            **fields: Further JSON-like fields.
        """
        self.line(json.dumps({"type": type_name, **fields}, ensure_ascii=False, default=str))

    def note(self, text: str) -> None:
        """Write one line to standard error.

        Args:
            text: The line.
        """
        self.clear_bar()
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def error(self, error: EngineError) -> None:
        """Report a typed error.

        Args:
            error: Its message, code and hint are shown.
        """
        if self.as_json:
            self.record("error", code=error.code, message=str(error), hint=error.hint)
            return
        self.note(f"error: {error} [{error.code}]")
        if error.hint:
            self.note(f"hint: {error.hint}")

    def finish_line(self) -> None:
        """End an interrupted line on a terminal."""
        self.clear_bar()
        if sys.stdout.isatty():
            self.line()

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
