"""Custom kernels, each believed only after it agreed with plain operations on this device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs

from engine_core.backend import evaluate, load_mlx
from engine_core.values import reason_of

if TYPE_CHECKING:
    import mlx.core as mx

__all__ = ["Build", "Function", "Kernel", "KernelRegistry", "KernelReport", "kernel_key"]

Function = Callable[..., Any]
"""Takes arrays, gives an array or a tuple of arrays."""

# No kernel is believed beyond this error, however far the plain operations of a device are off:
# four times the rounding of products in TF32 (2 ** -11).
CEILING: Final = 2e-3

Build = Callable[[str], Function]
"""``build(unique_name) -> function``; the name must be the one given to MLX."""


@attrs.frozen(kw_only=True)
class KernelReport:
    """How one kernel fares on one device.

    Attributes:
        name: Name it was registered under.
        device: MLX's name of the device, e.g. ``"Device(gpu, 0)"``.
        status: Whether the kernel or the plain operations run.
        reason: Why the plain operations run; empty for an active kernel.
        max_error: Largest difference from the plain operations, or from the exact result where
            one is known, relative to the largest magnitude; ``None`` when nothing could be
            compared.
    """

    name: str
    device: str
    status: Literal["active", "fallback"]
    reason: str = ""
    max_error: float | None = None


def kernel_key(name: str, source: str) -> bytes:
    """Make the canonical key of a kernel.

    Each part is preceded by its length, so that no two pairs share a key however the border
    between name and source falls.

    Args:
        name: Kernel name.
        source: Complete source text, with everything that changes the result.

    Returns:
        ``<length>:<name><length>:<source>`` in UTF-8, lengths in bytes.
    """
    parts = (part.encode() for part in (name, source))
    return b"".join(b"%d:%s" % (len(part), part) for part in parts)


class Kernel:
    """A kernel and the plain operations it must equal; called like either.

    The first call on a device compares both on check inputs. A kernel that differs, cannot be
    built or raises is replaced by the plain operations there, and the report says so.

    The plain operations are no measure where a device rounds them: the products of a GPU in TF32
    are off by more than an exact kernel may differ. Where the exact result can be had on the host,
    both are compared with that, and the kernel may be off by twice as much as the plain
    operations are.
    """

    def __init__(
        self,
        *,
        name: str,
        unique_name: str,
        build: Build,
        reference: Function,
        exact: Function | None,
        check_inputs: Callable[[], tuple[Any, ...]],
        tolerance: float,
    ) -> None:
        """Keep the parts; nothing is built before the first call."""
        self.name = name
        self.unique_name = unique_name
        self._build = build
        self._reference = reference
        self._exact = exact
        self._check_inputs = check_inputs
        self._tolerance = tolerance
        self._chosen: dict[str, Function] = {}
        self._reports: dict[str, KernelReport] = {}

    def __call__(self, *inputs: Any) -> Any:
        """Run the kernel, or the plain operations where they replace it.

        Args:
            *inputs: What ``reference`` takes.

        Returns:
            What ``reference`` returns, not evaluated.
        """
        device = _device_name()
        if device not in self._chosen:
            self._choose(device)
        function = self._chosen[device]
        if function is self._reference:
            return function(*inputs)
        try:
            return function(*inputs)
        except Exception as exc:  # noqa: BLE001 - whatever a kernel raises, the result is known
            self._fall_back(device, reason_of(exc))
            return self._reference(*inputs)

    def reports(self) -> tuple[KernelReport, ...]:
        """Say how the kernel fares on each device it was used on."""
        return tuple(self._reports.values())

    def _choose(self, device: str) -> None:
        """Compare kernel and plain operations on this device, once."""
        inputs = self._check_inputs()
        wanted = _as_tuple(self._reference(*inputs))
        evaluate(*wanted)
        try:
            function = self._build(self.unique_name)
            got = _as_tuple(function(*inputs))
            evaluate(*got)
            layout = _layout(got)
        except Exception as exc:  # noqa: BLE001 - whatever a kernel raises, the result is known
            self._fall_back(device, reason_of(exc))
            return
        if layout != _layout(wanted):
            self._fall_back(device, f"results must be {_layout(wanted)!r}, got {layout!r}")
            return
        bound = self._tolerance
        if self._exact is not None:
            core = load_mlx()
            plain = wanted
            wanted = tuple(
                core.array(right).astype(array.dtype)
                for right, array in zip(_as_tuple(self._exact(*inputs)), plain, strict=True)
            )
            bound = min(max(bound, 2 * _largest_error(plain, wanted)), CEILING)
        error = _largest_error(got, wanted)
        if not error <= bound:
            self._fall_back(
                device, f"relative error must be at most {bound:.3g}, got {error:.3g}", error
            )
            return
        self._chosen[device] = function
        self._reports[device] = KernelReport(
            name=self.name, device=device, status="active", max_error=error
        )

    def _fall_back(self, device: str, reason: str, error: float | None = None) -> None:
        self._chosen[device] = self._reference
        self._reports[device] = KernelReport(
            name=self.name, device=device, status="fallback", reason=reason, max_error=error
        )


class KernelRegistry:
    """All custom kernels of one loaded model, by name and complete source."""

    def __init__(self) -> None:
        """Start empty."""
        self._kernels: dict[bytes, Kernel] = {}

    def register(
        self,
        *,
        name: str,
        source: str,
        build: Build,
        reference: Function,
        check_inputs: Callable[[], tuple[Any, ...]],
        exact: Function | None = None,
        tolerance: float = 1e-4,
    ) -> Kernel:
        """Give the kernel of a name and source, new or as registered before.

        Args:
            name: Kernel name.
            source: Complete source text; with the name it is the identity of the kernel.
            build: Makes the kernel under the unique name it is given. MLX caches libraries by
                name, so the unique name depends on the source too.
            reference: The same computation in plain operations.
            check_inputs: Makes the inputs of the comparison; called on first use of a device.
            exact: The same computation in float64 on the host; gives NumPy arrays. With it the
                device's own rounding of the reference does not count against the kernel.
            tolerance: Largest accepted difference, relative to the largest magnitude of the
                right result. Integer and boolean results must be equal. With ``exact``, twice
                the error of ``reference`` is accepted as well, up to ``CEILING``.

        Returns:
            A callable like ``reference``.
        """
        key = kernel_key(name, source)
        if key not in self._kernels:
            self._kernels[key] = Kernel(
                name=name,
                unique_name=f"{name}_{hashlib.sha256(key).hexdigest()[:16]}",
                build=build,
                reference=reference,
                exact=exact,
                check_inputs=check_inputs,
                tolerance=tolerance,
            )
        return self._kernels[key]

    def report(self) -> tuple[KernelReport, ...]:
        """Say how every kernel used so far fares, for ``client.info``."""
        return tuple(line for kernel in list(self._kernels.values()) for line in kernel.reports())


def _device_name() -> str:
    return str(load_mlx().default_device())


def _as_tuple(result: Any) -> tuple[mx.array, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _layout(arrays: tuple[mx.array, ...]) -> list[tuple[tuple[int, ...], str]]:
    return [(array.shape, str(array.dtype)) for array in arrays]


def _largest_error(got: tuple[mx.array, ...], wanted: tuple[mx.array, ...]) -> float:
    return max((_relative_error(g, w) for g, w in zip(got, wanted, strict=True)), default=0.0)


def _relative_error(got: mx.array, wanted: mx.array) -> float:
    """Largest difference relative to the largest magnitude wanted; infinite for other NaNs."""
    core = load_mlx()
    if wanted.size == 0:
        return 0.0
    if not core.issubdtype(wanted.dtype, core.inexact):
        return 0.0 if core.array_equal(got, wanted).item() else float("inf")
    if core.issubdtype(wanted.dtype, core.floating):
        got, wanted = got.astype(core.float32), wanted.astype(core.float32)
    same = core.logical_or(got == wanted, core.logical_and(core.isnan(got), core.isnan(wanted)))
    difference = core.where(same, 0.0, core.abs(got - wanted)).max().item()
    finite = core.where(core.isfinite(wanted), core.abs(wanted), 0.0).max().item()
    if difference == 0.0:
        return 0.0
    # A NaN or an infinity in one of them alone makes the difference NaN or infinite.
    return float(difference / finite) if finite > 0.0 and difference == difference else float("inf")
