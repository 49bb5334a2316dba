"""The synthetic conversations that the capability probe renders.

Every text is unlike anything that a template writes by itself, so finding it in a prompt proves
that the template took it from the conversation.
"""

from __future__ import annotations

from typing import Final

import attrs

from engine_core.messages import Message, ToolCall, ToolDecl, TranslationPart

__all__ = [
    "CONTROL_TOOLS",
    "PROBE_TOOLS",
    "Sample",
    "assistant",
    "sample_calls",
    "sample_results",
    "system",
    "translation",
    "user",
]

USER: Final = "zqprobe user 5c1e"
FOLLOW_UP: Final = "zqprobe more 81d0"
SYSTEM: Final = "zqprobe rule 3fa7"
ANSWER: Final = "zqprobe said 9b42"
REASONING: Final = "zqprobe idea e60d"
TRANSLATE: Final = "zqprobe text 27c8"


@attrs.frozen
class Sample:
    """One declared tool with a call to it and its result.

    Attributes:
        name: Function name.
        parameter: Its only parameter, a string.
        argument: Value in the call.
        result: What the tool said.
        identity: Call id.
    """

    name: str
    parameter: str
    argument: str
    result: str
    identity: str

    @property
    def declaration(self) -> ToolDecl:
        """The tool as a request declares it."""
        return ToolDecl(
            name=self.name,
            description="Sample function.",
            parameters={
                "type": "object",
                "properties": {
                    self.parameter: {"type": "string", "description": "Sample parameter."}
                },
                "required": [self.parameter],
            },
        )

    @property
    def call(self) -> ToolCall:
        """A call of the tool."""
        return ToolCall(id=self.identity, name=self.name, arguments={self.parameter: self.argument})


PROBE_TOOLS: Final = (
    Sample("zqtool_a41f", "zqkey_6d3b", "zqvalue_c95e", "zqresult_12fa", "zqcall0a7"),
    Sample("zqtool_b82e", "zqkey_7e4c", "zqvalue_d06f", "zqresult_23ab", "zqcall1b8"),
)
CONTROL_TOOLS: Final = (
    Sample("zqother_c3d1", "zqfield_8f5d", "", "", ""),
    Sample("zqother_d4e2", "zqfield_9a6e", "", "", ""),
)


def user(text: str = USER) -> Message:
    """Make a user turn.

    Args:
        text: Its text.

    Returns:
        The turn.
    """
    return Message(role="user", content=text)


def system(text: str = SYSTEM) -> Message:
    """Make a system turn.

    Args:
        text: Its text.

    Returns:
        The turn.
    """
    return Message(role="system", content=text)


def assistant(
    text: str = ANSWER, *, reasoning: str | None = None, calls: tuple[ToolCall, ...] = ()
) -> Message:
    """Make an assistant turn.

    Args:
        text: Its answer.
        reasoning: Its reasoning.
        calls: Its calls.

    Returns:
        The turn.
    """
    return Message(role="assistant", content=text, reasoning=reasoning, tool_calls=calls)


def sample_calls(samples: tuple[Sample, ...], reasoning: str | None = None) -> Message:
    """Make an assistant turn that calls every sample.

    Args:
        samples: Called tools, in order.
        reasoning: Reasoning before the calls.

    Returns:
        The turn.
    """
    calls = tuple(sample.call for sample in samples)
    return assistant("", reasoning=reasoning, calls=calls)


def sample_results(samples: tuple[Sample, ...], *, as_user: bool = False) -> list[Message]:
    """Make the turns that answer the calls of every sample.

    Args:
        samples: Called tools, in order.
        as_user: Send the same texts as user turns instead.

    Returns:
        One turn a call.
    """
    if as_user:
        return [user(sample.result) for sample in samples]
    return [
        Message(
            role="tool",
            content=sample.result,
            tool_call_id=sample.identity,
            name=sample.name,
        )
        for sample in samples
    ]


def translation(target: str) -> Message:
    """Make a user turn that asks for a translation from English.

    Args:
        target: Target language code.

    Returns:
        The turn.
    """
    part = TranslationPart(source_lang="en", target_lang=target, text=TRANSLATE)
    return Message(role="user", content=[part])
