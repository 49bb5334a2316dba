"""Parsing, encoding, special tokens and unknown ids."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from engine_core.checkpoint.config import CheckpointConfig
from engine_core.errors import ConfigError, TokenizerError
from engine_core.limits import LIMITS
from engine_core.testing.tokenizers import (
    BUILDERS,
    byte_level_tokenizer_json,
    strip_fallback_tokenizer_json,
)
from engine_core.text.eos import eos_token_ids
from engine_core.text.tokenizer import Tokenizer

BYTE_LEVEL = Tokenizer.from_bytes(byte_level_tokenizer_json())


def edited(**changes: Any) -> bytes:
    return json.dumps(json.loads(byte_level_tokenizer_json()) | changes).encode()


def config(data: dict[str, object]) -> CheckpointConfig:
    return CheckpointConfig(data, name="tokenizer_config.json")


@pytest.mark.parametrize("kind", BUILDERS)
def test_builder_text_round_trips(kind: str) -> None:
    tokenizer = Tokenizer.from_bytes(BUILDERS[kind]())
    text = "hello the world: 日本 é \n\ttools 🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("hello") != tokenizer.encode("h e l l o")
    assert len(tokenizer.encode("hello")) < len("hello")


def test_encode_added_token_gives_its_id_without_special_tokens() -> None:
    ids = BYTE_LEVEL.encode("<|im_start|>user")
    assert ids[0] == BYTE_LEVEL.token_id("<|im_start|>")
    assert BYTE_LEVEL.token_text(ids[0]) == "<|im_start|>"
    assert BYTE_LEVEL.decode(ids) == "user"
    assert BYTE_LEVEL.decode(ids, keep=ids[:1]) == "<|im_start|>user"


def test_encode_post_processor_runs_only_when_asked() -> None:
    piece = {"Sequence": {"id": "A", "type_id": 0}}
    bos = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    start = BYTE_LEVEL.token_id("<|im_start|>")
    special = {"id": "<|im_start|>", "ids": [start], "tokens": ["<|im_start|>"]}
    processor = {
        "type": "TemplateProcessing",
        "single": [bos, piece],
        "pair": [bos, piece, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": special},
    }
    tokenizer = Tokenizer.from_bytes(edited(post_processor=processor))
    plain = tokenizer.encode("user")
    assert tokenizer.encode("user", add_special_tokens=True) == [start, *plain]


def test_from_bytes_truncation_and_padding_in_the_file_are_off() -> None:
    truncation = {
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
        "direction": "Right",
    }
    padding = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    tokenizer = Tokenizer.from_bytes(edited(truncation=truncation, padding=padding))
    text = "a longer text than two tokens"
    assert tokenizer.encode(text) == BYTE_LEVEL.encode(text)


def test_from_bytes_merge_dropout_is_off() -> None:
    model = json.loads(byte_level_tokenizer_json())["model"] | {"dropout": 0.5}
    tokenizer = Tokenizer.from_bytes(edited(model=model))
    text = "hello the world " * 8
    assert tokenizer.encode(text) == BYTE_LEVEL.encode(text)
    shield = tokenizer.shield()
    rendered = text + shield("<think>")
    expected = BYTE_LEVEL.encode_rendered(rendered, shield)
    assert tokenizer.encode_rendered(rendered, shield) == expected


def test_from_bytes_decoder_that_strips_token_ends_is_refused() -> None:
    strip = {"type": "Strip", "content": " ", "start": 0, "stop": 1}
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_bytes(edited(decoder={"type": "Sequence", "decoders": [strip]}))
    assert caught.value.code == "tokenizer.decoder"


def test_added_tokens_are_listed_with_their_flag() -> None:
    flags = {token.text: token.special for token in BYTE_LEVEL.added_tokens}
    assert flags["<|im_end|>"] is True
    assert flags["<think>"] is False
    assert BYTE_LEVEL.special_ids == {
        BYTE_LEVEL.token_id("<|im_start|>"),
        BYTE_LEVEL.token_id("<|im_end|>"),
    }


def test_marker_ids_special_parts_of_markers_are_found() -> None:
    tokenizer = Tokenizer.from_bytes(byte_level_tokenizer_json(("<|chan|>", "<|im_end|>"), ()))
    assert tokenizer.marker_ids(["<|chan|>thought"]) == {tokenizer.token_id("<|chan|>")}
    assert tokenizer.marker_ids([]) == frozenset()


def test_unknown_ids_padded_rows_and_holes_are_listed() -> None:
    document = json.loads(byte_level_tokenizer_json((), ()))
    text, moved = document["model"]["vocab"].popitem()
    document["model"]["merges"] = [
        one for one in document["model"]["merges"] if "".join(one) != text
    ]
    document["model"]["vocab"][text] = moved + 3
    document["model"]["merges"] = []
    tokenizer = Tokenizer.from_bytes(json.dumps(document).encode())
    assert tokenizer.vocab_size == moved + 4
    assert tokenizer.unknown_ids(moved + 6) == (moved, moved + 1, moved + 2, moved + 4, moved + 5)
    assert tokenizer.token_text(moved) is None
    assert tokenizer.decode([moved, 0, 10**9, -1]) == tokenizer.decode([0])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b"nonsense",
        edited(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}),
        edited(pre_tokenizer={"type": "Unheard"}),
    ],
)
def test_from_bytes_damaged_file_is_a_typed_error(data: bytes) -> None:
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_bytes(data)
    assert caught.value.code == "tokenizer.invalid"
    assert str(caught.value).startswith("tokenizer.json: ")
    assert caught.value.__cause__ is not None


def test_from_bytes_oversized_file_is_refused_unread() -> None:
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_bytes(b"{" * 11, limits=attrs.evolve(LIMITS, tokenizer_bytes=10))
    assert caught.value.code == "tokenizer.size"


def test_encode_lone_surrogate_is_a_typed_error() -> None:
    with pytest.raises(TokenizerError):
        BYTE_LEVEL.encode("a\ud800")


def test_encode_model_without_unknown_token_is_a_typed_error() -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "missing"}
    tokenizer = Tokenizer.from_bytes(edited(model=model, added_tokens=[], pre_tokenizer=None))
    with pytest.raises(TokenizerError):
        tokenizer.encode("b")


@pytest.mark.parametrize(
    ("value", "expected"),
    [("</s>", "</s>"), ({"content": "</s>", "lstrip": False}, "</s>"), (None, None), ("", None)],
)
def test_special_text_each_spelling_is_read(value: object, expected: str | None) -> None:
    tokenizer = Tokenizer.from_bytes(
        strip_fallback_tokenizer_json(), config=config({"eos_token": value, "bos_token": "<s>"})
    )
    assert tokenizer.eos_text == expected
    assert tokenizer.bos_text == "<s>"


@pytest.mark.parametrize("value", [3, ["</s>"], {"text": "</s>"}, {"content": 4}])
def test_special_text_malformed_is_a_typed_error(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Tokenizer.from_bytes(strip_fallback_tokenizer_json(), config=config({"eos_token": value}))
    assert caught.value.code == "config.special_token"


def test_eos_ids_all_sources_are_united() -> None:
    tokenizer = Tokenizer.from_bytes(
        byte_level_tokenizer_json(), config=config({"eos_token": "<|im_end|>"})
    )
    end = tokenizer.token_id("<|im_end|>")
    close = tokenizer.token_id("</think>")
    configs = [
        CheckpointConfig({"eos_token_id": 7}),
        CheckpointConfig({"eos_token_id": [8, 9]}, path="text_config"),
        CheckpointConfig({"eos_token_id": None}, name="generation_config.json"),
    ]
    extra = ["</think>", "two tokens", "<nowhere>"]
    found = eos_token_ids(tokenizer, configs, vocab_size=tokenizer.vocab_size, extra=extra)
    assert found == {7, 8, 9, end, close}


def test_eos_ids_without_tokenizer_configs_count() -> None:
    configs = [CheckpointConfig({"eos_token_id": 1})]
    assert eos_token_ids(None, configs, vocab_size=2, extra=["x"]) == {1}
    assert eos_token_ids(None, [], vocab_size=2) == frozenset()


@pytest.mark.parametrize("value", ["2", -1, 300, True, [1, "2"], {"id": 2}, 1.5, [[1]]])
def test_eos_ids_malformed_is_a_typed_error(value: object) -> None:
    configs = [CheckpointConfig({"eos_token_id": value}, path="text_config")]
    with pytest.raises(ConfigError) as caught:
        eos_token_ids(None, configs, vocab_size=300)
    assert caught.value.code == "config.eos_token_id"
    assert "text_config.eos_token_id" in str(caught.value)
