"""A second tokenizer that cannot produce a control token, whatever the text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs
import tokenizers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

__all__ = ["PlainEncoder"]


@attrs.frozen(eq=False)
class PlainEncoder:
    """Encodes text in which control tokens mean nothing.

    Attributes:
        first: Tokenizer of text at the start of a prompt.
        later: Tokenizer of text that follows a control token; another one only where the
            pre-tokenizer treats the start of the input specially.
        renumbered: Ids that the kept added tokens have here -> ids they have in the checkpoint.
    """

    first: tokenizers.Tokenizer
    later: tokenizers.Tokenizer
    renumbered: dict[int, int]

    @classmethod
    def without(cls, controls: Collection[str], tokenizer_json: str) -> PlainEncoder:
        """Build the tokenizer.

        Args:
            controls: Texts of the tokens that it must not produce.
            tokenizer_json: The full tokenizer, as its own library writes it.

        Returns:
            The encoder.
        """
        data = json.loads(tokenizer_json)
        kept = {
            one["content"]: one["id"]
            for one in data["added_tokens"]
            if one["content"] not in controls
        }
        data["added_tokens"] = [one for one in data["added_tokens"] if one["content"] in kept]
        data["post_processor"] = None
        data["decoder"] = None
        _hide(data["model"], controls)
        first = tokenizers.Tokenizer.from_str(json.dumps(data))
        later = first
        if _never_first(data["pre_tokenizer"]):
            later = tokenizers.Tokenizer.from_str(json.dumps(data))
        # Ids of added tokens depend on how many there are, so those that stay may have moved.
        renumbered = {}
        for text, wanted in kept.items():
            here = first.token_to_id(text)
            if here is not None and here != wanted:
                renumbered[here] = wanted
        return cls(first, later, renumbered)

    def encode(self, run: str, *, at_start: bool) -> list[int]:
        """Encode one run of text.

        Args:
            run: Text between two control tokens.
            at_start: Whether nothing stands before it.

        Returns:
            Token ids.
        """
        tokenizer = self.first if at_start else self.later
        ids = tokenizer.encode(run, add_special_tokens=False).ids
        return [self.renumbered.get(one, one) for one in ids] if self.renumbered else list(ids)


def _hide(model: dict[str, Any], controls: Collection[str]) -> None:
    """Respell control tokens in the model's own vocabulary, so that no text leads to them.

    Ids stay. Merges that build a control token, or build on one, are removed. A token of one
    character stays: it may be the only way to write that character.
    """
    texts = {text for text in controls if len(text) > 1}
    spell = _speller(texts, model)
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {spell(text): one for text, one in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[spell(text), score] for text, score in vocabulary]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = spell(model["unk_token"])
    if isinstance(model.get("merges"), list):
        model["merges"] = [
            merge for merge in model["merges"] if not texts.intersection(_built_from(merge))
        ]


def _built_from(merge: Any) -> tuple[str, ...]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return (left, right, left + right)


def _speller(texts: set[str], model: dict[str, Any]) -> Callable[[str], str]:
    """Give a function that respells the control tokens and leaves every other text alone."""
    taken = set(texts)
    vocabulary = model.get("vocab") or ()
    taken.update(vocabulary if isinstance(vocabulary, dict) else (text for text, _ in vocabulary))
    # U+0000 repeated until no spelling is taken; a pre-token of that shape is not text.
    blank = "\0"
    while any(blank + text in taken for text in texts):
        blank += "\0"
    return lambda text: blank + text if text in texts else text


def _never_first(pre_tokenizer: Any) -> bool:
    """Make a pre-tokenizer treat all text as what follows something; tell whether that changed."""
    if not isinstance(pre_tokenizer, dict):
        return False
    if pre_tokenizer.get("type") == "Sequence":
        changes = [_never_first(one) for one in pre_tokenizer.get("pretokenizers", ())]
        return any(changes)
    if pre_tokenizer.get("prepend_scheme") == "first":
        pre_tokenizer["prepend_scheme"] = "never"
        return True
    return False
