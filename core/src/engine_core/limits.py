"""The engine's bounds in one frozen record."""

from __future__ import annotations

import attrs

__all__ = ["LIMITS", "Limits"]

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


@attrs.frozen(kw_only=True)
class Limits:
    """Bounds on hostile or oversized input.

    A caller may pass its own record to lower a bound; the defaults are those of the project's
    decisions. Units stand in each name or its comment.
    """

    # Checkpoint files.
    config_bytes: int = 16 * MIB
    tokenizer_bytes: int = 64 * MIB
    index_bytes: int = 64 * MIB
    header_bytes: int = 16 * MIB
    headers_total_bytes: int = 32 * MIB
    shards: int = 1024
    tensors: int = 200_000
    tensor_name_bytes: int = 4096
    tensor_rank: int = 32
    tensor_dimension: int = 2**31 - 1
    json_depth: int = 64
    json_number_digits: int = 1000
    directory_entries: int = 16_384
    quantization_overrides: int = 65_536
    quantization_path_bytes: int = 1024

    # Chat templates.
    template_bytes: int = 256 * KIB
    template_output_bytes: int = 16 * MIB
    template_work_units: int = 2_000_000
    named_templates: int = 32
    template_name_bytes: int = 128

    # Requests.
    messages: int = 4096
    parts_per_message: int = 1024
    parts_total: int = 16_384
    media_parts: int = 64
    content_bytes_per_message: int = 128 * MIB
    content_bytes_total: int = 256 * MIB
    reasoning_bytes_per_message: int = 16 * MIB
    reasoning_bytes_total: int = 64 * MIB
    tools: int = 256
    tool_calls: int = 4096
    tool_call_id_bytes: int = 256
    tool_name_chars: int = 64
    tool_description_bytes: int = 16 * KIB
    tool_descriptions_total_bytes: int = MIB
    tool_schema_bytes: int = MIB
    tool_schemas_total_bytes: int = 8 * MIB
    arguments_bytes: int = MIB
    arguments_total_bytes: int = 8 * MIB
    schema_nodes: int = 4096  # subschemas, references counted where they are used
    schema_depth: int = 64
    schema_choices: int = 256  # entries of one ``enum``
    checked_nodes: int = 8192  # values in a checked instance, and visits of one check
    checked_entries: int = 256  # entries of one container in a checked instance
    checked_bytes: int = 64 * MIB  # text looked at in one check, each visit counted
    reply_calls: int = 64  # proposed and accepted calls of one reply
    call_openers: int = 256  # markers of one reply that may begin a call
    argument_key_bytes: int = 128
    max_tokens: int = 1_048_576
    context_tokens: int = 16_777_216
    stop_strings: int = 64
    stop_string_bytes: int = 4096
    logit_bias_entries: int = 4096
    top_logprobs: int = 64
    temperature: float = 2.0
    repetition_penalty: float = 100.0
    penalty: float = 2.0  # presence and frequency, either sign
    logit_bias: float = 100.0  # either sign
    deadline_seconds: float = 31_536_000.0
    reasoning_budget: int = 1_048_576
    speculative_tokens: int = 8

    # Running.
    prefill_chunk_tokens: int = 512
    keep_rows: int = 16  # rows that ``keep`` can take back on any cache
    queue_jobs: int = 8
    queue_jobs_max: int = 64
    stream_events: int = 64
    allocator_cache_bytes: int = 2 * GIB  # default on a GPU; on a CPU nothing is kept
    prompt_cache_bytes: int = 2 * GIB  # default of a pool; an eighth of memory when that is less
    prompt_cache_entries: int = 1024
    prompt_cache_ttl_seconds: float = 31_536_000.0


LIMITS = Limits()
