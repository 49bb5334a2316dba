"""Which plugin answers for a checkpoint: the only one that claims what its configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from engine_core.errors import PluginConflictError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.family import FamilyInfo
    from engine_core.plugin_claims import Claims, Plugin
    from engine_core.plugin_discovery import PluginReport

__all__ = ["Owner", "resolve_owner"]


@attrs.frozen(kw_only=True, eq=False)
class Owner:
    """The plugin that answers for a checkpoint, and as which of its families.

    Attributes:
        plugin: The plugin.
        family: The family.
    """

    plugin: Plugin
    family: FamilyInfo


def resolve_owner(
    claims: Claims,
    model_type: str | None,
    architectures: Sequence[str],
    family: str | None,
    *,
    inactive: Sequence[PluginReport],
) -> Owner:
    """Find the plugin that owns a checkpoint.

    Args:
        claims: Who claims what.
        model_type: As for ``Plugins.resolve_owner``.
        architectures: Likewise.
        family: Likewise.
        inactive: Plugins that claim nothing; the error names them, one may be what is missed.

    Returns:
        The owner.

    Raises:
        UnsupportedModelError: No active plugin owns it, or the chosen family does not claim it.
        PluginConflictError: More than one claims it.
    """
    if family is not None:
        kind, names, subject = "family", [family], "checkpoint: family"
    elif model_type is not None:
        kind, names, subject = "model_type", [model_type], "config.json: model_type"
    else:
        kind, names, subject = "architecture", list(architectures), "config.json: architectures"
    owners = _owners(claims, kind, names)
    if not owners:
        got = ", ".join(map(repr, names)) or "neither it nor model_type"
        raise _unsupported(subject, claims.names(kind), got, inactive)
    if family is not None:
        for owner in owners:
            _check_family_claim(owner.family, model_type, architectures)
    if len(owners) > 1:
        found = " and ".join(f"{owner.family.name!r} of {owner.plugin}" for owner in owners)
        raise PluginConflictError(
            f"config.json: architectures must mean one family, got {found}",
            hint="pass family= to choose",
        )
    return owners[0]


def _owners(claims: Claims, kind: str, names: Sequence[str]) -> list[Owner]:
    owners: list[Owner] = []
    for name in dict.fromkeys(names):
        plugin = claims.holder(kind, name)
        for family in plugin.contributions.families if plugin is not None else ():
            claimed = {
                "family": {family.name},
                "model_type": family.model_types,
                "architecture": family.architectures,
            }[kind]
            if name in claimed and all(owner.family is not family for owner in owners):
                owners.append(Owner(plugin=plugin, family=family))  # type: ignore[arg-type]
    return owners


def _unsupported(
    subject: str, known: Sequence[str], got: str, inactive: Sequence[PluginReport]
) -> UnsupportedModelError:
    choices = ", ".join(map(repr, known)) or "(no family plugin is active)"
    message = f"{subject} must be one of {choices}, got {got}"
    missed = "; ".join(
        f"{row.name} of {row.distribution} {row.status.value} ({row.reason})" for row in inactive
    )
    if missed:
        message = f"{message}; plugins not active: {missed}"
    return UnsupportedModelError(message, hint="install a plugin for this family")


def _check_family_claim(
    family: FamilyInfo, model_type: str | None, architectures: Sequence[str]
) -> None:
    """Refuse a chosen family that does not claim the checkpoint.

    A neighbouring architecture often has the same tensors, so it would load and compute
    something else: a sliding window, a cap or a multiplier that the family does not know.
    """
    if model_type is not None:
        kind, named, claimed = "model_type", [model_type], family.model_types
    else:
        kind, named, claimed = "architectures", list(architectures), family.architectures
    if not named or set(claimed) & set(named):
        return
    choices = ", ".join(map(repr, sorted(claimed))) or "(none)"
    raise UnsupportedModelError(
        f"config.json: {kind} must be one that family {family.name!r} claims ({choices}), "
        f"got {', '.join(map(repr, named))}",
        code="model.family_mismatch",
        hint="leave family= out; it only decides between plugins that claim the checkpoint",
    )
