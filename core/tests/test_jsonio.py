"""Strict JSON: every laxness of the standard decoder is refused."""

from __future__ import annotations

import attrs
import pytest

from engine_core.checkpoint.jsonio import parse_json, parse_json_object
from engine_core.errors import CheckpointError
from engine_core.limits import LIMITS


def test_parse_json_ordinary_document_gives_python_values() -> None:
    data = '{"a": [1, -2.5e3, true, null, "é\\ud83d\\ude00"], "b": {}}'.encode()
    assert parse_json(data, "x.json") == {"a": [1, -2500.0, True, None, "é😀"], "b": {}}


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "must be JSON"),
        (b"{", "must be JSON"),
        (b"{} x", "must be JSON"),
        (b"\xef\xbb\xbf{}", "must be JSON"),
        (b'{"a": 1, "a": 2}', "unique"),
        (b'[{"b": {"a": 1, "a": 1}}]', "unique"),
        (b"[NaN]", "finite"),
        (b"[-Infinity]", "finite"),
        (b"[1e999]", "finite"),
        (b"[" + b"9" * 1001 + b"]", "digits"),
        (b"[0." + b"1" * 1001 + b"]", "digits"),
        (b'["\\ud800"]', "surrogate"),
        (b'{"\\udc00": 1}', "surrogate"),
        (b'["\xff"]', "UTF-8"),
        (b"[" * 65 + b"]" * 65, "64 deep"),
        (b"[" * 100_000, "64 deep"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "64 deep"),
    ],
)
def test_parse_json_lax_document_is_refused(data: bytes, part: str) -> None:
    with pytest.raises(CheckpointError, match=r"^x\.json: ") as caught:
        parse_json(data, "x.json")
    assert caught.value.code == "checkpoint.json"
    assert part in str(caught.value)
    assert len(str(caught.value)) < 300


def test_parse_json_at_the_bounds_is_accepted() -> None:
    assert parse_json(b"[" * 64 + b"]" * 64, "x.json")
    digits = b"9" * 1000
    assert parse_json(digits, "x.json") == int(digits)


def test_parse_json_lower_limits_are_honoured() -> None:
    limits = attrs.evolve(LIMITS, json_depth=2, json_number_digits=3)
    assert parse_json(b"[[123]]", "x.json", limits) == [[123]]
    for data in (b"[[[1]]]", b"1234"):
        with pytest.raises(CheckpointError):
            parse_json(data, "x.json", limits)


def test_parse_json_object_other_top_level_is_refused() -> None:
    assert parse_json_object(b'{"a": 1}', "x.json") == {"a": 1}
    with pytest.raises(CheckpointError, match="must be a JSON object, got list"):
        parse_json_object(b"[]", "x.json")
