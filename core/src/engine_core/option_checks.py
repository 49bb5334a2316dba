"""Checks of single request options: each takes any value and gives the normalised one.

Everything here is plain Python, so that a bad request fails before any array is made.
"""

from __future__ import annotations

import difflib
import numbers
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from engine_core.errors import InvalidRequest
from engine_core.limits import LIMITS
from engine_core.values import freeze_json, shown, text_size

__all__ = [
    "Check",
    "boolean",
    "callback",
    "callbacks",
    "integer",
    "json_object",
    "logit_bias",
    "nullable",
    "number",
    "refuse",
    "stop_strings",
    "text",
    "unknown_option",
]

# Below this, the nearest name is another word, not the one that was meant.
_LEAST_SIMILARITY = 0.8

Check = Callable[[str, Any], Any]
"""``(option name, value) -> normalised value``; raises ``InvalidRequest``."""


def refuse(option: str, rule: str, got: str, hint: str = "") -> NoReturn:
    """Refuse an option's value.

    Args:
        option: Option name.
        rule: What the value must be.
        got: What it is.
        hint: What to do.

    Raises:
        InvalidRequest: Always, with code ``request.<option>``.
    """
    raise InvalidRequest(f"{option}: {rule}, got {got}", code=f"request.{option}", hint=hint)


def unknown_option(
    subject: str, name: object, known: Iterable[str], aliases: Mapping[str, str]
) -> InvalidRequest:
    """Describe an option that does not exist.

    Args:
        subject: Who was given it.
        name: What was given.
        known: Options that exist.
        aliases: What other tools call one of them -> its name.

    Returns:
        The error to raise, code ``request.unknown_option``.
    """
    names, written = list(known), str(name)
    similar = difflib.get_close_matches(written, names, 1, _LEAST_SIMILARITY)
    nearest = aliases.get(written) or next(iter(similar), None)
    return InvalidRequest(
        f"{subject}: options must be known, got {shown(name)}",
        code="request.unknown_option",
        hint=f"did you mean {nearest!r}?" if nearest else f"known: {', '.join(names)}",
    )


def nullable(check: Check) -> Check:
    """Let ``None`` stand for an option that was not given.

    Args:
        check: Check of any other value.

    Returns:
        The check.
    """
    return lambda option, value: None if value is None else check(option, value)


def boolean(option: str, value: object) -> bool:
    """Check a flag."""
    # Whoever has a value of NumPy's has imported it; numbers have no type for its booleans.
    numpy: Any = sys.modules.get("numpy")
    if not isinstance(value, bool if numpy is None else (bool, numpy.bool_)):
        refuse(option, "must be True or False", shown(value))
    return bool(value)


def integer(low: int, high: int) -> Check:
    """Make a check of an integer; ``bool`` is none.

    Args:
        low: Smallest value.
        high: Largest value.

    Returns:
        The check.
    """

    def check(option: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            refuse(option, "must be an integer", shown(value))
        whole = int(value)
        if not low <= whole <= high:
            refuse(option, f"must be {low} to {high}", shown(whole))
        return whole

    return check


def number(low: float, high: float, *, above: bool = False) -> Check:
    """Make a check of a finite number.

    Args:
        low: Smallest value.
        high: Largest value.
        above: Whether ``low`` itself is refused.

    Returns:
        The check.
    """
    rule = f"must be above {low} and at most {high}" if above else f"must be {low} to {high}"

    def check(option: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            refuse(option, "must be a number", shown(value))
        # Compared as it came: converting a huge integer first would overflow.
        real: Any = value
        # NaN compares false with everything, so it fails here too.
        if not (low < real if above else low <= real) or not real <= high:
            refuse(option, rule, shown(real))
        return float(real)

    return check


def text(max_bytes: int) -> Check:
    """Make a check of a text.

    Args:
        max_bytes: Longest text (UTF-8 bytes).

    Returns:
        The check.
    """

    def check(option: str, value: object) -> str:
        if not isinstance(value, str):
            refuse(option, "must be a string", shown(value))
        size = text_size(value, option, f"request.{option}")
        if size > max_bytes:
            refuse(option, f"must fit {max_bytes} bytes", str(size))
        return value

    return check


def stop_strings(option: str, value: object) -> tuple[str, ...]:
    """Check stop strings: one text or a list of texts, none of them empty."""
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, (list, tuple)):
        refuse(option, "must be a string or a list of strings", shown(value))
    if len(value) > LIMITS.stop_strings:
        refuse(option, f"must be at most {LIMITS.stop_strings} strings", str(len(value)))
    check = text(LIMITS.stop_string_bytes)
    stops = tuple(check(option, item) for item in value)
    if "" in stops:
        refuse(option, "must be non-empty strings", "''")
    return stops


def members(known: Sequence[str]) -> Check:
    """Make a check of a list of known words.

    Args:
        known: The words.

    Returns:
        The check; its result is a tuple without repetition, in the order of ``known``.
    """

    def check(option: str, value: object) -> tuple[str, ...]:
        if not isinstance(value, (list, tuple, set, frozenset)):
            refuse(option, "must be a list of strings", shown(value))
        for item in value:
            if not isinstance(item, str) or item not in known:
                refuse(option, f"must be out of {', '.join(known)}", shown(item))
        return tuple(word for word in known if word in value)

    return check


def logit_bias(option: str, value: object) -> Mapping[int, float]:
    """Check a logit bias: token id (or its decimal text, as JSON writes keys) -> bias."""
    if not isinstance(value, Mapping):
        refuse(option, "must map token ids to numbers", shown(value))
    if len(value) > LIMITS.logit_bias_entries:
        refuse(option, f"must be at most {LIMITS.logit_bias_entries} entries", str(len(value)))
    check_id = integer(0, LIMITS.tensor_dimension - 1)
    check_bias = number(-LIMITS.logit_bias, LIMITS.logit_bias)
    biases: dict[int, float] = {}
    for key, bias in value.items():
        # At most ten digits: int() of a long text takes quadratic time.
        written = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
        token = check_id(option, int(key) if written else key)
        if token in biases:
            refuse(option, "must name a token once", str(token))
        biases[token] = check_bias(option, bias)
    return MappingProxyType(biases)


def json_object(max_bytes: int) -> Check:
    """Make a check of a JSON object; the result is a frozen copy.

    Args:
        max_bytes: Its largest size in bytes.

    Returns:
        The check.
    """

    def check(option: str, value: object) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            refuse(option, "must be a mapping", shown(value))
        frozen: Mapping[str, Any]
        frozen, _ = freeze_json(
            value,
            option,
            max_bytes=max_bytes,
            max_depth=LIMITS.json_depth,
            max_digits=LIMITS.json_number_digits,
            code=f"request.{option}",
        )
        return frozen

    return check


def callback(option: str, value: object) -> Callable[..., Any]:
    """Check a callable."""
    if not callable(value):
        refuse(option, "must be callable", shown(value))
    return value


def callbacks(option: str, value: object) -> tuple[Callable[..., Any], ...]:
    """Check a list of callables."""
    if not isinstance(value, (list, tuple)):
        refuse(option, "must be a list of callables", shown(value))
    return tuple(callback(option, item) for item in value)
