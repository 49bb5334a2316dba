"""A tiny family whose replies are written into its weights, for tests of everything around a model.

Each token has one successor, so a greedy reply is known in advance. The model still is a real one:
its attention layer reads and fills a cache, and its logits depend a little on the whole context.
The module is itself the plugin: pass it as ``Plugins.load(extra=[scripted])``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from engine_core.family import Architecture, FamilyInfo, Full, WeightPlan
from engine_core.markers import hookimpl
from engine_core.testing.checkpoints import write_checkpoint
from engine_core.testing.tokenizers import byte_level_tokenizer_json

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from engine_core.checkpoint.config import CheckpointConfig
    from engine_core.family import TensorInfo
    from engine_core.step import BuildContext, CausalLM

__all__ = ["CHAT_TEMPLATE", "Scripted", "write_scripted_checkpoint"]

FAMILY: Final = "scripted"
HEAD_DIM: Final = 8
CONTEXT_LENGTH: Final = 2048
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@hookimpl
def engine_families() -> Iterable[FamilyInfo]:
    """Own checkpoints whose ``model_type`` is ``scripted``.

    Returns:
        One family.
    """
    return [FamilyInfo(name=FAMILY, model_types={FAMILY})]


@hookimpl
def engine_weight_plan() -> WeightPlan:
    """Keep every name.

    Returns:
        A plan without rules.
    """
    return WeightPlan(rules=())


@hookimpl
def engine_architecture(
    config: CheckpointConfig, tensors: Mapping[str, TensorInfo]
) -> Architecture:
    """Describe the model.

    Args:
        config: Parsed ``config.json``.
        tensors: Mapped key -> header facts.

    Returns:
        One attention layer.
    """
    del tensors
    vocab_size = config.integer("vocab_size", minimum=1)

    def build(context: BuildContext) -> CausalLM:
        from engine_core.testing.scripted_model import ScriptedModel

        del context
        return ScriptedModel(vocab_size, HEAD_DIM)

    return Architecture(
        build=build,
        layers=(Full(kv_heads=1, head_dim=HEAD_DIM),),
        vocab_size=vocab_size,
        hidden_size=vocab_size,
        context_length=config.integer("max_position_embeddings", default=CONTEXT_LENGTH),
    )


class Scripted:
    """A tokenizer and the successor of each of its tokens.

    Attributes:
        tokenizer_json: ``tokenizer.json``.
        successors: Token id -> the id that follows it; others are followed by ``eos``.
        eos: Id of the end of a turn.
        vocab_size: Number of ids.
    """

    def __init__(self, tokenizer_json: bytes | None = None, *, end: str = "<|im_end|>") -> None:
        """Start without any script: everything is followed by the end.

        Args:
            tokenizer_json: Tokenizer to use instead of the byte-level one.
            end: Text of the token that ends a turn.
        """
        from engine_core.text.tokenizer import Tokenizer

        self.tokenizer_json = (
            byte_level_tokenizer_json() if tokenizer_json is None else tokenizer_json
        )
        self.tokenizer = Tokenizer.from_bytes(self.tokenizer_json)
        self.vocab_size = self.tokenizer.vocab_size
        self.eos = self.id(end)
        self.successors: dict[int, int] = {}

    def id(self, text: str) -> int:
        """Give the id of a text that is one token.

        Args:
            text: The text.

        Returns:
            Its id.

        Raises:
            ValueError: It is not exactly one token.
        """
        found = self.tokenizer.token_id(text)
        ids = self.tokenizer.encode(text) if found is None else [found]
        if len(ids) != 1:
            msg = f"{text!r}: must be one token, got {ids!r}"
            raise ValueError(msg)
        return ids[0]

    def say(self, after: str, reply: str | Sequence[int], *, loops: bool = False) -> list[int]:
        """Write a reply into the script.

        Args:
            after: The token after which it starts, a line break for the chat template's prompt.
            reply: Text or ids; no token may occur twice in the script.
            loops: Start again at its first token instead of ending.

        Returns:
            Ids of the reply, the end included unless it loops.

        Raises:
            ValueError: A token has a successor already.
        """
        ids = self.tokenizer.encode(reply) if isinstance(reply, str) else list(reply)
        chain = [self.id(after), *ids, ids[0] if loops else self.eos]
        for token, following in pairwise(chain):
            if self.successors.setdefault(token, following) != following:
                msg = f"token {token}: must have one successor, got a second one"
                raise ValueError(msg)
        return ids if loops else [*ids, self.eos]


def write_scripted_checkpoint(
    directory: str | os.PathLike[str],
    script: Scripted,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    has_tokenizer: bool = True,
    padded_rows: int = 0,
    **config: Any,
) -> Path:
    """Write a checkpoint that follows a script.

    Args:
        directory: Created when absent.
        script: What it says.
        chat_template: Template source, ``None`` for none.
        has_tokenizer: Whether to write the tokenizer.
        padded_rows: Rows of the vocabulary beyond the tokenizer's ids.
        **config: Further entries of ``config.json``.

    Returns:
        The directory.
    """
    rows = script.vocab_size + padded_rows
    generator = np.random.Generator(np.random.PCG64(3))
    head = np.zeros((rows, rows), np.float32)
    for token in range(rows):
        head[script.successors.get(token, script.eos), token] = 8.0
    # A padded row that won would show at once.
    head[script.vocab_size :] = 0.0
    head[script.vocab_size :, :] += 9.0 if padded_rows else 0.0
    small = {
        f"{name}.weight": generator.normal(0.0, 0.05, (HEAD_DIM, rows)).astype(np.float32)
        for name in ("query", "key", "value")
    }
    return write_checkpoint(
        directory,
        {
            "model_type": FAMILY,
            "vocab_size": rows,
            "eos_token_id": script.eos,
            **config,
        },
        {
            "embedding.weight": np.eye(rows, dtype=np.float32),
            "output.weight": generator.normal(0.0, 0.01, (rows, HEAD_DIM)).astype(np.float32),
            "head_projection.weight": head,
            **small,
        },
        tokenizer=script.tokenizer_json if has_tokenizer else None,
        chat_template=chat_template,
    )
