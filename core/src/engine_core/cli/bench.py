"""``engine bench``: prefill and decode speed of one checkpoint on this machine."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from engine_core.cli.options import load_client
from engine_core.errors import InvalidRequest

if TYPE_CHECKING:
    import argparse

    from engine_core.cli.output import Output

__all__ = ["run"]


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Time prompts of known length and report the median.

    Args:
        arguments: Parsed arguments.
        output: Where the figures go.

    Returns:
        Exit code.
    """
    with load_client(arguments, output, template=False) as client:
        vocabulary, longest = client.info.vocab_size, client.info.context_length
        if arguments.prompt_tokens > longest:  # before a list of so many is made
            raise InvalidRequest(
                f"bench: prompt tokens must fit {longest} context tokens, "
                f"got {arguments.prompt_tokens}",
                code="request.context_exceeded",
            )
        no_eos = dict.fromkeys(client.info.eos_token_ids, -100.0)
        prefill, decode = [], []
        for attempt in range(arguments.runs + 1):
            # Distinct ids each time, so that no cached prefix makes a run cheaper.
            prompt = [
                (17 + attempt * 7919 + 31 * index) % vocabulary
                for index in range(arguments.prompt_tokens)
            ]
            reply = client.complete(
                prompt, max_tokens=arguments.max_tokens, logit_bias=no_eos, prompt_cache=False
            )
            if attempt == 0:  # warm-up: first use compiles and faults pages in
                continue
            prefill.append(reply.timings.prompt_tokens_per_second(reply.usage))
            decode.append(reply.timings.decode_tokens_per_second(reply.usage))
        memory = client.info.memory.peak
        backend = client.info.backend
    figures = {
        "prompt_tokens": arguments.prompt_tokens,
        "generated_tokens": arguments.max_tokens,
        "prefill_tokens_per_second": statistics.median(prefill),
        "decode_tokens_per_second": statistics.median(decode),
        "peak_memory_bytes": memory,
        "device": backend.device,
        "blas": backend.blas,
    }
    if output.as_json:
        output.record("bench", **figures)
        return 0
    for name, value in figures.items():
        output.line(
            f"{name:<28} {value:.1f}" if isinstance(value, float) else f"{name:<28} {value}"
        )
    return 0
