"""Reading of one content part: a record or an OpenAI-style dict."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from engine_core.errors import InvalidRequest
from engine_core.messages import (
    AudioPart,
    ImagePart,
    MediaPart,
    TextPart,
    TranslationPart,
    VideoPart,
)
from engine_core.values import is_empty, shown, text_size

if TYPE_CHECKING:
    from engine_core.limits import Limits
    from engine_core.messages import Part

__all__ = ["part_bytes", "read_part"]

_CODE = "request.messages.content"
_DATA_URL = re.compile(r"data:(?P<type>[^;,]*)(?:;[^;,]*)*;base64,", re.IGNORECASE)
_MEDIA: dict[str, type[ImagePart | AudioPart | VideoPart]] = {
    "image": ImagePart,
    "audio": AudioPart,
    "video": VideoPart,
}
_NO_FETCH = "nothing is fetched; read the item yourself and pass its bytes"


def _fail(where: str, rule: str, got: str, hint: str = "") -> NoReturn:
    raise InvalidRequest(f"{where}: {rule}, got {got}", code=_CODE, hint=hint)


def read_part(raw: object, where: str, limits: Limits) -> Part:
    """Read one part.

    Args:
        raw: A part record, or a dict with a ``type``: ``text``, ``translation``, ``image``,
            ``image_url``, ``audio``, ``audio_url``, ``input_audio``, ``video``, ``video_url``.
        where: The part's place, e.g. ``"messages[0].content[1]"``.
        limits: Bounds.

    Returns:
        The part.

    Raises:
        InvalidRequest: The part is no such thing.
    """
    if isinstance(raw, TextPart):
        return _text(raw.text, where)
    if isinstance(raw, TranslationPart):
        return _translation(raw.source_lang, raw.target_lang, raw.text, where)
    if isinstance(raw, (ImagePart, AudioPart, VideoPart)):
        return raw
    if not isinstance(raw, Mapping):
        _fail(where, "must be a part record or a dict", shown(raw))
    kind = raw.get("type")
    if kind == "text":
        if not is_empty(raw.get("source_lang_code")) or not is_empty(raw.get("target_lang_code")):
            _only(raw, {"type", "text", "source_lang_code", "target_lang_code"}, where)
            source, target = raw.get("source_lang_code"), raw.get("target_lang_code")
            return _translation(source, target, raw.get("text"), where)
        _only(raw, {"type", "text"}, where)
        return _text(raw.get("text"), where)
    if kind == "translation":
        _only(raw, {"type", "text", "source_lang", "target_lang"}, where)
        return _translation(raw.get("source_lang"), raw.get("target_lang"), raw.get("text"), where)
    if isinstance(kind, str):
        modality = kind.removesuffix("_url")
        if modality in _MEDIA:
            read = _local if kind == modality else _from_url
            return read(raw, modality, where, limits)
        if kind == "input_audio":
            return _input_audio(raw, where, limits)
    return _fail(f"{where}.type", "must name a known kind of part", shown(kind))


def part_bytes(part: Part) -> int:
    """Count what a part holds in memory.

    Args:
        part: A part that ``read_part`` returned.

    Returns:
        UTF-8 bytes of its text or encoded bytes of its media; 0 for a file not yet read.
    """
    if isinstance(part, MediaPart):
        return len(part.data or b"")
    return len(part.text.encode())


def _only(raw: Mapping[str, Any], known: set[str], where: str) -> None:
    for key, value in raw.items():
        if key not in known and not is_empty(value):
            _fail(where, "must have known fields only", shown(key))


def _text(text: object, where: str) -> TextPart:
    if not isinstance(text, str):
        _fail(f"{where}.text", "must be a string", shown(text))
    text_size(text, f"{where}.text", _CODE)
    return TextPart(text)


def _translation(source: object, target: object, text: object, where: str) -> TranslationPart:
    values = {"source_lang": source, "target_lang": target, "text": text}
    checked: dict[str, str] = {}
    for name, value in values.items():
        if not isinstance(value, str) or not value.strip():
            _fail(f"{where}.{name}", "must be a non-blank string", shown(value))
        text_size(value, f"{where}.{name}", _CODE)
        checked[name] = value
    return TranslationPart(**checked)


def _local(raw: Mapping[str, Any], modality: str, where: str, limits: Limits) -> Part:
    """Read ``{"type": "image", "data": ...}`` or ``{"type": "image", "path": ...}``."""
    _only(raw, {"type", "data", "path"}, where)
    data = raw.get("data")
    if isinstance(data, str):
        data = _decode(data, f"{where}.data", limits)
    try:
        return _MEDIA[modality](data=data, path=raw.get("path"))
    except InvalidRequest as exc:
        raise InvalidRequest(f"{where}: {exc}", code=exc.code, hint=exc.hint) from exc


def _from_url(raw: Mapping[str, Any], modality: str, where: str, limits: Limits) -> Part:
    """Read ``{"type": "image_url", "image_url": {"url": "data:..."}}``.

    Only data URLs: a URL written by a remote party never opens a local file.
    """
    field = f"{modality}_url"
    _only(raw, {"type", field}, where)
    url = raw.get(field)
    where = f"{where}.{field}"
    if isinstance(url, Mapping):
        # "auto" leaves the resolution to the engine; anything else asks for what nobody does.
        known = {"url", "detail"} if url.get("detail") == "auto" else {"url"}
        _only(url, known, where)
        url = url.get("url")
    if not isinstance(url, str):
        _fail(where, "must be a data URL", shown(url))
    match = _DATA_URL.match(url)
    if match is None:
        _fail(where, "must be a base64 data URL", shown(url), _NO_FETCH)
    if not match["type"].lower().startswith(f"{modality}/"):
        _fail(where, f"media type must be {modality}/*", shown(match["type"]))
    return _MEDIA[modality](data=_decode(url[match.end() :], where, limits))


def _input_audio(raw: Mapping[str, Any], where: str, limits: Limits) -> Part:
    _only(raw, {"type", "input_audio"}, where)
    where = f"{where}.input_audio"
    audio = raw.get("input_audio")
    if not isinstance(audio, Mapping):
        _fail(where, "must be a dict with data and format", shown(audio))
    # The format is only a hint: the decoder looks at the bytes.
    _only(audio, {"data", "format"}, where)
    data = audio.get("data")
    if not isinstance(data, str):
        _fail(f"{where}.data", "must be base64 text", shown(data))
    return AudioPart(data=_decode(data, f"{where}.data", limits))


def _decode(text: str, where: str, limits: Limits) -> bytes:
    bound = limits.content_bytes_per_message
    if len(text) // 4 * 3 > bound + 3:
        _fail(where, f"must decode to at most {bound} bytes", f"{len(text)} base64 characters")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise InvalidRequest(
            f"{where}: must be standard base64, got {len(text)} other characters", code=_CODE
        ) from exc
