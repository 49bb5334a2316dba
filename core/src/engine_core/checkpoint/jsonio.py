"""Strict, bounded JSON.

Python's ``json`` accepts duplicate keys, ``NaN``, numbers that overflow to infinity, lone
surrogates and nesting up to the recursion limit. Each of them lets two readers of one file
disagree, so all are refused here.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, NoReturn

from engine_core.errors import CheckpointError
from engine_core.limits import LIMITS

if TYPE_CHECKING:
    from engine_core.limits import Limits

__all__ = ["parse_json", "parse_json_object"]

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SHOWN = 80


class _RefusedError(Exception):
    """Carries a rule out of the decoder's callbacks."""


def parse_json(data: bytes, what: str, limits: Limits = LIMITS) -> Any:
    """Parse one JSON document.

    Args:
        data: UTF-8 bytes, already bounded in size by whoever read them.
        what: Names the document in errors, e.g. ``"config.json"``.
        limits: Bounds on nesting and on the digits of one number.

    Returns:
        ``None``, ``bool``, ``int``, ``float``, ``str``, ``list`` or ``dict``.

    Raises:
        CheckpointError: Code ``checkpoint.json``; the bytes are not strict JSON.
    """
    try:
        value = json.loads(
            data.decode("utf-8", errors="strict"),
            object_pairs_hook=_unique_pairs,
            parse_int=lambda text: _integer(text, limits),
            parse_float=lambda text: _float(text, limits),
            parse_constant=_refuse_constant,
        )
        _check_nesting(value, limits.json_depth, surrogates=_SURROGATE.search(data) is not None)
    except _RefusedError as exc:
        raise _invalid(what, str(exc)) from exc
    except UnicodeDecodeError as exc:
        raise _invalid(what, f"must be UTF-8, got an invalid byte at {exc.start}") from exc
    except json.JSONDecodeError as exc:
        raise _invalid(what, f"must be JSON, got {exc.msg.lower()!r} at {exc.pos}") from exc
    except RecursionError as exc:
        raise _invalid(what, f"nesting must be at most {limits.json_depth} deep") from exc
    return value


def parse_json_object(data: bytes, what: str, limits: Limits = LIMITS) -> dict[str, Any]:
    """Parse a JSON document whose top level must be an object.

    Args:
        data: UTF-8 bytes.
        what: Names the document in errors.
        limits: Bounds on nesting and on the digits of one number.

    Returns:
        The object.

    Raises:
        CheckpointError: Code ``checkpoint.json``.
    """
    value = parse_json(data, what, limits)
    if not isinstance(value, dict):
        raise _invalid(what, f"must be a JSON object, got {type(value).__name__}")
    return value


def _invalid(what: str, rule: str) -> CheckpointError:
    return CheckpointError(
        f"{what}: {rule}",
        code="checkpoint.json",
        hint="the file is damaged; fetch it again",
    )


def _check_digits(text: str, limits: Limits) -> None:
    if len(text) > limits.json_number_digits:
        raise _RefusedError(
            f"a number must have at most {limits.json_number_digits} digits, got {len(text)}"
        )


def _integer(text: str, limits: Limits) -> int:
    _check_digits(text, limits)
    return int(text)


def _float(text: str, limits: Limits) -> float:
    _check_digits(text, limits)
    value = float(text)
    if not math.isfinite(value):
        raise _RefusedError(f"numbers must be finite, got {text[:_SHOWN]!r}")
    return value


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _RefusedError(f"keys must be unique, got {key[:_SHOWN]!r} twice")
            seen.add(key)
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise _RefusedError(f"numbers must be finite, got {name}")


def _check_nesting(value: Any, depth: int, *, surrogates: bool) -> None:
    """Walk containers level by level, so that the check itself never recurses."""
    level = [value]
    reached = 0
    while level:
        if reached == depth and any(isinstance(one, (dict, list)) for one in level):
            raise _RefusedError(f"nesting must be at most {depth} deep")
        following: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                if surrogates:
                    for key in one:
                        _check_text(key)
                following.extend(one.values())
            elif isinstance(one, list):
                following.extend(one)
            elif surrogates and isinstance(one, str):
                _check_text(one)
        level = following
        reached += 1


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise _RefusedError("text must be valid Unicode, got a lone surrogate") from exc
