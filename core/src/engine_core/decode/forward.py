"""One guarded forward call: every failure is typed and names the position it happened at."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from engine_core.backend import evaluation_error
from engine_core.errors import EngineError, ModelError
from engine_core.step import StepInput
from engine_core.values import reason_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.cache.base import LayerCache
    from engine_core.step import CausalLM

__all__ = [
    "forward_hidden",
    "head_rows",
    "non_finite_error",
    "queue",
    "wait_for_queued",
]


def forward_hidden(
    model: CausalLM, caches: Sequence[LayerCache], ids: mx.array, position: int
) -> mx.array:
    """Run the layers over one block of rows.

    Args:
        model: The family's model.
        caches: One cache a layer; they grow by ``L`` rows.
        ids: ``[1, L]`` int32.
        position: Absolute position of the first row (tokens).

    Returns:
        ``[1, L, H]`` after the final norm, not evaluated.

    Raises:
        ModelError: The model raised or gave back another number of rows; the caches hold an
            unknown part of the block and must not be used again.
        BackendError: An evaluation inside the model failed; the same holds.
    """
    try:
        hidden = model.forward(StepInput(ids=ids, positions=position), caches).hidden
    except EngineError:
        raise
    except RuntimeError as exc:
        # So MLX reports a failed evaluation, perhaps of work queued before.
        raise evaluation_error(exc) from exc
    except (Exception, SystemExit) as exc:
        # The plugin boundary: whatever a family's code raises becomes one typed error.
        raise ModelError(
            f"forward: must run at position {position}, got {reason_of(exc)}",
            code="model.forward",
            hint="the family plugin's forward raised; its own error is the cause",
        ) from exc
    if hidden.ndim != 3 or hidden.shape[:2] != ids.shape:
        raise ModelError(
            f"forward: hidden rows must have shape {(*ids.shape, 'H')!r}, got {hidden.shape!r}",
            code="model.shape",
        )
    return hidden


def head_rows(model: CausalLM, hidden: mx.array, position: int) -> mx.array:
    """Project hidden rows to the vocabulary.

    Args:
        model: The family's model.
        hidden: ``[1, N, H]``, only rows whose logits somebody reads.
        position: Absolute position of the first row (tokens), for the error message.

    Returns:
        ``[N, V]`` logits, not evaluated.

    Raises:
        ModelError: The head raised or gave back another shape.
        BackendError: An evaluation inside the model failed.
    """
    try:
        logits = model.head(hidden)
    except EngineError:
        raise
    except RuntimeError as exc:
        raise evaluation_error(exc) from exc
    except (Exception, SystemExit) as exc:
        # The plugin boundary, as in forward_hidden.
        raise ModelError(
            f"head: must run at position {position}, got {reason_of(exc)}",
            code="model.forward",
            hint="the family plugin's head raised; its own error is the cause",
        ) from exc
    if logits.ndim != 3 or logits.shape[:2] != hidden.shape[:2] or logits.shape[2] == 0:
        raise ModelError(
            f"head: logits must have shape {(*hidden.shape[:2], 'V')!r}, got {logits.shape!r}",
            code="model.shape",
        )
    return logits[0]


def non_finite_error(position: int) -> ModelError:
    """Build the error for a logit row that holds NaN or infinity.

    Args:
        position: Absolute position of the fed token whose row it is (tokens).

    Returns:
        The error to raise.
    """
    return ModelError(
        f"logits: every value must be finite, got a non-finite row at position {position}",
        code="model.non_finite",
        hint="the weights or the compute dtype make the model overflow; try compute_dtype=float32",
    )


def queue(arrays: Sequence[mx.array]) -> None:
    """Start evaluating arrays without waiting for them.

    MLX reports a fault of queued work once, to whichever call comes next, and afterwards reads the
    arrays it concerns as if they were fine. So an error raised here may be about earlier work.

    Args:
        arrays: Lazy arrays, evaluated together.

    Raises:
        BackendError: The device refused the work, or failed earlier work.
    """
    try:
        mx.async_eval(*arrays)  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError, MemoryError, OSError) as exc:
        raise evaluation_error(exc) from exc


def wait_for_queued() -> None:
    """Wait until everything queued is done, so that no fault of it surfaces in later work.

    Raises:
        BackendError: Some of it failed.
    """
    try:
        mx.synchronize()
    except RuntimeError as exc:
        raise evaluation_error(exc) from exc
