"""A family whose model emits the token ids it is given, for tests of what happens to a reply.

Unlike :mod:`engine_core.testing.scripted`, whose replies are written into the weights once, a
:class:`Playback` takes any ids for each request, so thousands of replies run through one client.
The plugin is the object itself: ``Client.load(path, plugins=Plugins.load(extra=[playback]))``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from engine_core.family import Architecture, FamilyInfo, Full, WeightPlan
from engine_core.markers import hookimpl
from engine_core.testing.checkpoints import write_checkpoint
from engine_core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from engine_core.checkpoint.config import CheckpointConfig
    from engine_core.client import Client
    from engine_core.events import Progress
    from engine_core.family import TensorInfo
    from engine_core.request import GenerateReply
    from engine_core.step import BuildContext, CausalLM
    from engine_core.streaming import ReplyStream

__all__ = ["Playback"]

FAMILY: Final = "playback"
WIDTH: Final = 4
CONTEXT_LENGTH: Final = 65_536


class Playback:
    """The plugin, its tokenizer, and the reply that the next request gets.

    One request at a time: the ids belong to whichever request runs.

    Attributes:
        tokenizer: Encodes replies.
        end: Id of the end of a turn, emitted after the reply.
        ids: Ids of the reply.
        origin: Length of the running request's prompt (tokens).
    """

    def __init__(self, tokenizer_json: bytes, *, end: str = "<|im_end|>") -> None:
        """Start with an empty reply.

        Args:
            tokenizer_json: Tokenizer of the checkpoint.
            end: Text of the token that ends a turn.

        Raises:
            ValueError: ``end`` is not one token.
        """
        self.tokenizer_json = tokenizer_json
        self.tokenizer = Tokenizer.from_bytes(tokenizer_json)
        found = self.tokenizer.token_id(end)
        if found is None:
            msg = f"{end!r}: must be one token"
            raise ValueError(msg)
        self.end = found
        self.ids: tuple[int, ...] = ()
        self.origin = 0

    @hookimpl
    def engine_families(self) -> Iterable[FamilyInfo]:
        """Own checkpoints whose ``model_type`` is ``playback``."""
        return [FamilyInfo(name=FAMILY, model_types={FAMILY})]

    @hookimpl
    def engine_weight_plan(self) -> WeightPlan:
        """Keep every name."""
        return WeightPlan(rules=())

    @hookimpl
    def engine_architecture(
        self, config: CheckpointConfig, tensors: Mapping[str, TensorInfo]
    ) -> Architecture:
        """Describe one attention layer."""
        del tensors
        rows = config.integer("vocab_size", minimum=1)

        def build(context: BuildContext) -> CausalLM:
            from engine_core.testing.playback_model import PlaybackModel

            del context
            return PlaybackModel(self, rows, WIDTH)

        return Architecture(
            build=build,
            layers=(Full(kv_heads=1, head_dim=WIDTH),),
            vocab_size=rows,
            hidden_size=WIDTH,
            context_length=CONTEXT_LENGTH,
        )

    def write_checkpoint(
        self, directory: str | os.PathLike[str], chat_template: str | None, **config: Any
    ) -> Path:
        """Write a checkpoint for this tokenizer.

        Args:
            directory: Created when absent.
            chat_template: Template source, ``None`` for none.
            **config: Further entries of ``config.json``.

        Returns:
            The directory.
        """
        rows = self.tokenizer.vocab_size
        return write_checkpoint(
            directory,
            {"model_type": FAMILY, "vocab_size": rows, "eos_token_id": self.end, **config},
            {"embedding.weight": np.zeros((rows, WIDTH), np.float32)},
            tokenizer=self.tokenizer_json,
            chat_template=chat_template,
        )

    def encode(self, reply: str | Sequence[int]) -> tuple[int, ...]:
        """Give the ids of a reply.

        Args:
            reply: Text, or ids that are kept as they are.

        Returns:
            The ids.
        """
        return tuple(self.tokenizer.encode(reply) if isinstance(reply, str) else reply)

    def answer(
        self,
        client: Client,
        messages: Sequence[Any],
        reply: str | Sequence[int],
        **options: Any,
    ) -> GenerateReply:
        """Run a request whose reply is given.

        Args:
            client: Loaded with this plugin.
            messages: The conversation.
            reply: What the model emits, the end of the turn left out.
            **options: Options of the request.

        Returns:
            The reply as the engine reports it.
        """
        return client.generate(messages, **self._options(reply, options))

    def stream(
        self,
        client: Client,
        messages: Sequence[Any],
        reply: str | Sequence[int],
        **options: Any,
    ) -> ReplyStream:
        """Do what :meth:`answer` does, event by event.

        Args:
            client: Loaded with this plugin.
            messages: The conversation.
            reply: What the model emits.
            **options: Options of the request.

        Returns:
            The stream.
        """
        return client.stream(messages, **self._options(reply, options))

    def _options(self, reply: str | Sequence[int], options: dict[str, Any]) -> dict[str, Any]:
        self.ids = self.encode(reply)
        return {"max_tokens": len(self.ids) + 1, **options, "on_progress": self._note_prompt}

    def _note_prompt(self, progress: Progress) -> None:
        """Learn the prompt's length before it is fed."""
        self.origin = progress.prompt_tokens
