"""On the command line a hint names options of the command, not arguments of the library."""

from __future__ import annotations

import json
import types
from typing import TYPE_CHECKING

import pytest

from engine_core.cli import main, options
from engine_core.family import FamilyInfo
from engine_core.markers import hookimpl
from engine_core.plugins import Plugins
from engine_core.testing import layered
from engine_core.testing.layered import write_layered_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

BARE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.mark.parametrize(
    ("template", "flags", "code", "named", "foreign"),
    [
        (None, [], "template.missing", "--ignore-chat-template", "template="),
        ("{{ raise_exception('x') }}", [], "template.unusable", "--ignore-chat", "template="),
        (BARE, ["--thinking", "on"], "capability.unavailable", "--thinking", "leave thinking"),
        (BARE, ["-m", "100000"], "request.context_exceeded", "--max-tokens", "max_tokens"),
    ],
)
def test_hint_of_a_request_names_the_option(
    template: str | None,
    flags: list[str],
    code: str,
    named: str,
    foreign: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plugins = Plugins.load(extra=[layered])
    monkeypatch.setattr(options, "load_plugins", lambda _: plugins)
    model = str(write_layered_checkpoint(tmp_path / "model", chat_template=template))
    assert main(["generate", "--json", "--model", model, "-p", "hello", *flags]) == 1
    error = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert error["code"] == code
    assert named in error["hint"]
    assert foreign not in error["hint"]


def test_hint_of_a_conflict_names_the_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rival = types.ModuleType("rival")
    claimed = next(owner.family for owner in Plugins.load(extra=[layered]).owners[-1:])
    rival.engine_families = hookimpl(  # type: ignore[attr-defined]
        lambda: [FamilyInfo(name="rival", model_types=claimed.model_types)]
    )
    plugins = Plugins.load(extra=[layered, rival])
    monkeypatch.setattr(options, "load_plugins", lambda _: plugins)
    model = str(write_layered_checkpoint(tmp_path / "model"))
    assert main(["verify", model]) == 1
    errors = capsys.readouterr().err
    assert "[plugin.conflict]" in errors
    assert "--family" in errors
    assert "--no-plugin" in errors
    assert "family=" not in errors
