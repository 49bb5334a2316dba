"""What compiled templates call for every operator, lookup, call and output.

Only plain data, namespaces, macros, loops, the methods of ``methods.METHODS`` and the globals of
the environment exist for a template. Each operation pays its budget before it runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from types import GeneratorType
from typing import Any, Final, NoReturn

import attrs
from jinja2 import Undefined
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext, Macro
from jinja2.utils import Namespace

from engine_core.errors import TemplateError
from engine_core.template.budget import (
    MAX_INTEGER_BITS,
    POINTER_BYTES,
    SCALARS,
    Budget,
    require_integer_size,
    text_bytes,
)
from engine_core.template.formatting import percent_format
from engine_core.template.methods import METHODS, Method, join_texts, require_key, spend_search

__all__ = ["BoundMethod", "Function", "Operations"]

MAX_CALL_DEPTH: Final = 150
MAX_SEQUENCE_ITEMS: Final = 2**31
_CALL_UNITS: Final = 12
_NUMBERS: Final = frozenset({int, float, bool})
_SEQUENCES: Final = frozenset({list, tuple})
_ITERABLES: Final = frozenset({list, tuple, dict, range, str, GeneratorType})
_PRINTABLE_SCALARS: Final = frozenset({int, float, bool, type(None)})
_LOOP_ATTRIBUTES: Final = frozenset(
    "index index0 revindex revindex0 first last length depth depth0 previtem nextitem".split()
)
_MACRO_ATTRIBUTES: Final = frozenset({"name", "arguments"})
_ARITHMETIC: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}
_COMPARISONS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}


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


def _refuse_operator(symbol: str, left: Any, right: Any) -> NoReturn:
    msg = f"operator {symbol!r} does not take a {type(left).__name__} and a {type(right).__name__}"
    raise TypeError(msg)


class Operations:
    """Charged operations of one render.

    Attributes:
        budget: Pays for everything.
    """

    budget: Budget
    _depth: int = 0

    def undefined(self, *args: Any, **kwargs: Any) -> Undefined:
        """Make an undefined value, as the environment spells it."""
        return Undefined(*args, **kwargs)

    # Arithmetic.

    def binary(self, symbol: str, left: Any, right: Any) -> Any:
        """Apply an arithmetic operator.

        Args:
            symbol: ``+ - * / // % **``.
            left: Left operand.
            right: Right operand.

        Returns:
            The result.

        Raises:
            TemplateError: The result would be too large.
            TypeError: The operands are of no use to the operator.
        """
        left_type, right_type = type(left), type(right)
        if left_type is str and right_type is str and symbol == "+":
            self.budget.spend_text(left, right)
            return left + right
        if left_type in _NUMBERS and right_type in _NUMBERS:
            return self._number(symbol, left, right)
        if symbol == "%" and left_type is str:
            return percent_format(self.budget, left, right)
        if symbol == "+" and left_type is right_type and left_type in _SEQUENCES:
            self.budget.spend_items(len(left) + len(right))
            return left + right
        if symbol == "*":
            if left_type in (int, bool):
                left, right = right, left
                left_type, right_type = right_type, left_type
            if right_type in (int, bool) and (left_type is str or left_type in _SEQUENCES):
                return self._repeat(left, int(right))
        if isinstance(left, Undefined) or isinstance(right, Undefined):
            self.budget.spend(1)
            return _ARITHMETIC[symbol](left, right)
        return _refuse_operator(symbol, left, right)

    def _repeat(self, value: Any, count: int) -> Any:
        size = text_bytes(value) if type(value) is str else POINTER_BYTES * len(value)
        total = size * max(0, count)
        if total > MAX_SEQUENCE_ITEMS:
            self.budget.spend(total)
        self.budget.spend_bytes(total if type(value) is str else 4 * total)
        return value * count

    def _number(self, symbol: str, left: Any, right: Any) -> Any:
        self.budget.spend(1)
        if symbol == "**" and type(left) is not float and type(right) is not float:
            bits = int(left).bit_length()
            if bits > 1 and abs(int(right)) * (bits - 1) > MAX_INTEGER_BITS:
                raise TemplateError(
                    f"chat template: an integer must fit {MAX_INTEGER_BITS} bits, "
                    f"got a power of {bits} bits",
                    code="template.budget",
                )
        require_integer_size(left)
        require_integer_size(right)
        result = _ARITHMETIC[symbol](left, right)
        if type(result) not in _NUMBERS:
            msg = f"the result of {symbol!r} must be a real number"
            raise ArithmeticError(msg)
        require_integer_size(result)
        return result

    def unary(self, symbol: str, value: Any) -> Any:
        """Apply ``+`` or ``-``.

        Args:
            symbol: The operator.
            value: Operand.

        Returns:
            The result.

        Raises:
            TypeError: The operand is no number.
        """
        self.budget.spend(1)
        if type(value) not in _NUMBERS and not isinstance(value, Undefined):
            msg = f"operator {symbol!r} does not take a {type(value).__name__}"
            raise TypeError(msg)
        return -value if symbol == "-" else +value

    # Comparison, text, iteration.

    def compare(self, left: Any, *steps: Any) -> bool:
        """Compare a chain such as ``a < b < c``.

        Args:
            left: First operand.
            steps: Operator name and operand, in turn.

        Returns:
            Whether every step holds.
        """
        for position in range(0, len(steps), 2):
            name, right = steps[position], steps[position + 1]
            self._pay_comparison(name, left, right)
            if not _COMPARISONS[name](left, right):
                return False
            left = right
        return True

    def _pay_comparison(self, name: str, left: Any, right: Any) -> None:
        left_type, right_type = type(left), type(right)
        if left_type in SCALARS and right_type in SCALARS:
            if left_type is not str or right_type is not str:
                self.budget.spend(1)
            elif name in ("in", "notin"):
                spend_search(self.budget, right, left)
            else:
                self.budget.spend_bytes(min(len(left), len(right)))
            return
        if name in ("in", "notin"):
            if right_type is dict:
                require_key(left)
                self.budget.spend(1)
                return
            if right_type not in _ITERABLES and not isinstance(right, Undefined):
                _refuse_operator("in", left, right)
        weight = self.budget.weigh(left)
        self.budget.weigh(right)
        if name in ("in", "notin") and right_type in _SEQUENCES and weight.nodes > 1:
            # Each item may be compared with the whole left side.
            self.budget.spend(weight.nodes * len(right))

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
            return str(value)
        if kind in _PRINTABLE_SCALARS:
            self.budget.spend(1)
            require_integer_size(value)
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
        if type(value) not in _ITERABLES and not isinstance(value, Undefined):
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
        self.budget.spend(1)
        kind = type(owner)
        found = METHODS.get(kind, {}).get(name)
        if found is not None:
            return BoundMethod(owner, found)
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
            # An undefined value answers every attribute with its own error.
            return getattr(owner, "missing_attribute")  # noqa: B009
        if name.startswith("__"):
            msg = f"access to attribute {name[:60]!r} is not allowed"
            raise SecurityError(msg)
        return self.undefined(obj=owner, name=name)

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
        self.budget.spend(1)
        kind = type(owner)
        if kind is dict:
            if require_key(key) in owner:
                return owner[key]
        elif type(key) in (int, bool):
            if kind in _SEQUENCES or kind is str or kind is range:
                return (
                    owner[key]
                    if -len(owner) <= key < len(owner)
                    else self.undefined(obj=owner, name=key)
                )
        if isinstance(owner, Undefined) or type(key) is str:
            return self.attribute(owner, key if type(key) is str else "")
        return self.undefined(obj=owner, name=key)

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
        if type(owner) in _SEQUENCES or type(owner) is range:
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
    budget.weigh(loop._last_changed_value)  # noqa: SLF001 - compared with values in C
    return loop.changed(*values)
