"""Tiny tokenizers of the kinds that language models use, written as ``tokenizer.json``.

The vocabularies are made here from a few words, so nothing is downloaded and no published
vocabulary is copied.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from engine_core.text.decoder import BYTES_BY_CHARACTER

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "BUILDERS",
    "byte_level_tokenizer_json",
    "metaspace_tokenizer_json",
    "replace_fallback_tokenizer_json",
    "strip_fallback_tokenizer_json",
]

WORDS: Final = (
    "the",
    "hello",
    "world",
    "tool",
    "call",
    "think",
    "ing",
    "user",
    "name",
    "é",
    "日本",
)
"""Words whose beginnings are tokens."""

SPACE: Final = "\u2581"


def byte_level_tokenizer_json(
    extra_special: Sequence[str] = ("<|im_start|>", "<|im_end|>"),
    extra_plain: Sequence[str] = ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *,
    words: Iterable[str] = WORDS,
) -> bytes:
    """Build a byte-level BPE tokenizer: every byte sequence has an encoding.

    Args:
        extra_special: Added tokens that decoding hides; the first ids after the vocabulary.
        extra_plain: Added tokens that decoding shows.
        words: Words to know, each also with a space before it.

    Returns:
        ``tokenizer.json``.
    """
    characters = {byte: char for char, byte in BYTES_BY_CHARACTER.items()}
    spelled = [
        "".join(characters[byte] for byte in text.encode())
        for word in words
        for text in (word, " " + word)
    ]
    alphabet = [characters[byte] for byte in range(256)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return _document(
        *_bpe(alphabet, spelled),
        added=_added(extra_special, extra_plain),
        pre_tokenizer={**byte_level, "use_regex": True},
        decoder={**byte_level, "use_regex": True},
    )


def metaspace_tokenizer_json(
    extra_special: Sequence[str] = ("<s>", "</s>"),
    extra_plain: Sequence[str] = ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *,
    words: Iterable[str] = WORDS,
    prepend_scheme: str = "first",
) -> bytes:
    """Build a BPE tokenizer whose pre-tokenizer and decoder are Metaspace.

    Args:
        extra_special: Added tokens that decoding hides.
        extra_plain: Added tokens that decoding shows.
        words: Words to know, each also with a space before it.
        prepend_scheme: ``first``, ``always`` or ``never``.

    Returns:
        ``tokenizer.json``.
    """
    metaspace = {
        "type": "Metaspace",
        "replacement": SPACE,
        "prepend_scheme": prepend_scheme,
        "split": True,
    }
    return _document(
        *_fallback_vocabulary(words),
        added=_added(extra_special, extra_plain),
        pre_tokenizer=metaspace,
        decoder={
            "type": "Sequence",
            "decoders": [{"type": "ByteFallback"}, metaspace],
        },
        byte_fallback=True,
    )


def strip_fallback_tokenizer_json(
    extra_special: Sequence[str] = ("<s>", "</s>"),
    extra_plain: Sequence[str] = ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *,
    words: Iterable[str] = WORDS,
) -> bytes:
    """Build a BPE tokenizer that prepends a space in front and strips it when decoding.

    Args:
        extra_special: Added tokens that decoding hides.
        extra_plain: Added tokens that decoding shows.
        words: Words to know, each also with a space before it.

    Returns:
        ``tokenizer.json``.
    """
    return _document(
        *_fallback_vocabulary(words),
        added=_added(extra_special, extra_plain),
        normalizer={
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": SPACE},
                {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
            ],
        },
        decoder={
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        byte_fallback=True,
    )


def replace_fallback_tokenizer_json(
    extra_special: Sequence[str] = ("<bos>", "<eos>"),
    extra_plain: Sequence[str] = ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *,
    words: Iterable[str] = WORDS,
) -> bytes:
    """Build a BPE tokenizer that replaces spaces, falls back to bytes and strips nothing.

    Its added tokens are part of the vocabulary, as some families have them.

    Args:
        extra_special: Added tokens that decoding hides.
        extra_plain: Added tokens that decoding shows.
        words: Words to know, each also with a space before it.

    Returns:
        ``tokenizer.json``.
    """
    added = _added(extra_special, extra_plain)
    vocabulary, merges = _fallback_vocabulary(words)
    for token in added:
        vocabulary[token["content"]] = len(vocabulary)
    return _document(
        vocabulary,
        merges,
        added=added,
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        pre_tokenizer={
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        decoder={
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        byte_fallback=True,
    )


BUILDERS: Final = {
    "byte_level": byte_level_tokenizer_json,
    "metaspace": metaspace_tokenizer_json,
    "replace_fallback": replace_fallback_tokenizer_json,
    "strip_fallback": strip_fallback_tokenizer_json,
}
"""Kind -> builder; each can be called without arguments."""


def _fallback_vocabulary(words: Iterable[str]) -> tuple[dict[str, int], list[list[str]]]:
    alphabet = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE]
    alphabet += [chr(code) for code in range(0x21, 0x7F)] + ["\n"]
    return _bpe(alphabet, [text for word in words for text in (word, SPACE + word)])


def _bpe(alphabet: Iterable[str], words: Iterable[str]) -> tuple[dict[str, int], list[list[str]]]:
    """Make tokens of all beginnings of the words, each merged from the one before."""
    vocabulary: dict[str, int] = {}
    merges: list[list[str]] = []
    for char in alphabet:
        vocabulary.setdefault(char, len(vocabulary))
    for word in words:
        for char in word:
            vocabulary.setdefault(char, len(vocabulary))
        for stop in range(2, len(word) + 1):
            if word[:stop] not in vocabulary:
                vocabulary[word[:stop]] = len(vocabulary)
                merges.append([word[: stop - 1], word[stop - 1]])
    return vocabulary, merges


def _added(special: Iterable[str], plain: Iterable[str]) -> list[dict[str, Any]]:
    marked = [(text, True) for text in special] + [(text, False) for text in plain]
    return [
        {
            "content": text,
            "special": is_special,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for text, is_special in marked
    ]


def _document(
    vocabulary: dict[str, int],
    merges: list[list[str]],
    *,
    added: list[dict[str, Any]],
    decoder: dict[str, Any],
    normalizer: dict[str, Any] | None = None,
    pre_tokenizer: dict[str, Any] | None = None,
    byte_fallback: bool = False,
) -> bytes:
    fresh = len(vocabulary)
    tokens = []
    for token in added:
        known = vocabulary.get(token["content"])
        tokens.append({"id": fresh if known is None else known, **token})
        fresh += known is None
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": tokens,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>" if "<unk>" in vocabulary else None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": byte_fallback,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
    return json.dumps(document, ensure_ascii=False).encode()
