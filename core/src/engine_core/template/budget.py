"""The work budget of one render: charged before an operation runs, so nothing runs over it.

One unit pays for one syntax node of a block or for 32 bytes that an operation reads or makes.
A budget belongs to one render and one thread.
"""

from __future__ import annotations

import math
from typing import Any, Final

import attrs
from jinja2 import Undefined

from engine_core.errors import TemplateError

__all__ = [
    "BYTES_PER_UNIT_SHIFT",
    "MAX_DEPTH",
    "MAX_INTEGER_BITS",
    "SCALARS",
    "Budget",
    "Weight",
    "require_integer_size",
    "text_bytes",
]

MAX_INTEGER_BITS: Final = 4096
MAX_DEPTH: Final = 200
BYTES_PER_UNIT_SHIFT: Final = 5
POINTER_BYTES: Final = 8

SCALARS: Final = frozenset({str, int, float, bool, type(None)})
_CONTAINERS: Final = frozenset({list, tuple, dict})


@attrs.frozen
class Weight:
    """What a deep look at a value found.

    Attributes:
        nodes: Values in it, itself included.
        characters: Upper bound on the characters of its ``repr`` or compact JSON text.
        depth: Nested containers.
    """

    nodes: int
    characters: int
    depth: int


def text_bytes(*texts: str) -> int:
    """Bound the memory of texts joined into one.

    Args:
        texts: The pieces; one wide character makes the whole result wide.

    Returns:
        Bytes.
    """
    length, width = 0, 1
    for text in texts:
        length += len(text)
        if not text.isascii():
            width = 4
    return length * width


def require_integer_size(value: Any) -> None:
    """Refuse an integer that arithmetic made too large.

    Args:
        value: Any value; only an ``int`` is looked at.

    Raises:
        TemplateError: The integer has more than ``MAX_INTEGER_BITS`` bits.
    """
    if type(value) is int and value.bit_length() > MAX_INTEGER_BITS:
        raise TemplateError(
            f"chat template: an integer must fit {MAX_INTEGER_BITS} bits, got {value.bit_length()}",
            code="template.budget",
        )


def _quoted(text: str) -> int:
    """Bound the characters of a text once it is quoted and escaped."""
    if text.isprintable():
        plain = text.isascii()
        return 2 + (2 if plain else 12) * len(text)
    return 2 + 12 * len(text)


class Budget:
    """Work units left to one render.

    Attributes:
        remaining: Units left; negative once the budget was exceeded.
    """

    __slots__ = ("_limit", "remaining")

    def __init__(self, units: int) -> None:
        """Start a budget.

        Args:
            units: Work units of the whole render.
        """
        self._limit = units
        self.remaining = units

    def spend(self, units: int) -> None:
        """Pay for work that is about to be done.

        Args:
            units: Work units, at least 0.

        Raises:
            TemplateError: The budget is exceeded (``template.budget``).
        """
        self.remaining = remaining = self.remaining - units
        if remaining < 0:
            raise TemplateError(
                f"chat template: rendering must fit {self._limit} work units, got more",
                code="template.budget",
                hint="shorten the conversation or use a template that does less work",
            )

    def spend_bytes(self, count: int) -> None:
        """Pay for bytes that are about to be read or made.

        Args:
            count: Bytes, at least 0.

        Raises:
            TemplateError: The budget is exceeded.
        """
        self.spend(1 + (count >> BYTES_PER_UNIT_SHIFT))

    def spend_text(self, text: str, other: str = "", *, times: int = 1) -> None:
        """Pay for reading a text, or for making one of its length.

        Args:
            text: The text.
            other: What it is joined with.
            times: How often each character is touched.

        Raises:
            TemplateError: The budget is exceeded.
        """
        # What text_bytes counts, written out: nothing else is paid for as often.
        size = len(text) + len(other)
        if not (text.isascii() and other.isascii()):
            size *= 4
        self.spend(1 + (size * times >> BYTES_PER_UNIT_SHIFT))

    def spend_integers(self, left: int, right: int) -> None:
        """Pay for arithmetic or printing, whose time grows with the product of the lengths.

        Args:
            left: First integer.
            right: Second integer; the same one again for printing.

        Raises:
            TemplateError: The budget is exceeded.
        """
        self.spend(1 + (left.bit_length() * right.bit_length() >> 18))

    def spend_items(self, count: int) -> None:
        """Pay for a container of ``count`` new references.

        Args:
            count: References, at least 0.

        Raises:
            TemplateError: The budget is exceeded.
        """
        self.spend(1 + count)

    def spend_sort(self, count: int) -> None:
        """Pay for sorting ``count`` items of which each was weighed once already.

        Args:
            count: Items.

        Raises:
            TemplateError: The budget is exceeded.
        """
        self.spend(1 + int(count * (1 + math.log2(count + 1))))

    def weigh(self, value: Any, *, plain: bool = False) -> Weight:
        """Walk through a value and pay for every part of it.

        A value whose parts are shared many times over costs what its unfolded form costs, because
        that is what comparing or printing it would cost.

        Args:
            value: Any template value.
            plain: Refuse anything but plain data, as printing needs.

        Returns:
            Its unfolded size.

        Raises:
            TemplateError: The budget is exceeded or the value nests too deep.
            TypeError: ``plain`` is set and the value holds something else.
        """
        nodes = characters = deepest = 0
        stack: list[tuple[Any, int]] = [(value, 0)]
        while stack:
            item, depth = stack.pop()
            kind = type(item)
            nodes += 1
            if kind is str:
                count = _quoted(item)
                self.spend_bytes(count)
                characters += count
            elif kind is int:
                self.spend_integers(item, item)
                characters += 3 + item.bit_length() // 3
            elif kind in _CONTAINERS:
                if depth >= MAX_DEPTH:
                    raise TemplateError(
                        f"chat template: values must nest at most {MAX_DEPTH} levels, got more",
                        code="template.nesting",
                    )
                deepest = max(deepest, depth + 1)
                self.spend(2 + len(item))
                characters += 4 + 4 * len(item)
                if kind is dict:
                    stack.extend((key, depth + 1) for key in item)
                    stack.extend((entry, depth + 1) for entry in item.values())
                else:
                    stack.extend((entry, depth + 1) for entry in item)
            elif plain and not (
                item is None or kind in (bool, float, range) or isinstance(item, Undefined)
            ):
                msg = f"a {kind.__name__} cannot be printed"
                raise TypeError(msg)
            else:
                self.spend(1)
                characters += 32
        return Weight(nodes, characters, deepest)
