"""On the command line a hint names options of the command, not arguments of the library."""

from __future__ import annotations

import ast
import json
import re
import types
from pathlib import Path

import pytest

import engine_core
from engine_core.cli import main, options
from engine_core.cli.output import Output
from engine_core.cli.parser import build_parser
from engine_core.errors import EngineError
from engine_core.family import FamilyInfo
from engine_core.markers import hookimpl
from engine_core.plugins import Plugins
from engine_core.testing import layered
from engine_core.testing.layered import write_layered_checkpoint

BARE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.mark.parametrize(
    ("template", "flags", "code", "named", "foreign"),
    [
        (None, [], "template.missing", "--ignore-chat-template", "template="),
        ("{{ raise_exception('x') }}", [], "template.unusable", "--ignore-chat", "template="),
        (BARE, ["--thinking", "on"], "capability.unavailable", "--thinking", "thinking="),
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
    assert "block=" not in errors


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        ("load with quantized_weights='dequantize'", "load with --quantized-weights dequantize"),
        ("try compute_dtype=float32", "try --compute-dtype float32"),
        ("pass family= to choose", "pass --family to choose"),
        ("leave one out with block=, or both", "leave one out with --no-plugin, or both"),
        ("cache_dir= names another", "--hub-cache names another"),
        ("a larger queue_jobs=2", "a larger queue_jobs=2"),
        ("pip install 'family==1'", "pip install 'family==1'"),
    ],
)
def test_options_of_a_hint_are_spelled_as_the_command_has_them(
    hint: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    known = vars(build_parser().parse_args(["verify", "model"]))
    Output(as_json=True, options=known).error(EngineError("a: must be b, got c", hint=hint))
    assert json.loads(capsys.readouterr().out)["hint"] == expected


def test_a_command_without_the_option_leaves_it(capsys: pytest.CaptureFixture[str]) -> None:
    known = vars(build_parser().parse_args(["probe", "model"]))
    hint = "try compute_dtype=float32"
    Output(as_json=True, options=known).error(EngineError("a: must be b, got c", hint=hint))
    assert json.loads(capsys.readouterr().out)["hint"] == hint


def test_hint_of_a_missing_tokenizer_names_no_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plugins = Plugins.load(extra=[layered])
    monkeypatch.setattr(options, "load_plugins", lambda _: plugins)
    model = write_layered_checkpoint(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    assert main(["generate", "--model", str(model), "-p", "hello"]) == 1
    errors = capsys.readouterr().err
    assert "[tokenizer.missing]\nhint: add tokenizer.json to the checkpoint\n" in errors


def test_every_hint_marks_the_options_that_it_names() -> None:
    known = vars(build_parser().parse_args(["generate", "--model", "m", "--prompt", "p"]))
    names = "|".join(name for name in (*known, "cache_dir") if "_" in name)
    found = [
        f"{path.name}:{node.value.lineno}"
        for path in sorted(Path(engine_core.__file__).parent.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.keyword) and node.arg == "hint"
        if re.search(rf"\b({names})\b(?!=)", ast.unparse(node.value))
    ]
    assert found == []
