"""The ``engine`` command where streams are closed, full or of a narrow encoding, and misuse."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_core.testing.checkpoints import write_checkpoint

FULL = Path("/dev/full")  # a device of Linux
UNWRITABLE = [">&-", *([f"> {FULL}"] if FULL.exists() else [])]


def engine(*arguments: str, redirect: str = "", **options: Any) -> tuple[int, bytes, bytes]:
    """Run the command under a shell that redirects; give status, output and errors."""
    command = ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-m", "engine_core.cli"]
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        check=False,
        timeout=120,
        **options,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("redirect", UNWRITABLE)
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_output_that_cannot_be_written_is_one_error_line(redirect: str, form: list[str]) -> None:
    status, _, errors = engine("plugins", *form, redirect=redirect)
    assert status == 1
    assert errors.startswith(b"error: standard output: must ")
    assert errors.count(b"\n") == 1


def test_reader_that_left_ends_the_command_quietly(tmp_path: Path) -> None:
    for arguments in (["plugins"], ["inspect", str(tmp_path / "none"), "--json"]):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            [sys.executable, "-m", "engine_core.cli", *arguments],
            stdout=writer, stderr=subprocess.PIPE, check=False, timeout=120,
        )  # fmt: skip
        os.close(writer)
        assert (done.returncode, done.stderr) == (0, b"")


def test_closed_standard_error_keeps_the_answer_and_the_status() -> None:
    assert engine("inspect", "--backend", "--json", redirect="2>&-")[0] == 0
    assert engine("inspect", redirect="2>&-")[0] == 2


def test_prompt_from_closed_standard_input_is_bad_usage(tmp_path: Path) -> None:
    status, _, errors = engine("generate", "--model", str(tmp_path), "-p", "-", redirect="<&-")
    assert status == 2
    assert b"[cli.usage]" in errors


def test_json_lines_are_ascii_whatever_a_path_holds() -> None:
    status, output, _ = engine("inspect", b"/none/\xff\xc3\xa9\x1b", "--json")  # type: ignore[arg-type]
    assert status == 1
    assert output.isascii()
    assert json.loads(output)["code"] == "checkpoint.hub_name"


def test_narrow_encoding_escapes_what_it_lacks(tmp_path: Path) -> None:
    config, tensors = {"model_type": "日本"}, {"norm.weight": np.ones(2, np.float32)}
    model = write_checkpoint(tmp_path / "model", config, tensors)
    status, _, errors = engine(
        "inspect", str(model), env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert status == 1
    assert b"\\u65e5" in errors
    assert b"Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--temp", "9"], "request.temperature"),
        (["--temp", "nan"], "request.temperature"),
        (["--temperature", "9"], "request.temperature"),
        (["-m", "0"], "request.max_tokens"),
        (["--seed", "-1"], "request.seed"),
        (["--stop", ""], "request.stop"),
        (["--chat-template-config", "[1]"], "cli.template_config"),
        (["--chat-template-config", "[" * 100_000], "cli.template_config"),
        (["--ignore-chat-template", "--system-prompt", "x"], "cli.usage"),
        (["--ignore-chat-template", "--prefill-response", "x"], "cli.usage"),
        (["--ignore-chat-template", "--thinking", "on"], "cli.usage"),
        (["--ignore-chat-template", "--chat-template-config", "{}"], "cli.usage"),
    ],
)
def test_option_that_cannot_be_honoured_is_bad_usage_before_the_model_is_looked_for(
    arguments: list[str], code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from engine_core.cli import main

    missing = str(tmp_path / "none")
    assert main(["generate", "--json", "--model", missing, "-p", "hi", *arguments]) == 2
    assert json.loads(capsys.readouterr().out)["code"] == code


@pytest.mark.parametrize("flag", ["--runs", "--prompt-tokens", "--max-tokens"])
@pytest.mark.parametrize("value", ["0", "-5", "x"])
def test_bench_counts_below_one_are_bad_usage(flag: str, value: str) -> None:
    from engine_core.cli import main

    with pytest.raises(SystemExit) as caught:
        main(["bench", "--model", "none", f"{flag}={value}"])
    assert caught.value.code == 2


def test_interrupt_before_a_command_runs_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine_core import cli
    from engine_core.cli import parser

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(parser, "build_parser", interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert cli.main(["plugins"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)


def test_chat_writes_nothing_but_json_lines(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io

    from engine_core.cli import main

    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n\nh\nr\nhello\nq\n"))
    assert main(["chat", "--json", "--model", str(demo_model), "-m", "4"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["type"] for record in records].count("reply") == 2
