"""Finding family plugins among the installed distributions, without importing any of them."""

from __future__ import annotations

import enum
import importlib.metadata
from typing import TYPE_CHECKING

import attrs

from engine_core.markers import ENTRY_POINT_GROUP, ENTRY_POINT_PREFIX, HOOK_API
from engine_core.values import reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Candidate", "PluginReport", "PluginStatus", "find_candidates"]


class PluginStatus(enum.StrEnum):
    """What became of a plugin."""

    ACTIVE = "active"
    BLOCKED = "blocked"
    FAILED = "failed"
    INCOMPATIBLE = "incompatible"


@attrs.frozen(kw_only=True)
class PluginReport:
    """One row of the plugin list.

    Attributes:
        name: Entry-point name, which is also the blocking name.
        distribution: Distribution that brought it.
        version: That distribution's version.
        status: What became of it.
        reason: Why it is not active, or whom an active one is in conflict with.
    """

    name: str
    distribution: str
    version: str
    status: PluginStatus
    reason: str = ""


@attrs.frozen(kw_only=True)
class Candidate:
    """A plugin that an installed distribution declares.

    Attributes:
        name: Entry-point name.
        distribution: Distribution name.
        version: Distribution version.
        entry_point: What to load; ``None`` when it cannot be.
        status: Status known before import; ``ACTIVE`` when nothing speaks against it.
        reason: Why it cannot be loaded.
    """

    name: str
    distribution: str
    version: str
    entry_point: importlib.metadata.EntryPoint | None = None
    status: PluginStatus = PluginStatus.ACTIVE
    reason: str = ""


def find_candidates() -> list[Candidate]:
    """List every declared plugin of any hook API.

    Returns:
        Candidates sorted by name, then distribution; those of another hook API carry the status
        ``incompatible``, those whose metadata cannot be read ``failed``.
    """
    found: list[Candidate] = []
    for distribution in importlib.metadata.distributions():
        try:
            text = distribution.read_text("entry_points.txt")
        except (OSError, UnicodeDecodeError):
            # Not readable, so nobody can tell that it is ours.
            continue
        if text and ENTRY_POINT_PREFIX in text:
            found.extend(_candidates(distribution))
    return sorted(found, key=lambda candidate: (candidate.name, candidate.distribution))


def _candidates(distribution: importlib.metadata.Distribution) -> Iterator[Candidate]:
    try:
        name, version = distribution.name, distribution.version
        if _is_shadowed(distribution):
            return
        declared = [
            point
            for point in distribution.entry_points
            if point.group.startswith(ENTRY_POINT_PREFIX)
        ]
    except Exception as exc:  # noqa: BLE001  damaged metadata of one distribution is its own failure
        folder = str(distribution.locate_file(""))
        yield Candidate(
            name="(unreadable)",
            distribution=folder,
            version="",
            status=PluginStatus.FAILED,
            reason=reason_of(exc),
        )
        return
    supported = {point.name for point in declared if point.group == ENTRY_POINT_GROUP}
    for point in declared:
        if point.group == ENTRY_POINT_GROUP:
            yield Candidate(name=point.name, distribution=name, version=version, entry_point=point)
        elif point.name not in supported:
            other = point.group.removeprefix(ENTRY_POINT_PREFIX)
            yield Candidate(
                name=point.name,
                distribution=name,
                version=version,
                status=PluginStatus.INCOMPATIBLE,
                reason=f"needs hook API {other}, this core has {HOOK_API}",
            )


def _is_shadowed(distribution: importlib.metadata.Distribution) -> bool:
    """Tell whether another installation of the same distribution comes first on the path."""
    first = importlib.metadata.distribution(distribution.name)
    return (first.locate_file(""), first.version) != (
        distribution.locate_file(""),
        distribution.version,
    )
