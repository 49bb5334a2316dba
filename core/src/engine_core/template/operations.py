"""What compiled templates call for every operator, lookup, call and output.

Only plain data, namespaces, macros, loops, the methods of ``methods.METHODS`` and the globals of
the environment exist for a template. Each operation pays its budget before it runs.
"""

from __future__ import annotations

from types import GeneratorType
from typing import TYPE_CHECKING, Any, Final

import attrs
from jinja2 import Undefined
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext, Macro
from jinja2.utils import Namespace

from engine_core.errors import TemplateError
from engine_core.template.arithmetic import ITERABLES, SEQUENCES, Arithmetic
from engine_core.template.budget import (
    Budget,
    require_integer_size,
)
from engine_core.template.methods import METHODS, Method, join_texts, require_key

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BoundMethod", "Function", "Operations"]

MAX_CALL_DEPTH: Final = 150
_CALL_UNITS: Final = 12
_UNDEFINED_UNITS: Final = 4
_PRINTABLE_SCALARS: Final = frozenset({int, float, bool, type(None)})
_LOOP_ATTRIBUTES: Final = frozenset(
    {
        *("index", "index0", "revindex", "revindex0", "first", "last", "length"),
        *("depth", "depth0", "previtem", "nextitem"),
    }
)
_INDEXES: Final = frozenset({int, bool})
_INDEXED: Final = frozenset({list, tuple, str, range})
_MACRO_ATTRIBUTES: Final = frozenset({"name", "arguments"})


@attrs.frozen(eq=False)
class BoundMethod:
    """A method looked up on a value, not called yet.

    Attributes:
        owner: The value.
        function: ``f(budget, owner, *args, **kwargs)``.
    """

    owner: Any
    function: Method


@attrs.frozen(eq=False)
class Function:
    """A global function of the environment; nothing else from outside can be called.

    Attributes:
        function: ``f(*args, **kwargs)``.
    """

    function: Callable[..., Any]


class Operations(Arithmetic):
    """Charged operations of one render.

    Attributes:
        budget: Pays for everything.
    """

    budget: Budget
    _depth: int = 0

    def missing(self, owner: Any, name: Any) -> Undefined:
        """Make the undefined value that a failed lookup gives.

        Args:
            owner: What was searched.
            name: What was looked for.

        Returns:
            A value that raises as soon as it is used for more than a test.
        """
        self.budget.spend(_UNDEFINED_UNITS)
        return Undefined(obj=owner, name=name)

    # Text, iteration.

    def text(self, value: Any) -> str:
        """Turn a value into the text that output shows.

        Args:
            value: Any value.

        Returns:
            Its text.

        Raises:
            TypeError: The value is no plain data.
        """
        kind = type(value)
        if kind is str:
            self.budget.spend_text(value)
            return value  # type: ignore[no-any-return]
        if kind in _PRINTABLE_SCALARS:
            if kind is int:
                require_integer_size(value)
                self.budget.spend_integers(value, value)
            return str(value)
        if isinstance(value, Undefined):
            return str(value)
        if kind is range:
            self.budget.spend(1)
            return str(value)
        weight = self.budget.weigh(value, plain=True)
        self.budget.spend_bytes(weight.characters)
        return str(value)

    def join_text(self, values: tuple[Any, ...]) -> str:
        """Concatenate with ``~``.

        Args:
            values: Operands.

        Returns:
            Their texts in a row.
        """
        return join_texts(self.budget, "", [self.text(value) for value in values])

    def iterate(self, value: Any) -> Any:
        """Check that a ``for`` loop may run over a value; the loop pays per round.

        Args:
            value: Any value.

        Returns:
            The same value.

        Raises:
            TypeError: The value cannot be iterated.
        """
        if type(value) not in ITERABLES and not isinstance(value, Undefined):
            msg = f"a {type(value).__name__} cannot be iterated"
            raise TypeError(msg)
        return value

    def listed(self, value: Any) -> list[Any]:
        """Copy an iterable into a list.

        Args:
            value: Any iterable value.

        Returns:
            A new list.
        """
        value = self.iterate(value)
        if type(value) is GeneratorType:
            return list(value)
        self.budget.spend_items(len(value) * (3 if type(value) in (str, range) else 1))
        return list(value)

    def spread(self, value: Any) -> Any:
        """Check and pay for ``*value`` in a call.

        Args:
            value: What is spread.

        Returns:
            Its items.
        """
        return self.listed(value)

    def spread_mapping(self, value: Any) -> Any:
        """Check and pay for ``**value`` in a call.

        Args:
            value: What is spread.

        Returns:
            The same mapping.

        Raises:
            TypeError: The value is no mapping.
        """
        if type(value) is not dict:
            msg = f"only a mapping can be spread by name, got a {type(value).__name__}"
            raise TypeError(msg)
        self.budget.spend_items(4 * len(value))
        return value

    # Lookup.

    def key(self, value: Any) -> Any:
        """Check a key of a mapping literal.

        Args:
            value: The key.

        Returns:
            The same key.
        """
        return require_key(value)

    def attribute(self, owner: Any, name: str) -> Any:
        """Look ``owner.name`` up: a method first, then an item.

        Args:
            owner: Any value.
            name: Attribute name.

        Returns:
            The value, a method, or an undefined value.

        Raises:
            SecurityError: The name is an internal one.
        """
        kind = type(owner)
        methods = METHODS.get(kind)
        if methods is not None and name in methods:
            return BoundMethod(owner, methods[name])
        if kind is dict:
            if name in owner:
                return owner[name]
        elif kind is Namespace:
            if not name.startswith("_") and hasattr(owner, name):
                return getattr(owner, name)
        elif kind is LoopContext:
            return self._loop_attribute(owner, name)
        elif kind is Macro and name in _MACRO_ATTRIBUTES:
            return getattr(owner, name)
        elif isinstance(owner, Undefined):
            return owner.any_attribute  # raises the value's own error
        if name.startswith("__"):
            msg = f"access to attribute {name[:60]!r} is not allowed"
            raise SecurityError(msg)
        return self.missing(owner, name)

    def _loop_attribute(self, loop: LoopContext, name: str) -> Any:
        if name in _LOOP_ATTRIBUTES:
            return getattr(loop, name)
        if name == "cycle":
            return Function(loop.cycle)
        if name == "changed":
            return BoundMethod(loop, _loop_changed)
        msg = f"a loop has no attribute {name[:60]!r}"
        raise SecurityError(msg)

    def item(self, owner: Any, key: Any) -> Any:
        """Look ``owner[key]`` up: an item first, then a method.

        Args:
            owner: Any value.
            key: Index or key.

        Returns:
            The value, a method, or an undefined value.
        """
        kind = type(owner)
        if kind is dict:
            if require_key(key) in owner:
                return owner[key]
        elif type(key) in _INDEXES and kind in _INDEXED:
            if -len(owner) <= key < len(owner):
                return owner[key]
            return self.missing(owner, key)
        if isinstance(owner, Undefined) or type(key) is str:
            return self.attribute(owner, key if type(key) is str else "")
        return self.missing(owner, key)

    def slice(self, owner: Any, start: Any, stop: Any, step: Any) -> Any:
        """Take ``owner[start:stop:step]``.

        Args:
            owner: Text or sequence.
            start: First position or ``None``.
            stop: End position or ``None``.
            step: Step or ``None``.

        Returns:
            The part.

        Raises:
            TypeError: The value cannot be sliced.
        """
        bounds = slice(start, stop, step)
        if isinstance(owner, Undefined):
            return owner[bounds]
        if type(owner) is str:
            count = len(range(*bounds.indices(len(owner))))
            self.budget.spend_bytes(count * (1 if owner.isascii() else 4))
            return owner[bounds]
        if type(owner) in SEQUENCES or type(owner) is range:
            self.budget.spend_items(len(range(*bounds.indices(len(owner)))))
            return owner[bounds]
        msg = f"a {type(owner).__name__} cannot be sliced"
        raise TypeError(msg)

    # Calls.

    def invoke(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method, a macro, a recursive loop or a global function.

        Args:
            target: What is called.
            args: Positional arguments.
            kwargs: Named arguments.

        Returns:
            The result.

        Raises:
            SecurityError: The target may not be called.
            TemplateError: Calls nest too deep.
        """
        self.budget.spend(_CALL_UNITS + len(args) + len(kwargs))
        kind = type(target)
        if kind is BoundMethod:
            return target.function(self.budget, target.owner, *args, **kwargs)
        if kind is Function:
            return target.function(*args, **kwargs)
        if kind is Macro or kind is LoopContext:
            if kind is LoopContext:
                args = tuple(map(self.iterate, args))
            self._depth += 1
            if self._depth > MAX_CALL_DEPTH:
                raise TemplateError(
                    f"chat template: calls must nest at most {MAX_CALL_DEPTH} deep, got more",
                    code="template.nesting",
                )
            result = target(*args, **kwargs)
            self._depth -= 1
            self.budget.spend_text(result)
            return result
        if isinstance(target, Undefined):
            return target(*args, **kwargs)
        msg = f"a {kind.__name__} cannot be called"
        raise SecurityError(msg)


def _loop_changed(budget: Budget, loop: LoopContext, *values: Any) -> bool:
    budget.weigh(list(values))
    budget.weigh(loop._last_changed_value)  # noqa: SLF001 - compared with them in C
    return loop.changed(*values)
