"""Log-probabilities of chosen and of most probable tokens.

They are the log-softmax of the model's own logits, before bias, penalties, processors, filters and
temperature, so they do not depend on how a token was chosen.
"""

from __future__ import annotations

import attrs
import mlx.core as mx
import numpy as np

from engine_core.decode.sampling import leading_candidates
from engine_core.request import TokenLogprob

__all__ = ["LazyLogprobs", "measure_logprobs"]


@attrs.frozen(kw_only=True, eq=False)
class LazyLogprobs:
    """Log-probabilities at one token, on the device.

    Attributes:
        chosen: ``[1]`` float32.
        top_ids: ``[N]`` int32.
        top_values: ``[N]`` float32.
    """

    chosen: mx.array
    top_ids: mx.array
    top_values: mx.array

    def arrays(self) -> list[mx.array]:
        """List what must be evaluated before :meth:`read`.

        Returns:
            The arrays.
        """
        return [self.chosen, self.top_ids, self.top_values]

    def read(self, token: int) -> TokenLogprob:
        """Copy the values to the host.

        Args:
            token: Id of the chosen token.

        Returns:
            The values.
        """
        ids = np.array(self.top_ids).tolist()
        values = np.array(self.top_values).tolist()
        [logprob] = np.array(self.chosen).tolist()
        return TokenLogprob(
            token_id=token,
            logprob=logprob,
            top=tuple(zip(ids, values, strict=True)),
        )


def measure_logprobs(
    row: mx.array, token: mx.array, top: int, vocab_size: int | None = None
) -> LazyLogprobs:
    """Compute the log-probabilities for one token.

    Args:
        row: ``[V]`` the model's logits.
        token: ``[1]`` id of the chosen token.
        top: How many most probable tokens to list.
        vocab_size: Only ids below it are listed; the normaliser covers the whole row.

    Returns:
        Lazy values.
    """
    row = row.astype(mx.float32)
    log_mass = mx.logsumexp(row)
    named = row if vocab_size is None else row[:vocab_size]
    count = min(top, named.size)
    values, ids, _ = leading_candidates(named, max(count, 1))
    order = mx.argsort(-values)[:count]
    return LazyLogprobs(
        chosen=row[token] - log_mass,
        top_ids=ids[order],
        top_values=values[order] - log_mass,
    )
