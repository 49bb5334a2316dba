"""Typed reading of config.json."""

from __future__ import annotations

import pytest

from engine_core.checkpoint.config import CheckpointConfig
from engine_core.errors import ConfigError

CONFIG = CheckpointConfig(
    {
        "size": 8,
        "whole": 16.0,
        "rate": 0.5,
        "flag": True,
        "name": "silu",
        "retired": None,
        "items": [1, 2],
        "kinds": ["full", "slides"],
        "text_config": {"size": 3, "inner": {"x": "y"}, "gone": None},
    }
)


def test_config_null_entries_are_absent() -> None:
    assert "retired" not in CONFIG
    assert CONFIG.get("retired", 7) == 7
    assert CONFIG.integer("retired", default=7) == 7
    assert "gone" not in CONFIG.section("text_config")
    assert "retired" not in list(CONFIG)
    assert len(CONFIG) == 8


def test_config_readers_give_typed_values() -> None:
    assert CONFIG.integer("size", minimum=1, maximum=8) == 8
    assert CONFIG.integer("whole") == 16
    assert isinstance(CONFIG.integer("whole"), int)
    assert CONFIG.number("size") == 8.0
    assert CONFIG.number("rate", minimum=0.5) == 0.5
    assert CONFIG.boolean("flag") is True
    assert CONFIG.string("name", choices={"silu", "gelu"}) == "silu"
    assert CONFIG.number("rate", above=0.4) == 0.5
    assert CONFIG.number("retired", default=0.0, above=1) == 0.0
    assert CONFIG.sequence("items", length=2) == (1, 2)
    assert CONFIG.sequence("kinds", choices=("slides", "full")) == ("full", "slides")
    assert CONFIG.sequence("retired", default=(), length=2, choices=("full",)) == ()
    assert CONFIG.mapping("text_config")["gone"] is None
    assert CONFIG.section("text_config").integer("size") == 3
    assert CONFIG.section("nowhere").integer("size", default=None) is None


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda c: c.integer("none"), "config.json: none is required"),
        (lambda c: c.integer("retired"), "config.json: retired is required"),
        (lambda c: c.integer("flag"), "config.json: flag must be an integer, got True"),
        (lambda c: c.integer("rate"), "config.json: rate must be an integer, got 0.5"),
        (lambda c: c.integer("size", minimum=9), "config.json: size must be at least 9, got 8"),
        (lambda c: c.integer("size", maximum=7), "config.json: size must be at most 7, got 8"),
        (lambda c: c.number("name"), "config.json: name must be a number, got 'silu'"),
        (lambda c: c.number("flag"), "config.json: flag must be a number, got True"),
        (lambda c: c.boolean("size"), "config.json: size must be true or false, got 8"),
        (lambda c: c.string("size"), "config.json: size must be a string, got 8"),
        (
            lambda c: c.string("name", choices=("gelu",)),
            "config.json: name must be one of ['gelu'], got 'silu'",
        ),
        (lambda c: c.sequence("size"), "config.json: size must be a list, got 8"),
        (lambda c: c.number("rate", above=0.5), "config.json: rate must be above 0.5, got 0.5"),
        (lambda c: c.sequence("items", length=3), "config.json: items must have 3 entries, got 2"),
        (
            lambda c: c.sequence("kinds", choices=("full", "bent")),
            "config.json: kinds must hold some of ['bent', 'full'], got 'slides'",
        ),
        (
            lambda c: c.sequence("items", choices=("1", "2")),
            "config.json: items must hold some of ['1', '2'], got 1",
        ),
        (lambda c: c.mapping("items"), "config.json: items must be an object, got list of 2"),
        (lambda c: c.section("items"), "config.json: items must be an object, got list of 2"),
        (
            lambda c: c.section("text_config").section("inner").integer("x"),
            "config.json: text_config.inner.x must be an integer, got 'y'",
        ),
    ],
)
def test_config_wrong_field_names_file_path_and_value(read, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(CONFIG)
    assert str(caught.value) == message
    assert caught.value.code == "config.invalid"


def test_config_error_never_pastes_a_payload() -> None:
    config = CheckpointConfig({"text": "x" * 10_000, "big": 10**900}, name="generation_config.json")
    for key in ("text", "big"):
        with pytest.raises(ConfigError, match=r"^generation_config\.json: ") as caught:
            config.boolean(key)
        assert len(str(caught.value)) < 200
    with pytest.raises(ConfigError, match="must fit a double"):
        config.number("big")
