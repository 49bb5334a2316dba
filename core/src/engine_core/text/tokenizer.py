"""A checkpoint's tokenizer, built from bytes that were read and bounded before.

Nothing is fetched and no path is opened: the library only ever parses the text it is given.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import tokenizers

from engine_core.checkpoint.config import CheckpointConfig
from engine_core.errors import ConfigError, TokenizerError
from engine_core.limits import LIMITS, Limits
from engine_core.text.control import ControlShield, ControlTokens
from engine_core.text.decoder import DecoderPlan
from engine_core.text.plain import PlainEncoder
from engine_core.text.repeating import RepeatingEncoder
from engine_core.values import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

__all__ = ["AddedToken", "Tokenizer", "special_text"]

_SHOWN = 200

ResultT = TypeVar("ResultT")


@attrs.frozen(kw_only=True)
class AddedToken:
    """A token that is matched in the text itself, before any other step.

    Attributes:
        id: Token id.
        text: What is matched.
        special: Whether decoding hides it.
        lstrip: Whether it swallows whitespace before it.
        rstrip: Whether it swallows whitespace after it.
        single_word: Whether it must not touch a word character.
        normalized: Whether it is matched after normalization.
    """

    id: int
    text: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False

    @property
    def is_control(self) -> bool:
        """Whether the text has a visible character; runs of white space only are plain text."""
        return any(not char.isspace() and char != "\u2581" for char in self.text)


class Tokenizer:
    """Encodes and decodes text; usable on any thread.

    Attributes:
        added_tokens: Added tokens in id order.
        special_ids: Ids that decoding hides.
        vocab_size: Highest known id + 1; the embedding may have more rows.
        bos_text: Beginning-of-sequence text that the configuration names.
        eos_text: End-of-sequence text that the configuration names.
        decoder: How token texts become text.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, config: CheckpointConfig | None = None
    ) -> None:
        """Wrap a parsed tokenizer; use :meth:`from_bytes`.

        Args:
            backend: The library's object; owned from now on.
            config: Parsed ``tokenizer_config.json``.

        Raises:
            TokenizerError: The decoder is of a kind that fails on some tokens.
            ConfigError: A special token in ``config`` is malformed.
        """
        backend.no_truncation()
        backend.no_padding()
        if getattr(backend.model, "dropout", None) is not None:
            backend.model.dropout = None  # for training; one text must give one encoding
        self._backend = backend
        self.added_tokens = tuple(
            AddedToken(
                id=token_id,
                text=token.content,
                special=token.special,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                single_word=token.single_word,
                normalized=token.normalized,
            )
            for token_id, token in sorted(backend.get_added_tokens_decoder().items())
            if token.content
        )
        self._special = {token.id: token.text for token in self.added_tokens if token.special}
        self.special_ids = frozenset(self._special)
        self._known = frozenset(backend.get_vocab(with_added_tokens=True).values())
        self.vocab_size = max(self._known, default=-1) + 1
        config = CheckpointConfig(name="tokenizer_config.json") if config is None else config
        self.bos_text = special_text(config, "bos_token")
        self.eos_text = special_text(config, "eos_token")
        decoder: Any = backend.decoder
        self.decoder = DecoderPlan.compile(
            None if decoder is None else json.loads(decoder.__getstate__())
        )
        self._controls = ControlTokens(token for token in self.added_tokens if token.is_control)
        # The unknown token is what any unknown character gives; no text has to spell it.
        unknown = self.token_id(getattr(backend.model, "unk_token", None) or "")
        self._control_ids = frozenset(one.id for one in self._controls.tokens) - {unknown}
        self._plain: PlainEncoder | None = None
        self._again = RepeatingEncoder(self.added_tokens, self._encoding)

    @classmethod
    def from_bytes(
        cls, data: bytes, *, config: CheckpointConfig | None = None, limits: Limits = LIMITS
    ) -> Tokenizer:
        """Parse ``tokenizer.json``.

        Args:
            data: The file's bytes, at most ``limits.tokenizer_bytes``.
            config: Parsed ``tokenizer_config.json``.
            limits: Bounds.

        Returns:
            The tokenizer; truncation and padding that the file asks for are off.

        Raises:
            TokenizerError: The file is too large, no UTF-8, or refused by the library, or its
                decoder fails on some tokens.
            ConfigError: A special token in ``config`` is malformed.
        """
        if len(data) > limits.tokenizer_bytes:
            raise TokenizerError(
                f"tokenizer.json: must have at most {limits.tokenizer_bytes} bytes, "
                f"got {len(data)}",
                code="tokenizer.size",
            )
        try:
            text = data.decode()
        except UnicodeDecodeError as exc:
            raise TokenizerError(
                f"tokenizer.json: must be UTF-8, got an invalid byte at {exc.start}",
                code="tokenizer.invalid",
                hint="the file is damaged; fetch it again",
            ) from exc
        backend = _guarded(
            lambda: tokenizers.Tokenizer.from_str(text),
            "tokenizer.json: must be a tokenizer that the tokenizers library reads",
        )
        return cls(backend, config)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Turn text into ids; added tokens in it become their ids.

        Args:
            text: Any Unicode text.
            add_special_tokens: Whether the post-processor adds its tokens (a chat template writes
                them itself).

        Returns:
            Token ids.

        Raises:
            TokenizerError: The text is no valid Unicode or has no encoding.
        """
        return list(self._encoding(text, add_special_tokens=add_special_tokens).ids)

    def shield(self, *values: object) -> ControlShield:
        """Make the shield of one prompt.

        Args:
            *values: Everything the prompt may be made from: messages, tools, options, prefill.

        Returns:
            A shield whose mark occurs in none of them.
        """
        return ControlShield.avoiding(self._controls, values)

    def encode_rendered(self, text: str, shield: ControlShield | None = None) -> list[int]:
        """Encode a rendered prompt so that only the template's control tokens count.

        Ids equal those of :meth:`encode` when no content holds control-token text.

        Args:
            text: What the template rendered from shielded content.
            shield: The shield that was applied to the content; ``None`` for none.

        Returns:
            Token ids.

        Raises:
            TokenizerError: The text is no valid Unicode or has no encoding.
        """
        if shield is None:
            return self.encode(text)
        controls = self._controls
        parts = controls.split(text, shield)
        plain = shield.remove(text)
        if plain == text or list(controls.runs(parts, shield)) == list(
            controls.runs(controls.split(plain, shield), shield)
        ):
            ids = self._again.encode(plain)
            written = [part for part in parts if part in self._control_ids]
            # Normalization or the vocabulary itself may still lead content to a control token.
            if list(filter(self._control_ids.__contains__, ids)) == written:
                return ids
        ids = []
        for at_start, part in controls.runs(parts, shield):
            ids += [part] if isinstance(part, int) else self._encode_run(part, at_start=at_start)
        return ids

    def _encoding(self, text: str, *, add_special_tokens: bool = False) -> tokenizers.Encoding:
        return _guarded(
            lambda: self._backend.encode(text, add_special_tokens=add_special_tokens),
            "text: must be encodable",
        )

    def _encode_run(self, run: str, *, at_start: bool) -> list[int]:
        if self._plain is None:
            self._plain = _guarded(
                lambda: PlainEncoder.without(self._controls.texts, self._backend.to_str()),
                "tokenizer.json: must be usable without its added tokens",
            )
        plain = self._plain
        return _guarded(lambda: plain.encode(run, at_start=at_start), "text: must be encodable")

    def decode(self, ids: Sequence[int], *, keep: Collection[int] = ()) -> str:
        """Turn ids into text; special tokens are hidden, unknown ids give nothing.

        Args:
            ids: Token ids.
            keep: Special ids to show.

        Returns:
            The text.
        """
        shown_ids = [one for one in ids if one in self._known and not self.is_hidden(one, keep)]
        return str(self._backend.decode(shown_ids, skip_special_tokens=False))

    def is_hidden(self, token_id: int, keep: Collection[int] = ()) -> bool:
        """Tell whether decoding leaves a token out.

        Args:
            token_id: Token id.
            keep: Special ids to show.

        Returns:
            Whether it is special and not in ``keep``.
        """
        return token_id in self._special and token_id not in keep

    def marker_ids(self, markers: Iterable[str]) -> frozenset[int]:
        """Find the special tokens that spell markers or parts of them.

        Args:
            markers: Marker texts.

        Returns:
            Ids to keep visible, so that the markers can be found in decoded text.
        """
        whole = tuple(markers)
        return frozenset(
            token_id
            for token_id, text in self._special.items()
            if any(text in marker for marker in whole)
        )

    def token_id(self, text: str) -> int | None:
        """Look a token up.

        Args:
            text: Its text as the vocabulary spells it.

        Returns:
            Its id, ``None`` when there is none.
        """
        try:
            found = self._backend.token_to_id(text)
        except UnicodeEncodeError:  # a lone surrogate, which no token holds
            return None
        return None if found is None else int(found)

    def token_text(self, token_id: int) -> str | None:
        """Give a token's text as the vocabulary spells it.

        Args:
            token_id: Token id.

        Returns:
            The text, ``None`` for an unknown id.
        """
        if token_id not in self._known:
            return None
        found = self._backend.id_to_token(token_id)
        return None if found is None else str(found)

    def single_id(self, text: str) -> int | None:
        """Give the id of a text that is exactly one token.

        Args:
            text: E.g. ``"<end>"``.

        Returns:
            Its id, ``None`` when the text is not in the vocabulary or encodes to other ids.
        """
        found = self.token_id(text)
        if found is None or self.encode(text) != [found]:
            return None
        return found

    def unknown_ids(self, vocab_size: int) -> tuple[int, ...]:
        """List ids that have logits but no token: padded rows, which must never be sampled.

        Args:
            vocab_size: V, rows of the model's head.

        Returns:
            Unknown ids below V, ascending.
        """
        return tuple(one for one in range(vocab_size) if one not in self._known)


def special_text(config: CheckpointConfig, key: str) -> str | None:
    """Read a special token as ``tokenizer_config.json`` spells it: a text or an object.

    Args:
        config: Parsed file.
        key: E.g. ``"eos_token"``.

    Returns:
        The text, ``None`` when absent or empty.

    Raises:
        ConfigError: It is neither a text nor an object with ``content``.
    """
    value = config.get(key)
    if isinstance(value, dict):
        value = value.get("content", value)
    if value is None:
        return None
    if not isinstance(value, str):
        raise ConfigError(
            f"{config.name}: {key} must be a text or an object with content, got {shown(value)}",
            code="config.special_token",
        )
    return value or None


def _guarded(call: Callable[[], ResultT], rule: str) -> ResultT:
    """Call the library; whatever it raises, a Rust panic included, becomes a typed error."""
    try:
        return call()
    except Exception as exc:
        raise TokenizerError(f"{rule}, got {str(exc)[:_SHOWN]!r}") from exc
    except BaseException as exc:
        if type(exc).__name__ != "PanicException":  # the binding exports no name for it
            raise
        raise TokenizerError(f"{rule}, got {str(exc)[:_SHOWN]!r}") from exc
