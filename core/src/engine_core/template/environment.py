"""The bounded template engine: Jinja's immutable sandbox under a work budget.

A template compiles once. Each render gets an environment of its own, which holds the budget, the
frozen clock and the filters bound to both, so renders share nothing that changes.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn

import attrs
from jinja2 import Template
from jinja2 import exceptions as jinja
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from engine_core.errors import TemplateError
from engine_core.limits import LIMITS, Limits
from engine_core.template.budget import SCALARS, Budget
from engine_core.template.compiler import BoundedCodeGenerator, GenerationBlocks, check_tree
from engine_core.template.filters import FILTERS, TESTS, bind
from engine_core.template.operations import Function, Operations

if TYPE_CHECKING:
    from types import CodeType

    from jinja2.runtime import Context

__all__ = ["BoundedEnvironment", "CompiledTemplate", "plain_copy"]

MAX_MESSAGE_CHARS: Final = 500
MAX_DATE_FORMAT_BYTES: Final = 256
MAX_DATE_BYTES: Final = 1024
MAX_RANGE: Final = 100_000
_NAMESPACE_UNITS: Final = 16
_DATE_UNITS: Final = 16
_DATE_FIELD = re.compile(r"%[-_0^#]?[a-zA-Z%]|%[^a-zA-Z%]?")
_OPERATORS: Final = frozenset({"+", "-", "*", "/", "//", "%", "**"})

# What Python and Jinja raise for a template that is wrong; RecursionError is a RuntimeError.
_FAILURES: Final = (
    jinja.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    NameError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


class _RefusedError(Exception):
    """The template called ``raise_exception``."""


@contextmanager
def _typed_errors(action: str, failed: str) -> Iterator[None]:
    try:
        yield
    except _RefusedError as exc:
        raise TemplateError(
            f"chat template: refuses this conversation, got {str(exc)[:MAX_MESSAGE_CHARS]!r}",
            code="template.refused",
            hint="change the conversation as the template's message says",
        ) from exc
    except RecursionError as exc:
        raise TemplateError(
            f"chat template: {action} must not nest this deep, got a recursion error",
            code="template.nesting",
        ) from exc
    except jinja.SecurityError as exc:
        raise TemplateError(
            f"chat template: {action} must stay inside the sandbox, "
            f"got {str(exc)[:MAX_MESSAGE_CHARS]!r}",
            code="template.forbidden",
        ) from exc
    except (jinja.TemplateSyntaxError, SyntaxError) as exc:
        raise TemplateError(
            f"chat template: must be valid, got {str(exc)[:MAX_MESSAGE_CHARS]!r} "
            f"in line {exc.lineno}",
            code="template.syntax",
        ) from exc
    except _FAILURES as exc:
        raise TemplateError(
            f"chat template: {action} must succeed, "
            f"got {type(exc).__name__} {str(exc)[:MAX_MESSAGE_CHARS]!r}",
            code=failed,
            hint="this conversation may have a shape that the template does not support",
        ) from exc


class BoundedEnvironment(Operations, ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox whose every operation is charged to one budget.

    Attributes:
        budget: Work units left.
    """

    code_generator_class = BoundedCodeGenerator
    intercepted_binops = _OPERATORS
    intercepted_unops = frozenset({"+", "-"})

    def __init__(self, budget: Budget, clock: datetime.datetime) -> None:
        """Make an environment for one render.

        Args:
            budget: Pays for everything.
            clock: The one time that the render sees.
        """
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
            optimized=False,
            cache_size=0,
            extensions=["jinja2.ext.loopcontrols", GenerationBlocks],
        )
        self.budget = budget
        self.spend = budget.spend
        self.filters: dict[str, Any] = bind(FILTERS, self)
        self.tests: dict[str, Any] = bind(TESTS, self)
        self._clock = clock
        self.globals = {
            "dict": Function(self._dict),
            "namespace": Function(self._namespace),
            "raise_exception": Function(self._raise_exception),
            "range": Function(self._range),
            "strftime_now": Function(self._strftime_now),
        }

    # What generated code calls, under the names that it uses.

    def call_binop(self, _: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an arithmetic operator."""
        return self.binary(operator, left, right)

    def call_unop(self, _: Context, operator: str, arg: Any) -> Any:
        """Apply a sign."""
        return self.unary(operator, arg)

    getattr = Operations.attribute  # type: ignore[assignment]
    getitem = Operations.item  # type: ignore[assignment]

    def call(__self, __context: Context, __obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - no argument of a template may collide
        """Call a value."""
        kwargs.pop("_loop_vars", None)
        return __self.invoke(__obj, args, kwargs)

    # Globals.

    def _dict(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        (source,) = args or ({},)
        if type(source) is not dict:
            source = dict(self._pair(pair) for pair in self.listed(source))
        self.budget.spend_items(4 * (len(source) + len(kwargs)))
        return {**source, **kwargs}

    def _pair(self, pair: Any) -> tuple[Any, Any]:
        key, value = self.iterate(pair)
        return self.key(key), value

    def _namespace(self, *args: Any, **kwargs: Any) -> Namespace:
        self.budget.spend(_NAMESPACE_UNITS)
        return Namespace(self._dict(*args, **kwargs))

    def _raise_exception(self, message: Any = "") -> NoReturn:
        raise _RefusedError(self.text(message)[:MAX_MESSAGE_CHARS])

    def _range(self, *args: Any) -> range:
        if any(type(arg) not in (int, bool) for arg in args):
            msg = "range takes integers"
            raise TypeError(msg)
        numbers = range(*args)
        if len(numbers) > MAX_RANGE:
            msg = f"range must have at most {MAX_RANGE} items"
            raise OverflowError(msg)
        return numbers

    def _strftime_now(self, pattern: Any) -> str:
        if type(pattern) is not str or len(pattern.encode()) > MAX_DATE_FORMAT_BYTES:
            msg = f"strftime_now takes a format of at most {MAX_DATE_FORMAT_BYTES} bytes"
            raise ValueError(msg)
        self.budget.spend(_DATE_UNITS + len(pattern))
        # Field by field: a width inside a field could ask for any length of padding.
        result = _DATE_FIELD.sub(self._date_field, pattern)
        if len(result.encode()) > MAX_DATE_BYTES:
            msg = f"strftime_now makes at most {MAX_DATE_BYTES} bytes"
            raise ValueError(msg)
        return result

    def _date_field(self, match: re.Match[str]) -> str:
        field = match[0]
        if not field[-1].isalpha() and field != "%%":
            return field
        text = self._clock.strftime(field)
        # A letter that means nothing stands for itself.
        return field[-1] if text == field else text


@attrs.frozen(eq=False)
class CompiledTemplate:
    """A checked template, ready to render any number of times on any thread.

    Attributes:
        code: Compiled code; holds no state.
        limits: Bounds of every render.
    """

    code: CodeType = attrs.field(repr=False)
    limits: Limits = attrs.field(repr=False)

    @classmethod
    def compile(cls, source: str, limits: Limits = LIMITS) -> CompiledTemplate:
        """Parse, check and compile.

        Args:
            source: Template text.
            limits: Bounds on the source and on every render.

        Returns:
            The compiled template.

        Raises:
            TemplateError: The source is too large, invalid, nests too deep or uses a statement or
                a filter that is not allowed.
        """
        size = len(source.encode("utf-8", "surrogatepass"))
        if size > limits.template_bytes:
            raise TemplateError(
                f"chat template: its source must fit {limits.template_bytes} bytes, got {size}",
                code="template.too_large",
            )
        environment = BoundedEnvironment(Budget(0), datetime.datetime.now(tz=datetime.UTC))
        with _typed_errors("compiling", "template.syntax"):
            tree = environment.parse(source)
            check_tree(tree)
            code = environment.compile(tree, filename="<chat template>")
        return cls(code, limits)

    def render(self, variables: Mapping[str, Any], *, units: int, clock: datetime.datetime) -> str:
        """Render once.

        Args:
            variables: Plain data; copied by the caller, not changed here.
            units: Work budget.
            clock: The one time that this render sees.

        Returns:
            The text.

        Raises:
            TemplateError: The template refused, failed or exceeded a bound.
        """
        budget = Budget(units)
        environment = BoundedEnvironment(budget, clock)
        cap = self.limits.template_output_bytes
        pieces: list[str] = []
        size = 0
        with _typed_errors("rendering", "template.failed"):
            template = Template.from_code(environment, self.code, environment.globals)
            for piece in template.root_render_func(template.new_context(dict(variables))):
                size += len(piece) if piece.isascii() else len(piece.encode())
                if size > cap:
                    raise TemplateError(
                        f"chat template: output must fit {cap} bytes, got more",
                        code="template.too_large",
                    )
                pieces.append(piece)
        return "".join(pieces)


def plain_copy(value: Any, what: str) -> Any:
    """Copy data into the exact built-in types that templates know.

    Args:
        value: JSON-like data, possibly in frozen or subclassed containers.
        what: Names the value in an error.

    Returns:
        The copy.

    Raises:
        TemplateError: The value holds something that is no JSON-like data.
    """
    kind = type(value)
    if kind in SCALARS:
        return value
    if isinstance(value, (dict, Mapping)):
        return {
            str(key): entry if type(entry) in SCALARS else plain_copy(entry, what)
            for key, entry in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [plain_copy(entry, what) for entry in value]
    for base in (str, bool, int, float):
        if isinstance(value, base):
            return base(value)
    raise TemplateError(
        f"chat template: {what} must be JSON-like data, got a {kind.__name__}",
        code="template.input",
    )
