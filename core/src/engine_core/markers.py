"""All that a plugin module has to import: the two pluggy markers and the hook API number."""

from __future__ import annotations

from typing import Final

import pluggy

__all__ = ["ENTRY_POINT_GROUP", "ENTRY_POINT_PREFIX", "HOOK_API", "PROJECT", "hookimpl", "hookspec"]

PROJECT: Final = "engine_core"
HOOK_API: Final = 1
ENTRY_POINT_PREFIX: Final = "engine_core.families.v"
ENTRY_POINT_GROUP: Final = f"{ENTRY_POINT_PREFIX}{HOOK_API}"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
