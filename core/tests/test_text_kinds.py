"""Decoding and control-token safety of every kind of tokenizer, published ones included."""

from __future__ import annotations

import functools
import random
import tarfile
from pathlib import Path

import pytest
import tokenizers

from engine_core.testing.tokenizers import BUILDERS
from engine_core.text.detokenize import Detokenizer
from engine_core.text.tokenizer import Tokenizer

SHARED = Path(__file__).parents[3] / "shared" / "data" / "tokenizers"
REAL = sorted(path.name.removesuffix(".tar.xz") for path in SHARED.glob("*.tar.xz"))
PIECES = ["hello", " world", "\n", "  ", "日本", "é", "<", "|>", "user", ">", "<|", "12", "🙂"]


def tokenizer_json(name: str) -> bytes:
    if name in BUILDERS:
        return BUILDERS[name]()
    with tarfile.open(SHARED / f"{name}.tar.xz") as archive:
        member = next(one for one in archive if one.name.endswith("tokenizer.json"))
        stream = archive.extractfile(member)
        assert stream is not None
        return stream.read()


@functools.cache
def both(name: str) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """Ours, and the library's own as the oracle."""
    data = tokenizer_json(name)
    return Tokenizer.from_bytes(data), tokenizers.Tokenizer.from_str(data.decode())


def byte_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids of parts of characters, valid and invalid."""
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in (0xE2, 0x82, 0xAC, 0xF0, 0x41, 0xFF)]
    ids += [tokenizer.token_id(char) for char in "âĤ¬ðŁĺĢ¿"]
    return [one for one in ids if one is not None]


def random_ids(name: str, rng: random.Random) -> list[int]:
    tokenizer, _ = both(name)
    special = sorted(tokenizer.special_ids)
    parts = byte_ids(tokenizer)
    sources = (
        lambda: rng.randrange(tokenizer.vocab_size + 5),
        lambda: rng.choice(parts),
        lambda: rng.choice(special),
        lambda: rng.choice([one.id for one in tokenizer.added_tokens]),
    )
    weights = rng.choice([(6, 3, 1, 1), (1, 8, 1, 0), (1, 0, 0, 0), (2, 1, 4, 1)])
    return [rng.choices(sources, weights)[0]() for _ in range(rng.randrange(40))]


@pytest.mark.shared
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("name", [*BUILDERS, *REAL])
def test_detokenizer_random_ids_equal_whole_decoding(name: str, raw: bool) -> None:
    tokenizer, library = both(name)
    keep = tokenizer.special_ids if raw else frozenset()
    rng = random.Random(f"{name} {raw}")
    for _ in range(250):
        ids = random_ids(name, rng)
        whole = library.decode(ids, skip_special_tokens=not raw)
        detokenizer = Detokenizer(tokenizer, keep=keep)
        text = ""
        for one in ids:
            text += detokenizer.push(one)
            assert whole.startswith(text)
        assert text + detokenizer.finish() == whole
        assert tokenizer.decode(ids, keep=keep) == whole


@pytest.mark.shared
@pytest.mark.parametrize("name", [*BUILDERS, *REAL])
def test_detokenizer_text_is_not_withheld_without_need(name: str) -> None:
    tokenizer, library = both(name)
    ids = tokenizer.encode("the world calls, naïve 日本語 tools\n  indented é. end")
    detokenizer = Detokenizer(tokenizer)
    text = ""
    for count, one in enumerate(ids, 1):
        text += detokenizer.push(one)
        prefix = library.decode(ids[:count])
        if not (library.id_to_token(one) or "").startswith("<0x"):
            assert text == prefix.rstrip("\ufffd")


def control_ids(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    controls = {token.id for token in tokenizer.added_tokens if token.is_control}
    return [one for one in ids if one in controls]


def attacks(text: str, rng: random.Random) -> list[list[str]]:
    """Contents, each as the adjacent pieces in which a template may write it."""
    cut = rng.randrange(len(text) + 1)
    return [
        [text],
        [f"hi {text}{text} there"],
        [f"hi {text[:cut]}", f"{text[cut:]} there"],
        [text[1:] + text[:-1]],
    ]


@pytest.mark.shared
@pytest.mark.parametrize("name", [*BUILDERS, *REAL])
def test_encode_rendered_every_added_token_in_content_stays_text(name: str) -> None:
    tokenizer = both(name)[0]
    rng = random.Random(name)
    first, last = tokenizer.added_tokens[0], tokenizer.added_tokens[-1]
    for token in tokenizer.added_tokens:
        for contents in attacks(token.text, rng):
            shield = tokenizer.shield(contents)
            content = "".join(shield(one) for one in contents)
            rendered = f"{first.text}user\n{content}{last.text}\n"
            ids = tokenizer.encode_rendered(rendered, shield)
            assert control_ids(tokenizer, ids) == [first.id, last.id]
            plain = f"{first.text}user\n{''.join(contents)}{last.text}\n"
            assert shield.remove(rendered) == plain
            # No content is lost: the prompt decodes to itself (one tokenizer adds spaces).
            decoded = tokenizer.decode(ids, keep=tokenizer.special_ids)
            assert decoded.replace(" ", "") == plain.replace(" ", "")


@pytest.mark.shared
@pytest.mark.parametrize("name", [*BUILDERS, *REAL])
def test_encode_rendered_harmless_content_gives_the_plain_ids(name: str) -> None:
    tokenizer = both(name)[0]
    rng = random.Random(name)
    first, last = tokenizer.added_tokens[0], tokenizer.added_tokens[-1]
    for _ in range(200):
        contents = ["".join(rng.choices(PIECES, k=rng.randrange(8))) for _ in range(2)]
        if any(token.text in "".join(contents) for token in tokenizer.added_tokens):
            continue
        shield = tokenizer.shield(contents)
        one, two = (shield(content) for content in contents)
        rendered = f"{first.text}{one}{last.text}{two}{last.text}"
        expected = tokenizer.encode(shield.remove(rendered))
        assert tokenizer.encode_rendered(rendered, shield) == expected
        # An attack behind it takes the other path, which must agree up to there.
        ids = tokenizer.encode_rendered(rendered + shield(last.text), shield)
        assert ids[: len(expected)] == expected
        assert control_ids(tokenizer, ids) == control_ids(tokenizer, expected)
