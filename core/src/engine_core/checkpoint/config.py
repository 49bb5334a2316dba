"""Typed reading of ``config.json`` and its siblings.

``null`` means absent everywhere: published files write it for retired fields.
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

import attrs

from engine_core.errors import ConfigError
from engine_core.values import shown

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

__all__ = ["CheckpointConfig"]

Value = TypeVar("Value")
Default = TypeVar("Default")


class _Required(enum.Enum):
    """Type of the marker for "no default"."""

    REQUIRED = enum.auto()


_REQUIRED: Final = _Required.REQUIRED


def _without_nulls(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if value is not None}


@attrs.frozen
class CheckpointConfig:
    """A JSON object read with typed errors.

    Each reader takes ``default``: without it an absent field is an error. An error names the file
    and the dotted path of the field.

    Attributes:
        data: The object; entries that are ``None`` are removed.
        name: File name for errors.
        path: Dotted path of this section inside the file, empty for the whole.
    """

    data: Mapping[str, Any] = attrs.field(converter=_without_nulls, factory=dict)
    name: str = "config.json"
    path: str = ""

    def __contains__(self, key: object) -> bool:
        return key in self.data

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def get(self, key: str, default: Any = None) -> Any:
        """Read a field as it is.

        Args:
            key: Field name.
            default: Result when the field is absent or ``null``.

        Returns:
            The JSON value.
        """
        return self.data.get(key, default)

    def error(self, key: str, rule: str, got: object = _REQUIRED) -> ConfigError:
        """Build the error for a field, to be raised by the caller.

        Args:
            key: Field name.
            rule: What the field must be, e.g. ``"must be positive"``.
            got: The offending value; left out of the message when not given.

        Returns:
            A ``ConfigError`` that names file and field.
        """
        field = f"{self.path}.{key}" if self.path else key
        found = "" if got is _REQUIRED else f", got {_describe(got)}"
        return ConfigError(f"{self.name}: {field} {rule}{found}")

    @overload
    def integer(
        self, key: str, *, minimum: int | None = None, maximum: int | None = None
    ) -> int: ...
    @overload
    def integer(
        self,
        key: str,
        *,
        default: Default,
        minimum: int | None = None,
        maximum: int | None = None,
    ) -> int | Default: ...
    def integer(
        self,
        key: str,
        *,
        default: Any = _REQUIRED,
        minimum: int | None = None,
        maximum: int | None = None,
    ) -> Any:
        """Read a whole number; a float without fraction counts as one.

        Args:
            key: Field name.
            default: Result when absent.
            minimum: Smallest allowed value.
            maximum: Largest allowed value.

        Returns:
            The number.

        Raises:
            ConfigError: Absent without default, of another type, or out of range.
        """
        value = self._present(key, default)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, "must be an integer", value)
        return self._in_range(key, value, minimum, maximum)

    @overload
    def number(
        self,
        key: str,
        *,
        minimum: float | None = None,
        maximum: float | None = None,
        above: float | None = None,
    ) -> float: ...
    @overload
    def number(
        self,
        key: str,
        *,
        default: Default,
        minimum: float | None = None,
        maximum: float | None = None,
        above: float | None = None,
    ) -> float | Default: ...
    def number(
        self,
        key: str,
        *,
        default: Any = _REQUIRED,
        minimum: float | None = None,
        maximum: float | None = None,
        above: float | None = None,
    ) -> Any:
        """Read a finite number.

        Args:
            key: Field name.
            default: Result when absent.
            minimum: Smallest allowed value.
            maximum: Largest allowed value.
            above: Bound that is not allowed itself.

        Returns:
            The number as a float.

        Raises:
            ConfigError: Absent without default, of another type, or out of range.
        """
        value = self._present(key, default)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, "must be a number", value)
        try:
            converted = float(value)
        except OverflowError as exc:
            raise self.error(key, "must fit a double") from exc
        if not math.isfinite(converted):
            raise self.error(key, "must be finite", value)
        if above is not None and converted <= above:
            raise self.error(key, f"must be above {above}", value)
        return self._in_range(key, converted, minimum, maximum)

    @overload
    def boolean(self, key: str) -> bool: ...
    @overload
    def boolean(self, key: str, *, default: Default) -> bool | Default: ...
    def boolean(self, key: str, *, default: Any = _REQUIRED) -> Any:
        """Read ``true`` or ``false``.

        Args:
            key: Field name.
            default: Result when absent.

        Returns:
            The value.

        Raises:
            ConfigError: Absent without default, or of another type.
        """
        value = self._present(key, default)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false", value)
        return value

    @overload
    def string(self, key: str, *, choices: Collection[str] | None = None) -> str: ...
    @overload
    def string(
        self, key: str, *, default: Default, choices: Collection[str] | None = None
    ) -> str | Default: ...
    def string(
        self, key: str, *, default: Any = _REQUIRED, choices: Collection[str] | None = None
    ) -> Any:
        """Read a text.

        Args:
            key: Field name.
            default: Result when absent.
            choices: Allowed values, ``None`` for any.

        Returns:
            The text.

        Raises:
            ConfigError: Absent without default, of another type, or not among the choices.
        """
        value = self._present(key, default)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(key, "must be a string", value)
        if choices is not None and value not in choices:
            raise self.error(key, f"must be one of {sorted(choices)}", value)
        return value

    @overload
    def sequence(
        self, key: str, *, length: int | None = None, choices: Collection[str] | None = None
    ) -> tuple[Any, ...]: ...
    @overload
    def sequence(
        self,
        key: str,
        *,
        default: Default,
        length: int | None = None,
        choices: Collection[str] | None = None,
    ) -> tuple[Any, ...] | Default: ...
    def sequence(
        self,
        key: str,
        *,
        default: Any = _REQUIRED,
        length: int | None = None,
        choices: Collection[str] | None = None,
    ) -> Any:
        """Read a list; without choices the caller checks its items.

        Args:
            key: Field name.
            default: Result when absent.
            length: Number of items, ``None`` for any.
            choices: Allowed items, ``None`` for any.

        Returns:
            The items.

        Raises:
            ConfigError: Absent without default, of another type or length, or an item is not
                among the choices.
        """
        value = self._present(key, default)
        if value is None:
            return default
        if not isinstance(value, (list, tuple)):
            raise self.error(key, "must be a list", value)
        if length is not None and len(value) != length:
            raise self.error(key, f"must have {length} entries", len(value))
        if choices is not None:
            for item in value:
                if not isinstance(item, str) or item not in choices:
                    raise self.error(key, f"must hold some of {sorted(choices)}", item)
        return tuple(value)

    @overload
    def mapping(self, key: str) -> Mapping[str, Any]: ...
    @overload
    def mapping(self, key: str, *, default: Default) -> Mapping[str, Any] | Default: ...
    def mapping(self, key: str, *, default: Any = _REQUIRED) -> Any:
        """Read an object as it is, nulls included.

        Args:
            key: Field name.
            default: Result when absent.

        Returns:
            The object.

        Raises:
            ConfigError: Absent without default, or of another type.
        """
        value = self._present(key, default)
        if value is None:
            return default
        if not isinstance(value, dict):
            raise self.error(key, "must be an object", value)
        return value

    def section(self, key: str) -> CheckpointConfig:
        """Read an object as a config of its own.

        Args:
            key: Field name, e.g. ``"text_config"``.

        Returns:
            The section; empty when the field is absent.

        Raises:
            ConfigError: The field is no object.
        """
        path = f"{self.path}.{key}" if self.path else key
        return CheckpointConfig(self.mapping(key, default={}), name=self.name, path=path)

    def _present(self, key: str, default: object) -> Any:
        """Return the value, ``None`` when absent; absent without a default is an error."""
        value = self.data.get(key)
        if value is None and default is _REQUIRED:
            raise self.error(key, "is required")
        return value

    def _in_range(
        self, key: str, value: Value, minimum: float | None, maximum: float | None
    ) -> Value:
        number: Any = value
        if minimum is not None and number < minimum:
            raise self.error(key, f"must be at least {minimum}", value)
        if maximum is not None and number > maximum:
            raise self.error(key, f"must be at most {maximum}", value)
        return value


def _describe(value: object) -> str:
    if isinstance(value, (dict, list)):
        return f"{type(value).__name__} of {len(value)}"
    return shown(value)
