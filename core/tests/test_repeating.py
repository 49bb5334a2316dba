"""Encoding from the last added token shared with an earlier text: ids of a full encoding."""

from __future__ import annotations

import json
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest

from engine_core.testing.tokenizers import (
    BUILDERS,
    byte_level_tokenizer_json,
    metaspace_tokenizer_json,
)
from engine_core.text import repeating
from engine_core.text.repeating import RepeatingEncoder, shared_length
from engine_core.text.tokenizer import Tokenizer

SHARED = Path(__file__).parents[3] / "shared" / "data" / "tokenizers"
# Tokens that overlap, touch white space or depend on what stands around them.
FLAGS: list[dict[str, Any]] = [
    {"content": "<a>"},
    {"content": "<a><b>"},
    {"content": "<b>", "special": False},
    {"content": "<l>", "lstrip": True},
    {"content": "<r>", "rstrip": True},
    {"content": "<w>", "single_word": True},
    {"content": "<n>", "normalized": True},
    {"content": "\n\n"},
    {"content": " <s>"},
]
PLAIN = {
    "special": True,
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
}
WORDS = ("the", "tool", " ", "  ", "\n", "é", "日本", "<", ">", "a", "x<", "\u2581", "|im", "im_")


def with_added(data: bytes) -> bytes:
    document = json.loads(data)
    first = max(
        [*document["model"]["vocab"].values(), *(one["id"] for one in document["added_tokens"])]
    )
    document["added_tokens"] += [
        {"id": first + 1 + at} | PLAIN | flags for at, flags in enumerate(FLAGS)
    ]
    return json.dumps(document).encode()


SOURCES = {
    **{name: build() for name, build in BUILDERS.items()},
    "byte level with odd tokens": with_added(byte_level_tokenizer_json()),
    "metaspace with odd tokens": with_added(metaspace_tokenizer_json()),
}


def published() -> list[str]:
    return sorted(path.name.removesuffix(".tar.xz") for path in SHARED.glob("*.tar.xz"))


def check_history(tokenizer: Tokenizer, rng: random.Random, steps: int) -> None:
    """Grow, cut, edit and alternate texts; each must get the ids of a full encoding."""
    tokens = [token.text for token in tokenizer.added_tokens][:12] + [
        one["content"] for one in FLAGS
    ]
    encoder = RepeatingEncoder(tokenizer.added_tokens, tokenizer._encoding)
    texts = [""]
    for _ in range(steps):
        base = rng.choice(texts[-4:])
        if rng.random() < 0.3:
            base = base[: rng.randrange(len(base) + 1)]
        pieces = (rng.choice(tokens if rng.random() < 0.4 else WORDS) for _ in range(12))
        texts.append(base + "".join(pieces))
        assert encoder.encode(texts[-1]) == tokenizer.encode(texts[-1]), texts[-1]


@pytest.mark.parametrize("name", SOURCES)
def test_random_histories_get_the_ids_of_a_full_encoding(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeating, "LEAST_CHARS", 1)
    tokenizer = Tokenizer.from_bytes(SOURCES[name])
    for seed in range(40):
        check_history(tokenizer, random.Random(seed), 25)


@pytest.mark.shared
@pytest.mark.parametrize("name", published())
def test_published_tokenizers_get_the_ids_of_a_full_encoding(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeating, "LEAST_CHARS", 1)
    with tarfile.open(SHARED / f"{name}.tar.xz") as archive:
        member = next(one for one in archive if one.name.endswith("tokenizer.json"))
        file = archive.extractfile(member)
        assert file is not None
        tokenizer = Tokenizer.from_bytes(file.read())
    for seed in range(6):
        check_history(tokenizer, random.Random(seed), 25)


def test_turns_encode_only_what_is_new_also_when_users_alternate() -> None:
    tokenizer = Tokenizer.from_bytes(byte_level_tokenizer_json())
    encoded: list[int] = []

    def encode(text: str) -> Any:
        encoded.append(len(text))
        return tokenizer._encoding(text)

    encoder = RepeatingEncoder(tokenizer.added_tokens, encode)
    system = "<|im_start|>" + "the tool " * 600 + "<|im_end|>"
    users = [system, system, system + "<|im_start|>x<|im_end|>"]
    for turn in range(30):
        for number, text in enumerate(users):
            users[number] = text + f"<|im_start|>{number} hello {turn} world<|im_end|>" * 9
            opened = users[number] + "<|im_start|>assistant\n"
            assert encoder.encode(opened) == tokenizer.encode(opened)
    longest = len(f"<|im_start|>{0} hello {10} world<|im_end|>") * 9
    assert len(users[0]) > 15_000
    # Users whose texts still differ by little stand for one another; the first turn of all also
    # encodes the block that they share.
    assert max(encoded[1:]) < repeating.LEAST_CHARS + longest + 100
    assert max(encoded[-30:]) < longest + 100
    assert encoded[0] > len(system) > max(encoded[1:])


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 9000])
def test_shared_length_counts_common_characters(size: int) -> None:
    text = "é" * size
    assert shared_length(text, text) == size
    assert shared_length(text + "a", text + "b" * 5000) == size
    assert shared_length(text, text + "b") == size
