"""A checkpoint directory read up to its payloads: config, small files, headers."""

from __future__ import annotations

import hashlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Self

import attrs

from engine_core.checkpoint.config import CheckpointConfig
from engine_core.checkpoint.files import CheckpointFiles, open_directory
from engine_core.checkpoint.index import ShardSet, plan_shards
from engine_core.checkpoint.jsonio import parse_json_object
from engine_core.checkpoint.mistaken import FOREIGN_HINT, foreign_weights
from engine_core.checkpoint.resolve import HubSnapshot
from engine_core.errors import CheckpointError
from engine_core.limits import LIMITS

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from engine_core.limits import Limits
    from engine_core.weight_plan import TensorInfo

__all__ = ["Checkpoint", "read_checkpoint"]

CONFIG: Final = "config.json"
GENERATION_CONFIG: Final = "generation_config.json"
TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
PROCESSOR_CONFIGS: Final = ("processor_config.json", "preprocessor_config.json")
TEMPLATE_FILES: Final = (
    "chat_template.jinja",
    "chat_template.json",
    "chat_template_tool_use.jinja",
    "processor_config.json",
    TOKENIZER_CONFIG,
)
TEMPLATE_FOLDERS: Final = ("additional_chat_templates", "chat_templates")
OTHER_FILES: Final = ("special_tokens_map.json",)
_TEMPLATE_SUFFIX: Final = ".jinja"


@attrs.frozen(kw_only=True, eq=False)
class Checkpoint:
    """An open checkpoint; no payload was read. Close it, or use it as a context manager.

    Attributes:
        files: The open directory and descriptors.
        config: ``config.json``.
        generation_config: ``generation_config.json``, empty when absent.
        tokenizer_config: ``tokenizer_config.json``, empty when absent.
        processor_config: ``processor_config.json`` else ``preprocessor_config.json``, empty when
            neither exists.
        small_files: Name -> content of every small file that was read.
        shards: Weight files with their headers.
        digests: Name -> SHA-256 (hex) of the small files.
        notes: Remarks for the user.
    """

    files: CheckpointFiles
    config: CheckpointConfig
    generation_config: CheckpointConfig
    tokenizer_config: CheckpointConfig
    processor_config: CheckpointConfig
    small_files: Mapping[str, bytes]
    shards: ShardSet
    digests: Mapping[str, str]
    notes: tuple[str, ...]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Checkpoint-verbatim key -> header facts, over all shards."""
        return self.shards.tensors

    @property
    def tokenizer_json(self) -> bytes | None:
        """``tokenizer.json`` as it is, ``None`` when absent."""
        return self.small_files.get(TOKENIZER)

    @property
    def template_files(self) -> Mapping[str, bytes]:
        """Name -> content of every file that may hold a chat template."""
        return {
            name: content
            for name, content in self.small_files.items()
            if name in TEMPLATE_FILES or name.partition("/")[0] in TEMPLATE_FOLDERS
        }

    def close(self) -> None:
        """Close every descriptor; safe to call again."""
        self.files.close()


def read_checkpoint(path: str | os.PathLike[str], limits: Limits = LIMITS) -> Checkpoint:
    """Read everything but the payloads.

    Nothing is written, and a read-only directory is enough.

    Args:
        path: Directory, or what ``resolve_hub`` returned.
        limits: Bounds on every file.

    Returns:
        The open checkpoint.

    Raises:
        CheckpointError: A file is absent, damaged, hostile or too large.
    """
    cache_links = isinstance(path, HubSnapshot) and path.cache_links
    files = open_directory(path, limits, cache_links=cache_links)
    try:
        return _read(files, limits)
    except BaseException:
        files.close()
        raise


def _read(files: CheckpointFiles, limits: Limits) -> Checkpoint:
    small = _read_small_files(files, limits)
    configs: dict[str, CheckpointConfig] = {
        name: CheckpointConfig(parse_json_object(small[name], name, limits), name=name)
        for name in (CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG, *PROCESSOR_CONFIGS)
        if name in small
    }
    processor = next((name for name in PROCESSOR_CONFIGS if name in configs), PROCESSOR_CONFIGS[0])
    shards = plan_shards(files, limits)
    return Checkpoint(
        files=files,
        config=configs[CONFIG],
        generation_config=_or_empty(configs, GENERATION_CONFIG),
        tokenizer_config=_or_empty(configs, TOKENIZER_CONFIG),
        processor_config=_or_empty(configs, processor),
        small_files=MappingProxyType(small),
        shards=shards,
        digests=MappingProxyType(
            {name: hashlib.sha256(content).hexdigest() for name, content in small.items()}
        ),
        notes=shards.notes,
    )


def _or_empty(configs: Mapping[str, CheckpointConfig], name: str) -> CheckpointConfig:
    return configs.get(name) or CheckpointConfig({}, name=name)


def _read_small_files(files: CheckpointFiles, limits: Limits) -> dict[str, bytes]:
    if CONFIG not in files.names:
        foreign = foreign_weights(files.names)
        raise CheckpointError(
            f"{CONFIG}: must exist" + (f", got {foreign} without one" if foreign else ""),
            code="checkpoint.missing_file",
            hint=FOREIGN_HINT if foreign else "pass the directory that holds config.json",
        )
    wanted = [CONFIG, GENERATION_CONFIG, TOKENIZER, *PROCESSOR_CONFIGS, *TEMPLATE_FILES]
    wanted.extend(OTHER_FILES)
    names = [name for name in dict.fromkeys(wanted) if name in files.names]
    for folder in TEMPLATE_FOLDERS:
        templates = [name for name in files.folder(folder) if name.endswith(_TEMPLATE_SUFFIX)]
        if len(templates) > limits.named_templates:
            raise CheckpointError(
                f"{folder}: must have at most {limits.named_templates} templates, "
                f"got {len(templates)}",
                code="checkpoint.too_large",
                hint="remove the templates that are not used",
            )
        names.extend(templates)
    return {
        name: files.read_bytes(
            name, limits.tokenizer_bytes if name == TOKENIZER else limits.config_bytes
        )
        for name in names
    }
