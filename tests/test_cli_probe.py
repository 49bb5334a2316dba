"""``engine probe``: the evidence table of a checkpoint's template, weights unread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine_core.cli import main
from engine_core.template.probe import CAPABILITIES
from engine_core.testing.checkpoints import write_checkpoint

if TYPE_CHECKING:
    import pytest

MINI = Path(__file__).resolve().parent.parent / "plugins/qwen35/tests/fixtures/qwen35-mini"


def test_table_gives_a_verdict_and_its_evidence_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", str(MINI)]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = {line.split()[0]: line.split(maxsplit=2)[1:] for line in lines if ":" in line}
    assert set(table) == set(CAPABILITIES)
    assert table["task:chat"][0] == table["interaction:tools"][0] == "yes"
    assert table["task:translation"][0] == "no"
    assert all(len(evidence) > 10 for _, evidence in table.values())
    assert "'qwen_xml'" in table["interaction:tools"][1]
    assert any(line.split() == ["tool", "syntax", "qwen_xml"] for line in lines)


def test_json_gives_one_record_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", str(MINI), "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (records[0]["type"], records[0]["usable"]) == ("template", True)
    assert records[0]["tool_syntax"] == "qwen_xml"
    assert len(records[0]["sha256"]["default"]) == 64
    assert [record["capability"] for record in records[1:]] == list(CAPABILITIES)
    assert all(record["reason"] for record in records[1:])


def test_checkpoint_without_a_usable_template_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, tensors = {"model_type": "llama"}, {"norm.weight": np.ones(2, np.float32)}
    bare = write_checkpoint(tmp_path / "bare", config, tensors)
    assert main(["probe", str(bare)]) == 1
    assert "no chat template" in capsys.readouterr().out
    broken = write_checkpoint(tmp_path / "broken", config, tensors, chat_template="{{ 1 }}")
    assert main(["probe", str(broken)]) == 1
    assert "template.unusable" in capsys.readouterr().err
