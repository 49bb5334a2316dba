"""Where a checkpoint's chat template comes from, and which of several wins."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import attrs

from engine_core.checkpoint.jsonio import parse_json
from engine_core.errors import EngineError, TemplateError
from engine_core.limits import LIMITS, Limits

__all__ = ["TEMPLATE_DIRECTORIES", "TEMPLATE_FILES", "TemplateSources", "select_templates"]

TEMPLATE_FILES: Final = (
    "chat_template.json",
    "chat_template.jinja",
    "chat_template_tool_use.jinja",
)
TEMPLATE_DIRECTORIES: Final = ("additional_chat_templates", "chat_templates")
_DEFAULT: Final = "default"
_TOOL_USE: Final = "tool_use"
_SPECIAL_TOKENS: Final = ("bos_token", "eos_token")
_NAME = re.compile(r"[^/\x00-\x1f\x7f]+")


@attrs.frozen(kw_only=True)
class TemplateSources:
    """The template texts of a checkpoint.

    Attributes:
        default: Template of ordinary requests.
        tool_use: Template of requests with tools; ``None`` when ``default`` serves both.
        named: Every template by name, the two above included.
        origin: File that the default came from.
        special_tokens: ``bos_token`` and ``eos_token`` texts, where known.
    """

    default: str = attrs.field(repr=False)
    tool_use: str | None = attrs.field(default=None, repr=False)
    named: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    origin: str = "caller"
    special_tokens: Mapping[str, str] = attrs.field(factory=dict)


def select_templates(
    files: Mapping[str, bytes],
    tokenizer_config: Mapping[str, Any] | None = None,
    processor_config: Mapping[str, Any] | None = None,
    limits: Limits = LIMITS,
) -> TemplateSources | None:
    """Choose the templates of a checkpoint.

    ``processor_config.json`` wins over ``chat_template.json``, that over template files, those
    over ``tokenizer_config.json``. A tool template in a file of its own serves beside the last
    two only.

    Args:
        files: Template file names, relative to the checkpoint -> their bytes.
        tokenizer_config: Parsed ``tokenizer_config.json``.
        processor_config: Parsed ``processor_config.json``.
        limits: Bounds on sizes, on the number of named templates and on their names.

    Returns:
        The sources, or ``None`` when the checkpoint has no template.

    Raises:
        TemplateError: A source is malformed or too large, or two sources claim one role.
    """
    tokenizer_config = tokenizer_config or {}
    special_tokens = _special_tokens(tokenizer_config)
    loose = _template_files(files, limits)
    if "chat_template.json" in files and any("/" in name for name in files):
        raise _invalid("chat_template.json", "must be the only source", "a template folder too")
    named: Mapping[str, str] | None = None
    origin = ""
    for origin, value in (
        ("processor_config.json", (processor_config or {}).get("chat_template")),
        ("chat_template.json", _json_template(files, limits)),
    ):
        if value is not None:
            named = _read_named(value, origin, limits)
            break
    else:
        if _DEFAULT in loose:
            named, origin = loose, "chat_template.jinja"
        elif tokenizer_config.get("chat_template") is not None:
            origin = "tokenizer_config.json"
            named = {**_read_named(tokenizer_config["chat_template"], origin, limits), **loose}
        elif loose:
            raise _invalid("chat template", "a default template is needed", sorted(loose))
    if named is None:
        return None
    return TemplateSources(
        default=named[_DEFAULT],
        tool_use=named.get(_TOOL_USE),
        named=named,
        origin=origin,
        special_tokens=special_tokens,
    )


def _invalid(subject: str, rule: str, got: object) -> TemplateError:
    return TemplateError(f"{subject}: {rule}, got {got!r}", code="template.source")


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for key in _SPECIAL_TOKENS:
        value = config.get(key)
        if isinstance(value, Mapping):
            value = value.get("content")
        if value is None:
            continue
        if not isinstance(value, str):
            raise _invalid("tokenizer_config.json", f"{key} must be a text", type(value).__name__)
        tokens[key] = value
    return tokens


def _text(data: bytes, what: str, limits: Limits) -> str:
    if len(data) > limits.template_bytes:
        raise TemplateError(
            f"{what}: must fit {limits.template_bytes} bytes, got {len(data)}",
            code="template.too_large",
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise _invalid(what, "must be UTF-8", f"an invalid byte at {exc.start}") from exc


def _template_files(files: Mapping[str, bytes], limits: Limits) -> dict[str, str]:
    """Read template files; a role claimed by two of them is an error."""
    found: dict[str, tuple[str, str]] = {}
    for file in sorted(files):
        name = _role(file)
        if name is None:
            continue
        _require_name(name, file, limits)
        if name in found:
            raise _invalid(
                "chat template", f"only one file may hold the template {name!r}", found[name][0]
            )
        found[name] = (file, _text(files[file], file, limits))
    if len(found) > limits.named_templates:
        raise _invalid("chat template", f"at most {limits.named_templates} files", len(found))
    return {name: text for name, (_, text) in found.items()}


def _role(file: str) -> str | None:
    directory, slash, name = file.partition("/")
    if not slash:
        return {"chat_template.jinja": _DEFAULT, "chat_template_tool_use.jinja": _TOOL_USE}.get(
            file
        )
    if directory in TEMPLATE_DIRECTORIES and name.endswith(".jinja"):
        return name.removesuffix(".jinja")
    return None


def _json_template(files: Mapping[str, bytes], limits: Limits) -> Any:
    name = "chat_template.json"
    if name not in files:
        return None
    data = files[name]
    # Escapes make the file longer than the text that it holds.
    if len(data) > limits.config_bytes:
        raise _invalid(name, f"must fit {limits.config_bytes} bytes", len(data))
    try:
        value = parse_json(data, name, limits)
    except EngineError as exc:
        raise TemplateError(str(exc), code="template.source") from exc
    if not isinstance(value, dict) or value.keys() != {"chat_template"}:
        keys = sorted(value)[:4] if isinstance(value, dict) else type(value).__name__
        raise _invalid(name, "must hold exactly the key chat_template", keys)
    return value["chat_template"]


def _read_named(value: Any, origin: str, limits: Limits) -> dict[str, str]:
    """Read one template, a list of ``{"name", "template"}`` or a mapping by name."""
    if isinstance(value, str):
        entries: list[tuple[Any, Any]] = [(_DEFAULT, value)]
    elif isinstance(value, Mapping):
        entries = list(value.items())
    elif isinstance(value, (list, tuple)) and all(
        isinstance(entry, Mapping) and entry.keys() == {"name", "template"} for entry in value
    ):
        entries = [(entry["name"], entry["template"]) for entry in value]
    else:
        raise _invalid(
            origin, "chat_template must be a text or named templates", type(value).__name__
        )
    if not 1 <= len(entries) <= limits.named_templates:
        raise _invalid(origin, f"needs 1 to {limits.named_templates} templates", len(entries))
    named: dict[str, str] = {}
    for name, text in entries:
        _require_name(name, origin, limits)
        if name in named:
            raise _invalid(origin, "template names must be unique", name)
        if not isinstance(text, str):
            raise _invalid(origin, f"template {name!r} must be a text", type(text).__name__)
        named[name] = _text(text.encode("utf-8", "surrogatepass"), origin, limits)
    if _DEFAULT not in named:
        if len(named) > 1:
            raise _invalid(origin, "named templates need a default", sorted(named)[:4])
        named[_DEFAULT] = next(iter(named.values()))
    return named


def _require_name(name: Any, origin: str, limits: Limits) -> None:
    if (
        not isinstance(name, str)
        or _NAME.fullmatch(name) is None
        or len(name.encode("utf-8", "surrogatepass")) > limits.template_name_bytes
    ):
        raise _invalid(
            origin,
            f"a template name needs 1 to {limits.template_name_bytes} printable bytes without '/'",
            name[:60] if isinstance(name, str) else type(name).__name__,
        )
