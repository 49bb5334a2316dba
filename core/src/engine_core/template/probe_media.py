"""The media part of the capability probe: whether a template renders a media item."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from engine_core.messages import AudioPart, ImagePart, Message, TextPart
from engine_core.template import probe_samples as samples

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine_core.messages import Part, ToolDecl

    Render = Callable[[Sequence[Message], Sequence[ToolDecl]], str | None]
    Path = tuple[Sequence[Message], Sequence[ToolDecl]]

__all__ = ["MEDIA", "probe_media"]

MEDIA: Final[dict[str, ImagePart | AudioPart]] = {
    "images": ImagePart(data=b"zq"),
    "audio": AudioPart(data=b"zq"),
}
"""A sample of each kind that a template may render; its bytes never reach a template."""

_KEYS: Final = ("'type'", '"type"')


def probe_media(render: Render, kind: str, paths: Sequence[Path]) -> str | None:
    """Render a user turn with none, one and two items, on every path.

    Args:
        render: Renders a conversation; ``None`` when the template refuses it.
        kind: A key of ``MEDIA``.
        paths: Conversations that begin with a user turn, each with its tools.

    Returns:
        The first check that failed, ``None`` when the items render.
    """
    for messages, tools in paths:
        where = " with tools" if tools else ""
        texts = []
        for count in range(3):
            parts: list[Part] = [*[MEDIA[kind]] * count, TextPart(samples.USER)]
            first = attrs.evolve(messages[0], content=parts)
            text = render([first, *messages[1:]], tools)
            if text is None:
                return f"a turn with {kind} does not render{where}"
            if samples.USER not in text:
                return f"the text beside {kind} is lost{where}"
            texts.append(text)
        if len(set(texts)) < len(texts):
            return f"{kind} change nothing in the prompt{where}"
        # A template that prints content as it stands shows the keys of its parts.
        if any(texts[1].count(key) > texts[0].count(key) for key in _KEYS):
            return f"the keys of {kind} leak into the prompt{where}"
    return None
