"""Which token ids end a reply."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.errors import ConfigError
from engine_core.values import shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine_core.checkpoint.config import CheckpointConfig
    from engine_core.text.tokenizer import Tokenizer

__all__ = ["eos_token_ids"]


def eos_token_ids(
    tokenizer: Tokenizer | None,
    configs: Iterable[CheckpointConfig],
    *,
    vocab_size: int,
    extra: Iterable[str] = (),
) -> frozenset[int]:
    """Unite everything that says what ends a reply.

    Published files disagree with one another, and a missed id means a reply that never ends, so
    all of them count.

    Args:
        tokenizer: Gives the end-of-sequence text of ``tokenizer_config.json``; ``None`` when the
            checkpoint has no tokenizer.
        configs: Objects whose ``eos_token_id`` (an integer or a list) counts: ``config.json``, its
            ``text_config``, ``generation_config.json``.
        vocab_size: V; every id must be below it.
        extra: Further texts, such as the end of a turn that the template was seen to write. Each
            counts when it is exactly one token.

    Returns:
        The ids.

    Raises:
        ConfigError: An ``eos_token_id`` is no id, no list of ids, or out of range.
    """
    ids: set[int] = set()
    for config in configs:
        value = config.get("eos_token_id")
        for one in () if value is None else value if isinstance(value, list) else (value,):
            ids.add(_checked(one, config, vocab_size))
    if tokenizer is not None:
        texts = [*([tokenizer.eos_text] if tokenizer.eos_text else []), *extra]
        found = (tokenizer.single_id(text) for text in texts)
        ids.update(one for one in found if one is not None and one < vocab_size)
    return frozenset(ids)


def _checked(value: object, config: CheckpointConfig, vocab_size: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        path = f"{config.path}." if config.path else ""
        raise ConfigError(
            f"{config.name}: {path}eos_token_id must be ids from 0 to {vocab_size - 1}, "
            f"got {shown(value)}",
            code="config.eos_token_id",
        )
    return value
