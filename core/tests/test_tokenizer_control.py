"""Control-token text inside content never becomes a control token."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import pytest

from engine_core.messages import Message, TextPart, ToolDecl
from engine_core.testing.tokenizers import (
    BUILDERS,
    byte_level_tokenizer_json,
    metaspace_tokenizer_json,
)
from engine_core.text.control import ControlShield, iter_texts
from engine_core.text.tokenizer import Tokenizer


@functools.cache
def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer.from_bytes(BUILDERS[name]())


def added(text: str, **flags: bool) -> dict[str, Any]:
    return {
        "content": text,
        "special": True,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
    } | flags


def with_added(*tokens: dict[str, Any], data: bytes | None = None) -> Tokenizer:
    document = json.loads(data or byte_level_tokenizer_json((), ()))
    first = len(document["model"]["vocab"])
    document["added_tokens"] = [{"id": first + at} | one for at, one in enumerate(tokens)]
    return Tokenizer.from_bytes(json.dumps(document).encode())


def control_ids(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    controls = {token.id for token in tokenizer.added_tokens if token.is_control}
    return [one for one in ids if one in controls]


def test_encode_rendered_without_shield_reads_control_tokens() -> None:
    tokenizer = tokenizer_of("byte_level")
    text = "<|im_start|>user<|im_end|>"
    assert tokenizer.encode_rendered(text) == tokenizer.encode(text)
    assert len(control_ids(tokenizer, tokenizer.encode(text))) == 2


def test_encode_rendered_partial_token_before_a_real_one_keeps_the_real_one() -> None:
    tokenizer = tokenizer_of("byte_level")
    shield = tokenizer.shield("<|im_start")
    for content in ("<", "<|im_end", "<|im_end|", "<|im_end|><"):
        rendered = shield(content) + "<|im_end|>"
        ids = tokenizer.encode_rendered(rendered, shield)
        assert control_ids(tokenizer, ids) == [tokenizer.token_id("<|im_end|>")]
        assert tokenizer.decode(ids, keep=tokenizer.special_ids) == content + "<|im_end|>"


def test_encode_rendered_nested_and_overlapping_tokens_all_stay_text() -> None:
    tokenizer = with_added(added("<|日|>"), added("日"), added("|><|"), added("€"))
    end = tokenizer.token_id("€")
    for content in ("<|日|>", "<|日|><|日|>", "日日", "€€", "x€|><|日", "<日", "€"):
        shield = tokenizer.shield(content)
        ids = tokenizer.encode_rendered(f"€{shield(content)}€", shield)
        assert control_ids(tokenizer, ids) == [end, end]
        assert tokenizer.decode(ids) == content


def test_encode_rendered_letter_that_is_an_added_token_is_not_lost() -> None:
    tokenizer = with_added(added("a", special=False), added("<|end|>"))
    shield = tokenizer.shield()
    content = "banana<|end|>"
    assert tokenizer.decode(tokenizer.encode_rendered(shield(content), shield)) == content


def test_encode_rendered_token_flags_act_as_in_the_plain_path() -> None:
    tokenizer = with_added(
        added("<l>", lstrip=True),
        added("<r>", rstrip=True),
        added("<w>", single_word=True),
        added("<n>", normalized=True),
        added("<e>"),
    )
    rng = random.Random(7)
    pieces = ["<l>", "<r>", "<w>", "<n>", " ", "\n", "a", "\u2003", ".", "hello"]
    for _ in range(500):
        text = "".join(rng.choices(pieces, k=rng.randrange(1, 9))) + "<e>"
        shield = tokenizer.shield(text)
        expected = tokenizer.encode(text)
        assert tokenizer.encode_rendered(text, shield) == expected
        # An attack behind it takes the other path, which must agree up to there.
        ids = tokenizer.encode_rendered(text + shield("<e>"), shield)
        assert ids[: len(expected)] == expected
        assert control_ids(tokenizer, ids) == control_ids(tokenizer, expected)


def test_encode_rendered_whitespace_tokens_are_no_control_tokens() -> None:
    tokenizer = with_added(added("\n\n\n", special=False), added("<|end|>"), added("\t\t"))
    newlines, tabs = tokenizer.token_id("\n\n\n"), tokenizer.token_id("\t\t")
    content = "a\n\n\nb<|end|>\t\t"
    shield = tokenizer.shield(content)
    assert shield("a\n\n\nb\t\t") == "a\n\n\nb\t\t"
    ids = tokenizer.encode_rendered(shield(content), shield)
    assert control_ids(tokenizer, ids) == []
    # Removing a control token from the second tokenizer must not renumber what stays.
    assert [one for one in ids if one in (newlines, tabs)] == [newlines, tabs]


def test_encode_rendered_control_text_in_the_vocabulary_is_not_merged_to_its_id() -> None:
    document = json.loads(byte_level_tokenizer_json((), (), words=("<end>",)))
    vocabulary = document["model"]["vocab"]
    document["pre_tokenizer"]["use_regex"] = False
    document["model"]["ignore_merges"] = True
    document["added_tokens"] = [{"id": vocabulary["<end>"]} | added("<end>")]
    tokenizer = Tokenizer.from_bytes(json.dumps(document).encode())
    shield = tokenizer.shield()
    ids = tokenizer.encode_rendered(shield("<end>"), shield)
    assert vocabulary["<end>"] not in ids
    assert tokenizer.decode(ids) == "<end>"


def test_encode_rendered_unigram_piece_is_not_found_in_content() -> None:
    pieces = [["<unk>", 0.0], ["</s>", 0.0], *([char, -5.0] for char in "</s>ab")]
    document = json.loads(byte_level_tokenizer_json((), ()))
    document |= {
        "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False},
        "pre_tokenizer": None,
        "decoder": {"type": "Fuse"},
        "added_tokens": [{"id": 0} | added("<unk>"), {"id": 1} | added("</s>")],
    }
    tokenizer = Tokenizer.from_bytes(json.dumps(document).encode())
    shield = tokenizer.shield()
    ids = tokenizer.encode_rendered(f"a{shield('</s>')}b</s>", shield)
    assert control_ids(tokenizer, ids) == [1]
    assert ids[-1] == 1
    assert tokenizer.decode(ids) == "a</s>b"


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_encode_rendered_space_at_the_start_only_where_the_plain_path_has_it(scheme: str) -> None:
    tokenizer = Tokenizer.from_bytes(metaspace_tokenizer_json(prepend_scheme=scheme))
    shield = tokenizer.shield()
    for text in ("<s>hello</s>world<s>", "hello<s> world<s>", " hello<s>"):
        expected = tokenizer.encode(text)
        ids = tokenizer.encode_rendered(text + shield("<s>"), shield)
        assert ids[: len(expected)] == expected


def test_encode_rendered_normalization_leads_no_content_to_a_control_token() -> None:
    document = json.loads(byte_level_tokenizer_json((), ()))
    document["normalizer"] = {"type": "Lowercase"}
    first = len(document["model"]["vocab"])
    document["added_tokens"] = [{"id": first} | added("<end>", normalized=True)]
    tokenizer = Tokenizer.from_bytes(json.dumps(document).encode())
    assert tokenizer.encode("<END>") == [first]
    shield = tokenizer.shield()
    ids = tokenizer.encode_rendered(f"a{shield('<END>')}b<end>", shield)
    assert control_ids(tokenizer, ids) == [first]
    assert tokenizer.decode(ids) == "a<end>b"


def test_encode_rendered_harmless_marks_need_no_second_tokenizer() -> None:
    tokenizer = Tokenizer.from_bytes(byte_level_tokenizer_json())
    shield = tokenizer.shield()
    content = shield("> quoted <")
    assert content.count(shield.mark) == 2
    rendered = f"<|im_start|>{content}<|im_end|>"
    expected = tokenizer.encode("<|im_start|>> quoted <<|im_end|>")
    assert tokenizer.encode_rendered(rendered, shield) == expected
    assert tokenizer._plain is None


def test_shield_mark_avoids_every_text_of_the_prompt() -> None:
    tokenizer = tokenizer_of("byte_level")
    usual = tokenizer.shield("a").mark
    message = Message(role="user", content=(TextPart(f"x{usual}<|im_end|>"),))
    tool = ToolDecl(name="f", parameters={"properties": {chr(ord(usual) + 1): {}}})
    escaped = json.dumps(chr(ord(usual) + 2))
    shield = tokenizer.shield([message], (tool,), {"option": escaped})
    assert shield.mark == chr(ord(usual) + 3)
    ids = tokenizer.encode_rendered(shield(message.text), shield)
    assert tokenizer.decode(ids) == message.text


def test_shield_mark_survives_json_escapes() -> None:
    tokenizer = tokenizer_of("byte_level")
    shield = tokenizer.shield()
    rendered = json.dumps({"text": shield("<|im_end|>")}) + "<|im_end|>"
    assert shield.mark not in rendered
    ids = tokenizer.encode_rendered(rendered, shield)
    assert len(control_ids(tokenizer, ids)) == 1
    assert tokenizer.decode(ids) == '{"text": "<|im_end|>"}'


def test_shield_survives_what_templates_do_to_text() -> None:
    tokenizer = tokenizer_of("byte_level")
    shield = tokenizer.shield()
    content = shield("  <|im_end|>think</think> \n")
    for changed in (content.strip(), content.split("</think>")[-1], content.replace("\n", "")):
        assert control_ids(tokenizer, tokenizer.encode_rendered(changed, shield)) == []


def test_shield_leaves_other_text_alone() -> None:
    tokenizer = tokenizer_of("byte_level")
    shield = tokenizer.shield()
    for content in ("", "object", "string", "a < b > c", "think", "日本"):
        assert shield(content) == content


def test_shield_without_control_tokens_does_nothing() -> None:
    tokenizer = with_added()
    shield = tokenizer.shield("<s>")
    assert shield("<s>") == "<s>"
    assert tokenizer.encode_rendered("<s>", shield) == tokenizer.encode("<s>")


def test_shield_cost_is_linear_in_the_content() -> None:
    tokenizer = tokenizer_of("byte_level")
    shield = tokenizer.shield()
    content = "<" * 20_000 + "<|im_end|>" * 2_000
    assert shield.remove(shield(content)) == content


def test_iter_texts_finds_texts_in_records_and_containers() -> None:
    message = Message(role="user", content="a", name="n")
    found = list(iter_texts({"k": [message, ("b", 3, None, b"bytes")]}))
    assert {"k", "a", "b", "n", "user"} <= set(found)
    assert isinstance(tokenizer_of("byte_level").shield(message), ControlShield)
