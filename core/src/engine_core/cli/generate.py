"""``engine generate``: stream one answer, then report tokens per second."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine_core.cli.options import (
    generation_options,
    load_client,
    read_prompt,
    restore_cache,
    save_cache,
)
from engine_core.cli.output import BadUsage

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from engine_core.cli.output import Output
    from engine_core.request import GenerateReply

__all__ = ["report", "run", "stream_reply"]


def stream_reply(events: Iterable[Any], output: Output) -> GenerateReply:
    """Write a stream's segments as they come.

    Args:
        events: What ``Client.stream`` yields.
        output: Where they go.

    Returns:
        The finished reply.
    """
    from engine_core.events import Completed, Progress, Segment, TokenKind

    reply = None
    thinking = False
    for event in events:
        if isinstance(event, Completed):
            reply = event.reply
        elif isinstance(event, Progress):
            if event.phase == "prefill" and event.prompt_tokens:
                output.progress("reading", event.done_tokens, event.prompt_tokens)
        elif isinstance(event, Segment):
            if output.as_json:
                output.record(
                    "segment", kind=event.kind.value, text=event.text, ordinal=event.ordinal
                )
                continue
            if (event.kind is TokenKind.REASONING) != thinking:
                thinking = not thinking
                output.text("<think>" if thinking else "</think>\n")
            output.text(event.text)
    if reply is None:  # a stream always ends with its reply or raises
        msg = "stream ended without a reply"
        raise RuntimeError(msg)
    return reply


def report(reply: GenerateReply, peak_bytes: int, output: Output) -> None:
    """Write the closing figures.

    Args:
        reply: The finished reply.
        peak_bytes: Peak memory of the device.
        output: Where they go.
    """
    timings, usage = reply.timings, reply.usage
    prompt_speed = timings.prompt_tokens_per_second(usage)
    decode_speed = timings.decode_tokens_per_second(usage)
    if output.as_json:
        output.record(
            "reply",
            text=reply.text,
            reasoning=reply.reasoning,
            finish_reason=reply.finish_reason.value,
            truncated=reply.truncated,
            token_ids=list(reply.token_ids),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            prompt_tokens_per_second=prompt_speed,
            generation_tokens_per_second=decode_speed,
            peak_memory_bytes=peak_bytes,
        )
        return
    output.line()
    output.note(f"Prompt: {usage.prompt_tokens} tokens, {prompt_speed:.1f} tokens/s")
    output.note(f"Generation: {usage.completion_tokens} tokens, {decode_speed:.1f} tokens/s")
    output.note(f"Peak memory: {peak_bytes / 1e9:.3f} GB")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Answer one prompt.

    Args:
        arguments: Parsed arguments.
        output: Where everything goes.

    Returns:
        Exit code.
    """
    if arguments.ignore_chat_template:
        _refuse_template_flags(arguments)
    options = generation_options(arguments)
    prompt = read_prompt(arguments.prompt)
    loading = {"template": False} if arguments.ignore_chat_template else {}
    with load_client(
        arguments, output, extra_eos_tokens=tuple(arguments.extra_eos_token), **loading
    ) as client:
        restore_cache(client, arguments.prompt_cache_file, output)
        stored: dict[str, Any] = {"prompt": prompt}
        if arguments.ignore_chat_template:
            events = client.stream_complete(prompt, **options)
        else:
            messages = [{"role": "user", "content": prompt}]
            if arguments.system_prompt is not None:
                messages.insert(0, {"role": "system", "content": arguments.system_prompt})
            if arguments.prefill_response is not None:
                options["prefill"] = arguments.prefill_response
                if not output.as_json:
                    output.text(arguments.prefill_response)
            events = client.stream(messages, **options)
            stored = {"messages": messages}
        reply = stream_reply(events, output)
        report(reply, client.info.memory.peak, output)
        save_cache(client, arguments.prompt_cache_file, output, **stored, **options)
    return 0


def _refuse_template_flags(arguments: argparse.Namespace) -> None:
    """Refuse what only a chat template could honour."""
    for flag in ("system_prompt", "prefill_response", "thinking", "chat_template_config"):
        if getattr(arguments, flag) is not None:
            name = f"--{flag.replace('_', '-')}"
            raise BadUsage(f"{name}: needs the chat template, got --ignore-chat-template")
