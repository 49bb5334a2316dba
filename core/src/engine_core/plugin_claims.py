"""What one plugin contributes, checked, and who claims which name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import attrs

from engine_core import hookspecs
from engine_core.errors import PluginConflictError, PluginError
from engine_core.family import FamilyInfo, TemplateDialect
from engine_core.markers import PROJECT

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine_core.family import ToolSyntax

__all__ = [
    "Claims",
    "Contributions",
    "Plugin",
    "check_family_name",
    "check_implementation",
    "read_contributions",
]

_HOOKS = sorted(name for name in vars(hookspecs) if name.startswith("engine_"))


@attrs.frozen(kw_only=True)
class Contributions:
    """The checked answers to the three contribution hooks.

    Attributes:
        families: Family records.
        dialects: Template dialects.
        syntaxes: Tool syntaxes.
    """

    families: tuple[FamilyInfo, ...] = ()
    dialects: tuple[TemplateDialect, ...] = ()
    syntaxes: tuple[ToolSyntax, ...] = ()


@attrs.frozen(kw_only=True, eq=False)
class Plugin:
    """An active plugin.

    Attributes:
        name: Entry-point name.
        distribution: Distribution name.
        version: Distribution version.
        implementation: The object that carries the hook functions.
        contributions: What it contributes.
    """

    name: str
    distribution: str
    version: str
    implementation: object
    contributions: Contributions = Contributions()

    def __str__(self) -> str:
        """Name the plugin and who brought it, for errors."""
        return f"{self.name} ({self.distribution} {self.version})".replace(" )", ")")


def check_implementation(implementation: object) -> None:
    """Refuse a plugin object that cannot be registered, or whose hooks would never be called.

    Args:
        implementation: The object that carries the hook functions.

    Raises:
        PluginError: It is not hashable, marks a function that is no hook (a misspelt name), or
            has a hook function without the marker.
    """
    if type(implementation).__hash__ is None:
        name = type(implementation).__name__
        raise PluginError(f"plugin object: must be hashable (use a module), got {name}")
    for name in dir(implementation):
        function = inspect.getattr_static(implementation, name, None)
        function = getattr(function, "__func__", function)
        options = getattr(function, f"{PROJECT}_impl", None)
        if isinstance(options, dict):
            hook = options.get("specname") or name
            if hook not in _HOOKS:
                raise PluginError(f"hook: must be one of {', '.join(_HOOKS)}, got {hook!r}")
        elif name in _HOOKS and inspect.isfunction(function):
            raise PluginError(f"{name}: must be marked with @hookimpl, got a plain function")


def check_family_name(contributions: Contributions, name: str) -> None:
    """Require that the entry point is named as a family that it brings.

    Args:
        contributions: What the plugin contributes.
        name: Entry-point name.

    Raises:
        PluginError: It brings families, none of that name.
    """
    families = [family.name for family in contributions.families]
    if families and name not in families:
        got = ", ".join(map(repr, families))
        raise PluginError(f"engine_families: must name the entry point's {name!r}, got {got}")


def read_contributions(ask: Callable[[str], list[Any]]) -> Contributions:
    """Ask one plugin for its contributions and check them.

    Args:
        ask: Calls a hook of that plugin alone and gives the answers of its implementations.

    Returns:
        The contributions.

    Raises:
        PluginError: An answer has the wrong type or claims a name twice.
    """
    contributions = Contributions(
        families=tuple(_items(ask, "engine_families", _check_family)),
        dialects=tuple(_items(ask, "engine_template_dialects", _check_dialect)),
        syntaxes=tuple(_items(ask, "engine_tool_syntaxes", _check_syntax)),
    )
    for kind, names in _claimed(contributions).items():
        for name in names:
            if names.count(name) > 1:
                raise PluginError(f"{kind}: a plugin may claim a name once, got {name!r} twice")
    return contributions


def _items(
    ask: Callable[[str], list[Any]], hook: str, check: Callable[[str, Any], None]
) -> Iterable[Any]:
    for answer in ask(hook):
        if isinstance(answer, (str, bytes)) or not isinstance(answer, Iterable):
            raise PluginError(f"{hook}: must return an iterable, got {type(answer).__name__}")
        for item in answer:
            check(hook, item)
            yield item


def _require(hook: str, rule: str, value: object, *, met: bool) -> None:
    if not met:
        raise PluginError(f"{hook}: {rule}, got {type(value).__name__}")


def _are_names(values: object) -> bool:
    return isinstance(values, (tuple, frozenset)) and all(
        isinstance(value, str) and value for value in values
    )


def _check_family(hook: str, item: Any) -> None:
    _require(hook, "must give FamilyInfo records", item, met=isinstance(item, FamilyInfo))
    for field in ("model_types", "architectures", "dialects", "tool_syntaxes"):
        values = getattr(item, field)
        _require(hook, f"{field} must be non-empty strings", values, met=_are_names(values))


def _check_dialect(hook: str, item: Any) -> None:
    _require(hook, "must give TemplateDialect records", item, met=isinstance(item, TemplateDialect))
    _require(hook, "prepare must be callable", item.prepare, met=callable(item.prepare))


def _check_syntax(hook: str, item: Any) -> None:
    rule = "a tool syntax must have a non-empty name"
    _require(hook, rule, item, met=isinstance(item.name, str) and bool(item.name))
    markers = item.markers
    pairs = isinstance(markers, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 and _are_names(pair) for pair in markers
    )
    _require(hook, "markers must be pairs of non-empty strings", markers, met=pairs)
    rounds = item.probe_rounds
    met = not isinstance(rounds, bool) and rounds in (1, 2)
    _require(hook, "probe_rounds must be 1 or 2", rounds, met=met)
    _require(hook, "parse must be callable", item.parse, met=callable(item.parse))


def _claimed(contributions: Contributions) -> dict[str, list[str]]:
    families = contributions.families
    return {
        "family": [info.name for info in families],
        "model_type": [name for info in families for name in sorted(info.model_types)],
        "architecture": [name for info in families for name in sorted(info.architectures)],
        "template dialect": [dialect.name for dialect in contributions.dialects],
        "tool syntax": [syntax.name for syntax in contributions.syntaxes],
    }


@attrs.define
class Claims:
    """Who claims which name of which kind; a name claimed twice belongs to nobody."""

    _claimants: dict[tuple[str, str], list[Plugin]] = attrs.field(factory=dict)

    def add(self, plugin: Plugin) -> None:
        """Record all names that a plugin claims.

        Args:
            plugin: An active plugin.
        """
        for kind, names in _claimed(plugin.contributions).items():
            for name in names:
                self._claimants.setdefault((kind, name), []).append(plugin)

    def holder(self, kind: str, name: str) -> Plugin | None:
        """Find the only plugin that claims a name.

        Args:
            kind: ``"family"``, ``"model_type"``, ``"architecture"``, ``"template dialect"`` or
                ``"tool syntax"``.
            name: The name.

        Returns:
            The plugin, ``None`` when nobody claims the name.

        Raises:
            PluginConflictError: More than one plugin claims it.
        """
        claimants = self._claimants.get((kind, name), [])
        if len(claimants) > 1:
            hint = "leave one out with block=, or uninstall it"
            if kind in ("model_type", "architecture"):
                hint = f"pass family= to choose, or {hint}"
            raise PluginConflictError(
                f"{kind} {name!r}: must be claimed by one plugin, got "
                + " and ".join(str(plugin) for plugin in claimants),
                hint=hint,
            )
        return claimants[0] if claimants else None

    def names(self, kind: str) -> list[str]:
        """List the claimed names of one kind.

        Args:
            kind: As for ``holder``.

        Returns:
            Names in order.
        """
        return sorted(name for claimed, name in self._claimants if claimed == kind)

    def conflicts_of(self, plugin: Plugin) -> str:
        """Describe what a plugin shares with others.

        Args:
            plugin: An active plugin.

        Returns:
            One line, empty when nothing is shared.
        """
        shared = [
            f"{kind} {name!r} is also claimed by "
            + " and ".join(str(other) for other in claimants if other is not plugin)
            for (kind, name), claimants in self._claimants.items()
            if plugin in claimants and len(claimants) > 1
        ]
        return "; ".join(shared)
