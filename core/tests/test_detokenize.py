"""Incremental decoding equals whole-sequence decoding, for every kind of tokenizer."""

from __future__ import annotations

import functools
import json
import random

import pytest
import tokenizers

from engine_core.testing.tokenizers import (
    BUILDERS,
    byte_level_tokenizer_json,
    metaspace_tokenizer_json,
    strip_fallback_tokenizer_json,
)
from engine_core.text.detokenize import Detokenizer
from engine_core.text.tokenizer import Tokenizer


@functools.cache
def both(name: str) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """Ours, and the library's own as the oracle."""
    data = BUILDERS[name]()
    return Tokenizer.from_bytes(data), tokenizers.Tokenizer.from_str(data.decode())


def test_detokenizer_byte_run_waits_until_it_ends() -> None:
    tokenizer, _ = both("replace_fallback")
    euro = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in (0xE2, 0x82, 0xAC)]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(one) for one in euro if one is not None] == ["", "", ""]
    assert detokenizer.push(tokenizer.token_id("a") or 0) == "€a"
    # A complete character followed by a stray byte: the library reads both as one invalid run.
    for one in [*euro, euro[0]]:
        assert detokenizer.push(one or 0) == ""
    assert detokenizer.finish() == "\ufffd" * 4


def test_detokenizer_leading_space_is_stripped_once() -> None:
    tokenizer = Tokenizer.from_bytes(strip_fallback_tokenizer_json())
    ids = tokenizer.encode("hello the world")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids[0]) == ""
    assert tokenizer.decode(ids) == "hello the world"


def test_detokenizer_hidden_special_between_halves_of_a_character_joins_them() -> None:
    tokenizer = Tokenizer.from_bytes(byte_level_tokenizer_json())
    special = tokenizer.token_id("<|im_end|>")
    halves = [tokenizer.token_id("Ã"), tokenizer.token_id("©")]
    ids = [one for one in (halves[0], special, halves[1]) if one is not None]
    for keep, expected in ((frozenset[int](), "é"), (tokenizer.special_ids, "�<|im_end|>�")):
        detokenizer = Detokenizer(tokenizer, keep=keep)
        text = "".join(detokenizer.push(one) for one in ids) + detokenizer.finish()
        assert text == expected == tokenizer.decode(ids, keep=keep)


def test_detokenizer_long_invalid_run_gives_text_as_it_goes() -> None:
    tokenizer, _ = both("byte_level")
    stray = tokenizer.token_id("ÿ")
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(stray or 0) for _ in range(1000)] == ["\ufffd"] * 1000


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
        {"type": "Replace", "pattern": {"Regex": "[ab]"}, "content": "x"},
        {"type": "Strip", "content": "a", "start": 2, "stop": 0},
        {"type": "Fuse"},
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Fuse"},
                {"type": "Replace", "pattern": {"String": "e"}, "content": "12"},
                {"type": "Strip", "content": "h", "start": 2, "stop": 0},
            ],
        },
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Fuse"},
                {"type": "Replace", "pattern": {"String": "el"}, "content": "12"},
            ],
        },
        *(
            json.loads(metaspace_tokenizer_json(prepend_scheme=scheme))["decoder"]
            for scheme in ("never", "always")
        ),
    ],
)
def test_detokenizer_other_decoders_equal_whole_decoding(decoder: object) -> None:
    document = json.loads(metaspace_tokenizer_json()) | {"decoder": decoder}
    data = json.dumps(document)
    tokenizer, library = Tokenizer.from_bytes(data.encode()), tokenizers.Tokenizer.from_str(data)
    rng = random.Random(5)
    for _ in range(100):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(12))]
        ids += tokenizer.encode(rng.choice(["hello", "aabb the", "hhello"]))
        detokenizer = Detokenizer(tokenizer)
        text = "".join(detokenizer.push(one) for one in ids) + detokenizer.finish()
        assert text == library.decode(ids)
