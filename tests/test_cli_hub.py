"""Checkpoints of the local Hugging Face cache, through the public name and the command line."""

from __future__ import annotations

import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine_core import CheckpointError, Client, resolve_hub
from engine_core.cli import main

MINI = Path(__file__).resolve().parent.parent / "plugins/qwen35/tests/fixtures/qwen35-mini"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The account's cache, with the miniature in it as ``org/mini``."""
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_dir=str(tmp_path)))
    folder = tmp_path / ".cache" / "huggingface" / "hub"
    repository = folder / "models--org--mini"
    snapshot = repository / "snapshots" / COMMIT
    for made in (repository / "blobs", repository / "refs", snapshot):
        made.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for number, file in enumerate(sorted(path for path in MINI.iterdir() if path.is_file())):
        (repository / "blobs" / f"{number:064x}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{number:064x}")
    return folder


def test_client_loads_what_the_public_resolver_gives(cache: Path) -> None:
    with Client.load(resolve_hub("org/mini", cache_dir=cache)) as client:
        assert client.complete("a", max_tokens=1).usage.completion_tokens == 1
    snapshot = cache / "models--org--mini" / "snapshots" / COMMIT
    with pytest.raises(CheckpointError, match="link") as caught:
        Client.load(snapshot)
    assert caught.value.code == "checkpoint.link"
    assert "resolve_hub" in caught.value.hint


@pytest.mark.parametrize("form", ["name", "directory"])
def test_commands_take_a_cached_repository(
    cache: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = cache / "models--org--mini" / "snapshots" / COMMIT
    model = "org/mini" if form == "name" else str(snapshot)
    assert main(["probe", model]) == 0
    assert "qwen_xml" in capsys.readouterr().out
    assert main(["inspect", model]) == 0
    assert "qwen3_5" in capsys.readouterr().out
    assert main(["generate", "--model", model, "--prompt", "a", "--max-tokens", "1"]) == 0
    assert capsys.readouterr().out


def test_commands_look_in_the_cache_that_is_named(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = cache.rename(tmp_path / "elsewhere")
    where = ["--hub-cache", str(other)]
    for command in (
        ["probe", "org/mini"],
        ["inspect", "org/mini"],
        ["verify", "org/mini"],
        ["generate", "-p", "a", "-m", "1", "--model", "org/mini"],
        ["bench", "--runs", "1", "--prompt-tokens", "2", "-m", "1", "--model", "org/mini"],
    ):
        assert main(command) == 1
        errors = capsys.readouterr().err
        assert str(cache) in errors
        assert "--hub-cache" in errors
        assert "cache_dir" not in errors
        assert main([*command, *where]) == 0
        assert capsys.readouterr().out


def test_repository_that_is_not_cached_is_a_typed_error_of_the_request(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cache.is_dir()
    for command in (["probe"], ["inspect"], ["verify"], ["generate", "-p", "a", "--model"]):
        assert main([*command, "org/absent"]) == 1
        assert "checkpoint.hub_missing" in capsys.readouterr().err
