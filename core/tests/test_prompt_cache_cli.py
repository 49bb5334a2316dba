"""``engine generate`` and ``engine chat`` with ``--prompt-cache-file``."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import pytest

from engine_core.cli import main, options
from engine_core.plugins import Plugins
from engine_core.testing import layered
from engine_core.testing.layered import write_layered_checkpoint

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    plugins = Plugins.load(extra=[layered])
    monkeypatch.setattr(options, "load_plugins", lambda _: plugins)
    return str(write_layered_checkpoint(tmp_path / "model"))


def generate(model: str, file: Path, *more: str) -> list[str]:
    return [
        "generate", "--model", model, "--prompt", "hello world", "--max-tokens", "4",
        "--prompt-cache-file", str(file), "--json", *more,
    ]  # fmt: skip


@pytest.mark.parametrize("raw", [False, True])
def test_generate_starts_from_the_file_of_the_last_run(
    model: str, raw: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--ignore-chat-template"] if raw else ["--system-prompt", "think of the user"]
    replies = []
    for _ in range(2):
        assert main(generate(model, tmp_path / "prefix", *flags)) == 0
        captured = capsys.readouterr()
        replies.append(json.loads(captured.out.splitlines()[-1]))
        assert "tokens saved" in captured.err
    assert "tokens loaded" in captured.err
    assert replies[0]["cached_tokens"] == 0
    assert replies[1]["cached_tokens"] > 0
    assert replies[0]["token_ids"] == replies[1]["token_ids"]


def test_generate_with_a_damaged_file_says_so_and_keeps_it(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prefix"
    file.write_bytes(b"no prompt cache")
    assert main(generate(model, file)) != 0
    assert "cache.file" in capsys.readouterr().out
    assert file.read_bytes() == b"no prompt cache"


def test_generate_with_a_name_that_the_system_refuses_is_a_typed_error(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(generate(model, tmp_path / ("x" * 5000))) == 1
    assert "cache.file" in capsys.readouterr().out


def test_bench_of_more_tokens_than_the_context_makes_no_prompt(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--model", model, "--json", "--prompt-tokens", "1000000"]) == 1
    printed = capsys.readouterr().out
    assert "bench: prompt tokens must fit" in printed
    assert "request.context_exceeded" in printed


def test_chat_saves_its_conversation_at_the_end(
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "prefix"
    arguments = ["chat", "--model", model, "--max-tokens", "3", "--prompt-cache-file", str(file)]
    monkeypatch.setattr("sys.stdin", io.StringIO("q\n"))
    assert main(arguments) == 0
    assert not file.exists()
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nthe tool\nq\n"))
    assert main(arguments) == 0
    assert "tokens saved" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert main(arguments) == 0
    assert "tokens loaded" in capsys.readouterr().err
