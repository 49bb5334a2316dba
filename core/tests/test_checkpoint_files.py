"""The checkpoint directory: links, FIFOs, caches, bounds; nothing is written."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import attrs
import numpy as np
import pytest

from engine_core.checkpoint.files import open_directory
from engine_core.checkpoint.reader import read_checkpoint
from engine_core.checkpoint.resolve import HubSnapshot, resolve_hub
from engine_core.errors import CheckpointError
from engine_core.limits import LIMITS
from engine_core.testing.checkpoints import write_checkpoint

TENSORS = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}
CONFIG = {"model_type": "tiny", "retired": None}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def tiny(path: Path, **options) -> Path:
    return write_checkpoint(path, CONFIG, TENSORS, **options)


def refused(path, code: str, *parts: str, limits=LIMITS) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path, limits).close()
    assert caught.value.code == code
    assert caught.value.hint
    for part in parts:
        assert part in str(caught.value)


def hub(root: Path, *, absolute: bool = False, name: str = "models--org--tiny") -> Path:
    """Lay a checkpoint out as the Hugging Face cache does; give the repository folder."""
    repository = root / name
    source = tiny(
        root / "source",
        shards=1,
        chat_template="x",
        files={"additional_chat_templates/tool_use.jinja": b"y"},
    )
    snapshot = repository / "snapshots" / COMMIT
    blobs = repository / "blobs"
    blobs.mkdir(parents=True)
    for number, file in enumerate(sorted(p for p in source.rglob("*") if p.is_file())):
        relative = file.relative_to(source)
        blob = blobs / f"{number:064x}"
        shutil.copy(file, blob)
        link = snapshot / relative
        link.parent.mkdir(parents=True, exist_ok=True)
        up = "../" * (len(relative.parts) + 1)
        link.symlink_to(blob if absolute else f"{up}blobs/{blob.name}")
    refs = repository / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    return repository


def test_checkpoint_delivers_every_small_file(tmp_path: Path) -> None:
    path = tiny(
        tmp_path / "c",
        tokenizer=b'{"t": 1}',
        tokenizer_config={"bos": "<s>", "none": None},
        generation_config={"eos_token_id": 2},
        chat_template="hello",
        files={
            "additional_chat_templates/tool_use.jinja": b"tools",
            "additional_chat_templates/readme.txt": b"no",
            "chat_template.json": b"{}",
            "preprocessor_config.json": b'{"size": 4}',
            "special_tokens_map.json": b"{}",
            "README.md": b"# not read",
            "adapters.safetensors": b"never opened",
        },
    )
    with read_checkpoint(path) as checkpoint:
        assert checkpoint.config.get("model_type") == "tiny"
        assert "retired" not in checkpoint.config
        assert checkpoint.tokenizer_json == b'{"t": 1}'
        assert checkpoint.tokenizer_config.get("bos") == "<s>"
        assert checkpoint.generation_config.integer("eos_token_id") == 2
        assert checkpoint.processor_config.integer("size") == 4
        assert checkpoint.processor_config.name == "preprocessor_config.json"
        assert dict(checkpoint.template_files) == {
            "chat_template.jinja": b"hello",
            "chat_template.json": b"{}",
            "tokenizer_config.json": (path / "tokenizer_config.json").read_bytes(),
            "additional_chat_templates/tool_use.jinja": b"tools",
        }
        assert "README.md" not in checkpoint.small_files
        assert set(checkpoint.digests) == set(checkpoint.small_files)
        assert checkpoint.shards.unread == ("adapters.safetensors",)
        assert any("adapters.safetensors" in note for note in checkpoint.notes)
        assert checkpoint.tensors["a.weight"].shape == (2, 3)


def test_checkpoint_without_optional_files_has_empty_configs(tmp_path: Path) -> None:
    with read_checkpoint(tiny(tmp_path / "c")) as checkpoint:
        assert checkpoint.tokenizer_json is None
        assert len(checkpoint.tokenizer_config) == 0
        assert checkpoint.generation_config.name == "generation_config.json"
        assert checkpoint.template_files == {}


def test_descriptors_are_closed_also_after_a_failure(tmp_path: Path) -> None:
    def count() -> int:
        return sum(1 for _ in Path("/dev/fd").iterdir())

    good, bad = tiny(tmp_path / "good", shards=1), tiny(tmp_path / "bad")
    (bad / "model.safetensors").write_bytes(b"")
    before = count()
    checkpoint = read_checkpoint(good)
    assert count() > before
    checkpoint.close()
    checkpoint.close()
    refused(bad, "checkpoint.header")
    refused(tmp_path / "absent", "checkpoint.missing_file", "absent")
    assert count() == before
    with pytest.raises(CheckpointError) as caught:
        checkpoint.files.read_bytes("config.json", 100)
    assert caught.value.code == "checkpoint.closed"


def test_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tiny(tmp_path / "c"))
    with read_checkpoint(tmp_path / "link") as checkpoint:
        assert checkpoint.tensors


def test_read_only_directory_is_enough_and_nothing_is_written(tmp_path: Path) -> None:
    path = tiny(tmp_path / "c")
    before = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in path.iterdir()}
    for file in path.iterdir():
        file.chmod(stat.S_IRUSR)
    path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        with read_checkpoint(path) as checkpoint:
            assert checkpoint.tensors
    finally:
        path.chmod(stat.S_IRWXU)
    assert {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in path.iterdir()} == before


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"]
)
def test_link_inside_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    path = tiny(tmp_path / "c", tokenizer=b"{}", chat_template="x")
    target = tmp_path / "elsewhere"
    (path / name).rename(target)
    (path / name).symlink_to(target)
    refused(path, "checkpoint.link", name)


def test_link_to_a_template_folder_is_refused(tmp_path: Path) -> None:
    path = tiny(tmp_path / "c")
    (tmp_path / "templates").mkdir()
    (path / "additional_chat_templates").symlink_to(tmp_path / "templates")
    with pytest.raises(CheckpointError, match="additional_chat_templates"):
        read_checkpoint(path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_fifo_and_directory_in_place_of_a_file_are_refused_at_once(
    tmp_path: Path, name: str
) -> None:
    for make in (os.mkfifo, os.mkdir):
        path = tiny(tmp_path / make.__name__)
        (path / name).unlink()
        make(path / name)
        refused(path, "checkpoint.not_regular", name)


def test_unindexed_fifo_is_not_touched(tmp_path: Path) -> None:
    path = tiny(tmp_path / "c")
    os.mkfifo(path / "other.safetensors")
    with read_checkpoint(path) as checkpoint:
        assert checkpoint.shards.unread == ("other.safetensors",)


def test_oversized_files_and_directories_are_refused_before_reading(tmp_path: Path) -> None:
    path = tiny(tmp_path / "c", tokenizer=b"{}")
    with (path / "config.json").open("r+b") as file:
        file.truncate(LIMITS.config_bytes + 1)
    refused(path, "checkpoint.too_large", "config.json")
    path = tiny(tmp_path / "c")
    with (path / "tokenizer.json").open("r+b") as file:
        file.truncate(LIMITS.tokenizer_bytes + 1)
    refused(path, "checkpoint.too_large", "tokenizer.json")
    many = attrs.evolve(LIMITS, directory_entries=2)
    refused(path, "checkpoint.too_large", "entries", limits=many)


def test_config_that_is_missing_or_no_object_is_refused(tmp_path: Path) -> None:
    path = tiny(tmp_path / "c")
    (path / "config.json").write_text("[]")
    refused(path, "checkpoint.json", "config.json")
    (path / "config.json").unlink()
    refused(path, "checkpoint.missing_file", "config.json")
    refused(path / "model.safetensors", "checkpoint.not_a_directory")
    refused("nul\0byte", "checkpoint.unreadable")


@pytest.mark.parametrize("name", ["../c/config.json", "a/b/c", "..", ".", "", "a/", "/etc/passwd"])
def test_open_takes_plain_names_only(tmp_path: Path, name: str) -> None:
    with open_directory(tiny(tmp_path / "c")) as files, pytest.raises(CheckpointError) as caught:
        files.open(name)
    assert caught.value.code == "checkpoint.path"


# ------------------------------------------------------------------ Hugging Face cache


@pytest.mark.parametrize("absolute", [False, True])
def test_hub_cache_is_read_through_its_links(tmp_path: Path, absolute: bool) -> None:
    hub(tmp_path, absolute=absolute)
    for revision in (None, "main", COMMIT):
        snapshot = resolve_hub("org/tiny", revision, cache_dir=tmp_path)
        with read_checkpoint(snapshot) as checkpoint:
            assert checkpoint.tensors["a.weight"].shape == (2, 3)
            assert checkpoint.template_files["chat_template.jinja"] == b"x"
            assert checkpoint.template_files["additional_chat_templates/tool_use.jinja"] == b"y"


def test_hub_snapshot_directory_needs_the_resolver(tmp_path: Path) -> None:
    snapshot = hub(tmp_path) / "snapshots" / COMMIT
    refused(snapshot, "checkpoint.link", "config.json")
    with read_checkpoint(resolve_hub(snapshot)) as checkpoint:
        assert checkpoint.tensors
    (tmp_path / "alias").symlink_to(snapshot)
    with read_checkpoint(resolve_hub(tmp_path / "alias")) as checkpoint:
        assert checkpoint.tensors


def test_resolver_gives_a_plain_directory_no_right_to_links(tmp_path: Path) -> None:
    path = tiny(tmp_path / "c")
    resolved = resolve_hub(path)
    assert resolved == HubSnapshot(path, cache_links=False)
    assert os.fspath(resolved) == str(path)
    (tmp_path / "target").write_bytes((path / "config.json").read_bytes())
    (path / "config.json").unlink()
    (path / "config.json").symlink_to(tmp_path / "target")
    refused(resolved, "checkpoint.link", "config.json")


@pytest.mark.parametrize(
    "target",
    [
        "../../../outside",
        "../../refs/main",
        "../../blobs/../refs/main",
        "../../blobs/..",
        "../../blobs",
        "../../blobs/absent",
        "../../../models--org--other/blobs/x",
        "config2.json",
        "/etc/passwd",
        "../../blobs/link",
        "../../blobs/folder",
        "../../blobs/fifo",
    ],
)
def test_hub_link_to_anything_but_an_own_blob_is_refused(tmp_path: Path, target: str) -> None:
    repository = hub(tmp_path)
    snapshot = repository / "snapshots" / COMMIT
    other = tmp_path / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    for file in (tmp_path / "outside", other / "x", snapshot / "config2.json"):
        file.write_text("{}")
    (repository / "blobs" / "link").symlink_to(tmp_path / "outside")
    (repository / "blobs" / "folder").mkdir()
    os.mkfifo(repository / "blobs" / "fifo")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(target)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(resolve_hub("org/tiny", cache_dir=tmp_path))
    assert caught.value.code in {
        "checkpoint.link",
        "checkpoint.missing_file",
        "checkpoint.not_regular",
        "checkpoint.not_a_directory",
    }
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "revision", "code"),
    [
        ("org/absent", None, "checkpoint.hub_missing"),
        ("org/tiny", "no-such-branch", "checkpoint.hub_missing"),
        ("org/tiny", "../main", "checkpoint.hub_name"),
        ("org/tiny", "a/../../b", "checkpoint.hub_name"),
        ("../org", None, "checkpoint.hub_name"),
        ("a/b/c", None, "checkpoint.hub_name"),
        ("org--x/tiny", None, "checkpoint.hub_name"),
        ("", None, "checkpoint.hub_name"),
        ("/absolute/missing", None, "checkpoint.hub_name"),
        ("a\0b", None, "checkpoint.hub_name"),
        ("x" * 5000, None, "checkpoint.hub_name"),
        ("x" * 300 + "/y", None, "checkpoint.hub_name"),
    ],
)
def test_hub_name_that_cannot_be_resolved_is_refused(tmp_path, name, revision, code) -> None:
    hub(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        resolve_hub(name, revision, cache_dir=tmp_path)
    assert caught.value.code == code
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "revision", "missing"),
    [
        ("models/foo", None, "no such repository"),
        ("org/tiny", "no-such-branch", "no revision 'no-such-branch'"),
    ],
)
def test_hub_name_that_is_not_cached_says_what_was_looked_for_and_where(
    tmp_path: Path, name: str, revision: str | None, missing: str
) -> None:
    hub(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        resolve_hub(name, revision, cache_dir=tmp_path)
    text = str(caught.value)
    assert "no such directory" in text
    assert missing in text
    assert str(tmp_path) in text
    assert "cache_dir=" in caught.value.hint


def test_hub_snapshot_reads_as_its_path(tmp_path: Path) -> None:
    snapshot = hub(tmp_path) / "snapshots" / COMMIT
    assert str(resolve_hub("org/tiny", cache_dir=tmp_path)) == str(snapshot)


@pytest.mark.parametrize("path", ["~/nope", "models/nope", "/absolute/none/nope"])
def test_missing_directory_is_named_as_given(path: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    assert str(caught.value) == f"{path}: must exist"
    assert ("'~' is not expanded" if path[0] == "~" else "resolve_hub") in caught.value.hint


def test_gguf_is_named_for_what_it_is(tmp_path: Path) -> None:
    file = tmp_path / "model" / "tiny.Q4.gguf"
    file.parent.mkdir()
    file.write_bytes(b"GGUF" + bytes(100))
    for call in (read_checkpoint, resolve_hub):
        with pytest.raises(CheckpointError) as caught:
            call(file)
        assert caught.value.code == "checkpoint.not_a_directory"
        assert str(caught.value) == f"{file}: must be a directory, got a GGUF file (tiny.Q4.gguf)"
        assert "safetensors" in caught.value.hint
    refused(file.parent, "checkpoint.missing_file", "config.json", "GGUF file (tiny.Q4.gguf)")
    (file.parent / "config.json").write_text("{}")
    refused(file.parent, "checkpoint.no_weights", "GGUF file (tiny.Q4.gguf)")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_git_lfs_pointer_is_named_for_what_it_is(tmp_path: Path, name: str) -> None:
    path = tiny(tmp_path / "c")
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123456\n"
    (path / name).write_text(pointer)
    refused(path, "checkpoint.lfs_pointer", name, "Git LFS pointer")


@pytest.mark.parametrize("text", ["../../etc", "", "\xff", "a/b"])
def test_hub_reference_with_a_hostile_commit_is_refused(tmp_path: Path, text: str) -> None:
    repository = hub(tmp_path)
    (repository / "refs" / "main").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError) as caught:
        resolve_hub("org/tiny", cache_dir=tmp_path)
    assert caught.value.code == "checkpoint.hub_missing"


def test_hub_default_cache_lies_in_the_account_home(monkeypatch, tmp_path: Path) -> None:
    hub(tmp_path / ".cache" / "huggingface" / "hub")
    account = attrs.make_class("Account", ["pw_dir"])(str(tmp_path))
    monkeypatch.setattr("engine_core.checkpoint.resolve.pwd.getpwuid", lambda _: account)
    with read_checkpoint(resolve_hub("org/tiny")) as checkpoint:
        assert checkpoint.tensors
