"""Write ``docs/hooks.md`` from the docstrings of the hook specs (``--check`` only compares)."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from engine_core import hookspecs
from engine_core.markers import ENTRY_POINT_GROUP, HOOK_API

TARGET = Path(__file__).resolve().parent.parent / "docs" / "hooks.md"


def render() -> str:
    """Render every hook with its signature and documentation.

    Returns:
        Markdown.
    """
    lines = [
        "# Hooks",
        "",
        f"Generated from `engine_core.hookspecs` (hook API {HOOK_API}, entry-point group "
        f"`{ENTRY_POINT_GROUP}`) by `nox -s docs`.",
        "",
        inspect.cleandoc(hookspecs.__doc__ or ""),
    ]
    for name, hook in vars(hookspecs).items():
        if name.startswith("engine_") and callable(hook):
            lines += ["", f"## {name}", "", "```python", f"{name}{inspect.signature(hook)}", "```"]
            lines += ["", "```text", inspect.cleandoc(hook.__doc__ or ""), "```"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write or compare the page."""
    content = render()
    if "--check" in sys.argv:
        if not TARGET.is_file() or TARGET.read_text(encoding="utf-8") != content:
            sys.exit("docs/hooks.md is stale: run nox -s docs")
        return
    TARGET.write_text(content, encoding="utf-8")
    print(TARGET)


if __name__ == "__main__":
    main()
