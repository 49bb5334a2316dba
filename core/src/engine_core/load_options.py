"""What a load was asked for: its options, whom it tells how far it is, when it is to end."""

from __future__ import annotations

from os import PathLike
from types import NoneType
from typing import TYPE_CHECKING, Any

import attrs

from engine_core.callbacks import call_back, says_no
from engine_core.errors import Cancelled
from engine_core.limits import LIMITS, Limits
from engine_core.option_checks import refuse
from engine_core.plugins import Plugins
from engine_core.values import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["LoadOptions"]


def _one_of(rule: str, *kinds: type) -> Callable[[object, attrs.Attribute[Any], object], None]:
    def check(_: object, field: attrs.Attribute[Any], value: object) -> None:
        if not isinstance(value, kinds):
            refuse(field.name, rule, shown(value))

    return check


@attrs.frozen(kw_only=True, eq=False)
class LoadOptions:
    """What to load and how; the fields are those of ``Session.load``.

    A value of the wrong type is refused here; what it holds is judged where it is used.

    Attributes:
        path: Directory of the checkpoint.
        template: Source of a chat template, ``False`` for none, ``None`` for the checkpoint's.
        compute_dtype: Dtype of activations, or ``"auto"``.
        quantized_weights: What becomes of packed weights.
        plugins: Plugins to choose from.
        family: Family to use.
        certificates: Certificates for speculative decoding.
        extra_eos_tokens: Token texts that end a reply.
        allocator_cache_bytes: Freed memory MLX may keep (bytes).
        prompt_cache_bytes: Bound on stored prompt prefixes; ``None`` for the default, 0 for none.
        prompt_cache_ttl: Seconds after which an unused prefix is dropped, ``None`` for never.
        limits: Bounds.
        on_progress: Called with bytes done and all bytes; ``False`` cancels.
        is_cancelled: Polled while loading.
    """

    path: str | PathLike[str] = attrs.field(
        validator=_one_of("must be a path", str, bytes, PathLike)
    )
    template: str | bool | None = None
    compute_dtype: str = "auto"
    quantized_weights: str = "auto"
    plugins: Plugins | None = attrs.field(
        default=None, validator=_one_of("must be Plugins or None", Plugins, NoneType)
    )
    family: str | None = None
    certificates: Sequence[Any] = attrs.field(
        default=(), validator=_one_of("must be a list", list, tuple)
    )
    extra_eos_tokens: Sequence[str] = attrs.field(
        default=(), validator=_one_of("must be a list of texts", list, tuple)
    )
    allocator_cache_bytes: int | None = None
    prompt_cache_bytes: int | None = None
    prompt_cache_ttl: float | None = None
    limits: Limits = attrs.field(default=LIMITS, validator=_one_of("must be Limits", Limits))
    on_progress: Callable[[int, int], bool | None] | None = None
    is_cancelled: Callable[[], bool] | None = None

    def check_cancelled(self) -> None:
        """End the load when somebody asked for that.

        Raises:
            Cancelled: The load was cancelled.
            CallbackError: The callback raised or gave no truth value.
        """
        if self.is_cancelled is not None and call_back(self.is_cancelled, "is_cancelled"):
            raise Cancelled("load: was cancelled")

    def report(self, done: int, total: int) -> None:
        """Pass progress on.

        Args:
            done: Bytes read.
            total: All bytes.

        Raises:
            Cancelled: The caller does not want the model any more.
            CallbackError: A callback raised or gave no truth value.
        """
        self.check_cancelled()
        progress = self.on_progress
        if progress is not None and says_no(progress, "on_load_progress", done, total):
            raise Cancelled("load: was cancelled by on_load_progress")
