"""Operators of chat templates: arithmetic and comparison, paid for before they run."""

from __future__ import annotations

import operator
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from jinja2 import Undefined

from engine_core.errors import TemplateError
from engine_core.template.budget import (
    BYTES_PER_UNIT_SHIFT,
    MAX_INTEGER_BITS,
    POINTER_BYTES,
    SCALARS,
    Budget,
    require_integer_size,
    text_bytes,
)
from engine_core.template.formatting import percent_format
from engine_core.template.methods import require_key, spend_search

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["ITERABLES", "NUMBERS", "SEQUENCES", "Arithmetic"]

MAX_SEQUENCE_BYTES: Final = 2**31
NUMBERS: Final = frozenset({int, float, bool})
SEQUENCES: Final = frozenset({list, tuple})
ITERABLES: Final = frozenset({list, tuple, dict, range, str, GeneratorType})
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


def _refuse_operator(symbol: str, left: Any, right: Any) -> NoReturn:
    msg = f"operator {symbol!r} does not take a {type(left).__name__} and a {type(right).__name__}"
    raise TypeError(msg)


class Arithmetic:
    """Charged operators.

    Attributes:
        budget: Pays for everything.
    """

    budget: Budget

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
        if left_type in NUMBERS and right_type in NUMBERS:
            return self._number(symbol, left, right)
        if symbol == "%" and left_type is str:
            return percent_format(self.budget, left, right)
        if symbol == "+" and left_type is right_type and left_type in SEQUENCES:
            self.budget.spend_items(len(left) + len(right))
            return left + right
        if symbol == "*":
            if left_type in (int, bool):
                left, right = right, left
                left_type, right_type = right_type, left_type
            if right_type in (int, bool) and (left_type is str or left_type in SEQUENCES):
                return self._repeat(left, int(right))
        if isinstance(left, Undefined) or isinstance(right, Undefined):
            self.budget.spend(1)
            return _ARITHMETIC[symbol](left, right)
        return _refuse_operator(symbol, left, right)

    def _repeat(self, value: Any, count: int) -> Any:
        size = text_bytes(value) if type(value) is str else POINTER_BYTES * len(value)
        total = size * max(0, count)
        if total > MAX_SEQUENCE_BYTES:
            self.budget.spend(total)
        self.budget.spend_bytes(total if type(value) is str else 4 * total)
        return value * count

    def _number(self, symbol: str, left: Any, right: Any) -> Any:
        if type(left) is int and type(right) is int:
            require_integer_size(left)
            require_integer_size(right)
            self.budget.spend_integers(left, right)
        if symbol == "**" and type(left) is not float and type(right) is not float:
            bits = int(left).bit_length()
            if bits > 1 and abs(int(right)) * (bits - 1) > MAX_INTEGER_BITS:
                raise TemplateError(
                    f"chat template: an integer must fit {MAX_INTEGER_BITS} bits, "
                    f"got a power of {bits} bits",
                    code="template.budget",
                )
        result = _ARITHMETIC[symbol](left, right)
        if type(result) not in NUMBERS:
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
        if type(value) not in NUMBERS and not isinstance(value, Undefined):
            msg = f"operator {symbol!r} does not take a {type(value).__name__}"
            raise TypeError(msg)
        return -value if symbol == "-" else +value

    def compare(self, left: Any, name: str, right: Any) -> bool:
        """Compare two values.

        Args:
            left: First operand.
            name: Jinja's name of the operator.
            right: Second operand.

        Returns:
            Whether the comparison holds.
        """
        self._pay_comparison(name, left, right)
        return _COMPARISONS[name](left, right)

    def compare_chain(self, left: Any, *steps: Any) -> bool:
        """Compare a chain such as ``a < b < c``.

        Args:
            left: First operand.
            steps: Operator name and operand, in turn.

        Returns:
            Whether every step holds.
        """
        rest = iter(steps)
        for name, right in zip(rest, rest, strict=True):
            if not self.compare(left, name, right):
                return False
            left = right
        return True

    def _pay_comparison(self, name: str, left: Any, right: Any) -> None:
        left_type, right_type = type(left), type(right)
        if left_type is str and right_type is str:
            if name in ("in", "notin"):
                spend_search(self.budget, right, left)
            else:
                self.budget.spend(min(len(left), len(right)) >> BYTES_PER_UNIT_SHIFT)
            return
        if left_type in SCALARS and right_type in SCALARS:
            return
        if name in ("in", "notin"):
            if right_type is dict:
                require_key(left)
                self.budget.spend(1)
                return
            if right_type not in ITERABLES and not isinstance(right, Undefined):
                _refuse_operator("in", left, right)
        weight = self.budget.weigh(left)
        self.budget.weigh(right)
        if name in ("in", "notin") and right_type in SEQUENCES and weight.nodes > 1:
            # Each item may be compared with the whole left side.
            self.budget.spend(weight.nodes * len(right))
