"""Plugins: loading with isolation, and a typed facade with one method a hook.

A ``Plugins`` object is explicit, there is no global one. A plugin that cannot be loaded or gives
unusable contributions becomes a ``failed`` row of the report and leaves the others untouched.
Nothing is printed or logged.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import pluggy

from engine_core import hookspecs
from engine_core.errors import EngineError, PluginError
from engine_core.family import Architecture, FamilyInfo, MediaPlan, MtpPlan, NormFold
from engine_core.markers import PROJECT
from engine_core.plugin_claims import (
    Claims,
    Plugin,
    check_family_name,
    check_implementation,
    read_contributions,
)
from engine_core.plugin_discovery import (
    Candidate,
    PluginReport,
    PluginStatus,
    find_candidates,
)
from engine_core.plugin_owner import Owner, resolve_owner
from engine_core.values import reason_of
from engine_core.weight_plan import WeightPlan

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from engine_core.checkpoint.config import CheckpointConfig
    from engine_core.family import TemplateDialect, TensorInfo, ToolSyntax

__all__ = ["Owner", "Plugin", "PluginReport", "PluginStatus", "Plugins"]

_BUILTIN = "engine_core.builtin"
_Answer = TypeVar("_Answer")
_Named = TypeVar("_Named", bound="TemplateDialect | ToolSyntax")


class Plugins:
    """The plugins of one engine: what is active, who owns what, and the hooks as methods."""

    def __init__(self) -> None:
        """Make an object with no plugin at all; :meth:`load` is the usual way."""
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._active: list[Plugin] = []
        self._claims = Claims()
        self._rows: list[tuple[PluginReport, Plugin | None]] = []

    @classmethod
    def load(
        cls, *, block: AbstractSet[str] = frozenset(), extra: Iterable[object] = ()
    ) -> Plugins:
        """Find, import and check all installed plugins.

        Args:
            block: Names of plugins to leave out, unimported.
            extra: Further plugin objects (modules) that no distribution declares.

        Returns:
            The plugins; what went wrong with which one stands in :attr:`reports`.
        """
        plugins = cls()
        version = _core_version()
        candidates = [
            Candidate(name="builtin", distribution="engine-core", version=version),
            *find_candidates(),
        ]
        for candidate in candidates:
            plugins._admit(candidate, block)
        for implementation in extra:
            name = str(getattr(implementation, "__name__", type(implementation).__name__))
            candidate = Candidate(name=name, distribution="(extra)", version="")
            plugins._admit(candidate, block, implementation)
        return plugins

    @property
    def reports(self) -> tuple[PluginReport, ...]:
        """One row a plugin, in loading order; an active one tells its conflicts."""
        return tuple(
            row if plugin is None else attrs.evolve(row, reason=self._claims.conflicts_of(plugin))
            for row, plugin in self._rows
        )

    @property
    def owners(self) -> tuple[Owner, ...]:
        """Every family of every active plugin, in loading order."""
        return tuple(
            Owner(plugin=plugin, family=family)
            for plugin in self._active
            for family in plugin.contributions.families
        )

    # Loading.

    def _admit(
        self, candidate: Candidate, block: AbstractSet[str], implementation: object = None
    ) -> None:
        """Turn a candidate into an active plugin, or into a row that says why not."""
        status, reason = candidate.status, candidate.reason
        plugin = None
        if candidate.name in block:
            status, reason = PluginStatus.BLOCKED, "blocked by the caller"
        if status is PluginStatus.ACTIVE:
            try:
                plugin = self._activate(candidate, implementation)
            except KeyboardInterrupt:
                raise
            # A plugin may fail in any way, also by SystemExit, without ending the host.
            except BaseException as exc:  # noqa: BLE001
                status, reason = PluginStatus.FAILED, reason_of(exc)
        row = PluginReport(
            name=candidate.name,
            distribution=candidate.distribution,
            version=candidate.version,
            status=status,
            reason=reason,
        )
        self._rows.append((row, plugin))

    def _activate(self, candidate: Candidate, implementation: object) -> Plugin:
        if implementation is None:
            point = candidate.entry_point
            implementation = import_module(_BUILTIN) if point is None else point.load()
        check_implementation(implementation)
        if any(plugin.implementation is implementation for plugin in self._active):
            raise PluginError("plugin object: must be loaded once, got it again")
        # Names need not be unique: two distributions may bring one, which is a conflict, no crash.
        name = f"{candidate.distribution}:{candidate.name}:{len(self._rows)}"
        self._manager.register(implementation, name)
        try:
            contributions = read_contributions(lambda hook: self._ask(implementation, hook))
            if candidate.entry_point is not None:
                check_family_name(contributions, candidate.name)
        except BaseException:
            self._manager.unregister(name=name)
            raise
        plugin = Plugin(
            name=candidate.name,
            distribution=candidate.distribution,
            version=candidate.version,
            implementation=implementation,
            contributions=contributions,
        )
        self._active.append(plugin)
        self._claims.add(plugin)
        return plugin

    # Ownership.

    def resolve_owner(
        self,
        model_type: str | None,
        architectures: Sequence[str] = (),
        family: str | None = None,
    ) -> Owner:
        """Find the plugin that owns a checkpoint.

        Args:
            model_type: ``model_type`` of ``config.json``, ``None`` when absent.
            architectures: ``architectures`` of ``config.json``, looked at only without a
                ``model_type``.
            family: Family name chosen by the caller, which decides between several that claim the
                checkpoint; a checkpoint that names neither type nor architecture is any family's.

        Returns:
            The owner.

        Raises:
            UnsupportedModelError: No active plugin owns it, or the chosen family does not claim
                it (code ``model.family_mismatch``).
            PluginConflictError: More than one claims it.
        """
        inactive = [row for row, _ in self._rows if row.status is not PluginStatus.ACTIVE]
        return resolve_owner(self._claims, model_type, architectures, family, inactive=inactive)

    # Contributions: asked once, at loading.

    def families(self) -> tuple[FamilyInfo, ...]:
        """Give the families of all active plugins, in loading order."""
        return tuple(owner.family for owner in self.owners)

    def template_dialects(self, owner: Owner | None = None) -> tuple[TemplateDialect, ...]:
        """Give the template dialects.

        Args:
            owner: Whose preferences decide the order; loading order without.

        Returns:
            The owner's preferred dialects first (those that exist), then all others whose name
            is claimed once.

        Raises:
            PluginConflictError: A preferred name is claimed twice.
        """
        dialects = [item for plugin in self._active for item in plugin.contributions.dialects]
        preferred = owner.family.dialects if owner is not None else ()
        return self._ordered("template dialect", dialects, preferred)

    def tool_syntaxes(self, owner: Owner | None = None) -> tuple[ToolSyntax, ...]:
        """Give the tool syntaxes.

        Args:
            owner: Whose preferences decide the order; loading order without.

        Returns:
            The owner's preferred syntaxes first (those that exist), then all others whose name
            is claimed once.

        Raises:
            PluginConflictError: A preferred name is claimed twice.
        """
        syntaxes = [item for plugin in self._active for item in plugin.contributions.syntaxes]
        preferred = owner.family.tool_syntaxes if owner is not None else ()
        return self._ordered("tool syntax", syntaxes, preferred)

    def _ordered(
        self, kind: str, items: list[_Named], preferred: Sequence[str]
    ) -> tuple[_Named, ...]:
        for name in preferred:
            self._claims.holder(kind, name)
        by_name = {item.name: item for item in items}
        once = [item for item in items if sum(other.name == item.name for other in items) == 1]
        first = [by_name[name] for name in dict.fromkeys(preferred) if name in by_name]
        return (*first, *(item for item in once if item.name not in preferred))

    # Questions: asked of the owner alone, once a load.

    def weight_plan(
        self, owner: Owner, config: CheckpointConfig, tensors: Mapping[str, TensorInfo]
    ) -> WeightPlan:
        """Ask ``engine_weight_plan``; see there for what is asked and when."""
        return self._required(owner, "engine_weight_plan", WeightPlan, config, tensors)

    def norm_fold(
        self, owner: Owner, config: CheckpointConfig, tensors: Mapping[str, TensorInfo]
    ) -> NormFold | None:
        """Ask ``engine_norm_fold``; see there for what is asked and when."""
        return self._question(owner, "engine_norm_fold", NormFold, config, tensors)

    def architecture(
        self, owner: Owner, config: CheckpointConfig, tensors: Mapping[str, TensorInfo]
    ) -> Architecture:
        """Ask ``engine_architecture``; see there for what is asked and when."""
        return self._required(owner, "engine_architecture", Architecture, config, tensors)

    def mtp(
        self, owner: Owner, config: CheckpointConfig, tensors: Mapping[str, TensorInfo]
    ) -> MtpPlan | None:
        """Ask ``engine_mtp``; see there for what is asked and when."""
        return self._question(owner, "engine_mtp", MtpPlan, config, tensors)

    def media(
        self,
        owner: Owner,
        config: CheckpointConfig,
        tensors: Mapping[str, TensorInfo],
        processor: CheckpointConfig,
    ) -> MediaPlan | None:
        """Ask ``engine_media``; see there for what is asked and when."""
        return self._question(
            owner, "engine_media", MediaPlan, config, tensors, processor=processor
        )

    def _required(
        self,
        owner: Owner,
        hook: str,
        kind: type[_Answer],
        config: CheckpointConfig,
        tensors: Mapping[str, TensorInfo],
    ) -> _Answer:
        answer = self._question(owner, hook, kind, config, tensors)
        if answer is None:
            raise PluginError(
                f"plugin {owner.plugin}: {hook} must give a {kind.__name__}, got None",
                code="plugin.answer",
                hint="the plugin does not implement the hook, or declines this checkpoint",
            )
        return answer

    def _question(
        self,
        owner: Owner,
        hook: str,
        kind: type[_Answer],
        config: CheckpointConfig,
        tensors: Mapping[str, TensorInfo],
        **more: object,
    ) -> _Answer | None:
        arguments = {"family": owner.family.name, "config": config, "tensors": tensors, **more}
        try:
            answer = self._ask(owner.plugin.implementation, hook, **arguments)
        except EngineError as exc:
            exc.add_note(f"raised by plugin {owner.plugin} in {hook}")
            raise
        except KeyboardInterrupt:
            raise
        # A plugin may fail in any way without ending the host.
        except BaseException as exc:
            raise PluginError(
                f"plugin {owner.plugin}: {hook} must not fail, got {reason_of(exc)}",
                code="plugin.hook_failed",
                hint="report this to the plugin's author",
            ) from exc
        if answer is not None and not isinstance(answer, kind):
            raise PluginError(
                f"plugin {owner.plugin}: {hook} must give a {kind.__name__} or None, "
                f"got {type(answer).__name__}",
                code="plugin.answer",
                hint="report this to the plugin's author",
            )
        return answer

    def _ask(self, implementation: object, hook: str, **arguments: object) -> Any:
        """Call a hook of one plugin only: no plugin can answer for another."""
        others = [one for one in self._manager.get_plugins() if one is not implementation]
        return self._manager.subset_hook_caller(hook, others)(**arguments)


def _core_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("engine-core")
    except PackageNotFoundError:
        # Run from a source tree that nobody installed.
        return ""
