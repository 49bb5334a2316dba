"""From a checked request to a reply: prompt, caches, prefill, decode, assembly."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import mlx.core as mx

from engine_core.decode.finish import finish_reason
from engine_core.decode.loop import Decoder
from engine_core.decode.sampling import SamplingOptions
from engine_core.decode.score import score
from engine_core.errors import CapabilityUnavailable, ContextExceeded, InvalidRequest
from engine_core.generation import Run
from engine_core.messages import FinishReason, Usage
from engine_core.prompt_reuse import PromptStart
from engine_core.reply_text import ReasoningBudget
from engine_core.request import GenerateReply, Timings
from engine_core.tools.outcome import judge_structured, judge_tool_choice
from engine_core.values import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from engine_core.cache.base import LayerCache
    from engine_core.events import Segment
    from engine_core.generation import Control, Request
    from engine_core.loading import Loaded
    from engine_core.reply_text import ReplyText
    from engine_core.request import GenerateOptions

__all__ = ["answer", "score_tokens"]


def answer(
    loaded: Loaded,
    request: Request,
    control: Control,
    caches: Sequence[LayerCache] | None = None,
) -> GenerateReply:
    """Run one request.

    Args:
        loaded: The model and what belongs to it.
        request: The request.
        control: The caller's side of it.
        caches: Caller's caches, which hold a prefix of the prompt; ``None`` for fresh ones.

    Returns:
        The reply.

    Raises:
        EngineError: The request cannot be honoured, failed or was cancelled.
    """
    started = time.perf_counter()
    options = request.options
    _refuse_unavailable(options)
    offset = 0 if caches is None else _check_caches(loaded, caches)
    run = Run(
        request=request,
        control=control,
        context_limit=_context_limit(loaded, options) - offset,
    )
    run.checkpoint()
    prompt = loaded.prompter.prompt(request)
    _check_ids(loaded, prompt.ids)
    close = () if options.reasoning_budget is None else loaded.prompter.reasoning_close()
    text = loaded.prompter.reply_text(request, opens_reasoning=prompt.opens_reasoning)
    run.start(len(prompt.ids), reserved=len(close))
    with PromptStart.resolve(loaded, prompt, caches, uses_pool=options.prompt_cache) as start:
        run.cached_tokens = start.cached
        run.progress("prefill", done_tokens=start.cached)
        logits = start.prefill(
            run.checkpoint, lambda done: run.progress("prefill", done_tokens=done)
        )
        prefilled = time.perf_counter()
        known, unknown = loaded.prompter.vocabulary(logits.size)
        decoder = start.decoder = Decoder(
            loaded.model,
            start.caches,
            logits,
            _sampling(loaded, options),
            prompt=prompt.ids,
            max_tokens=options.max_tokens,
            eos=loaded.eos_token_ids,
            position=start.origin + len(prompt.ids),
            vocab_size=known,
            mask=_mask(known, unknown),
            top_logprobs=options.top_logprobs if options.logprobs else None,
            lookahead=options.lookahead,
        )
        budget = ReasoningBudget(options.reasoning_budget, is_open=prompt.opens_reasoning)
        with decoder:
            _decode(decoder, run, text, budget, close)
        outcome = decoder.outcome
        calls = text.tool_calls
        reply = GenerateReply(
            text=text.text,
            reasoning=text.reasoning,
            tool_calls=calls,
            finish_reason=finish_reason(outcome.finish, has_tool_calls=bool(calls)),
            usage=Usage(
                prompt_tokens=len(prompt.ids),
                cached_tokens=start.cached,
                completion_tokens=len(outcome.emitted),
            ),
            token_ids=outcome.emitted,
            logprobs=tuple(text.logprobs) if options.logprobs else None,
            truncated=outcome.finish is FinishReason.LENGTH,
            tool_choice=judge_tool_choice(options.tool_choice, calls, text.refusals),
            structured=None
            if request.response_schema is None
            else judge_structured(text.text, request.response_schema, has_calls=bool(calls)),
            timings=Timings(
                load_seconds=loaded.info.load_seconds,
                prefill_seconds=prefilled - started,
                decode_seconds=time.perf_counter() - prefilled,
            ),
        )
        run.complete(reply)
    return reply


def score_tokens(
    loaded: Loaded, token_ids: Sequence[int], control: Control
) -> npt.NDArray[np.float32]:
    """Compute teacher-forced logits.

    Args:
        loaded: The model and what belongs to it.
        token_ids: Checked ids.
        control: The caller's side.

    Returns:
        float32 ``[T, V]``.

    Raises:
        EngineError: An id has no row, they exceed the context, or the forward failed.
    """
    _check_ids(loaded, token_ids)
    limit = loaded.spec.answers.architecture.context_length
    if len(token_ids) > limit:
        raise ContextExceeded(len(token_ids), 0, limit)
    return score(
        loaded.model,
        loaded.new_caches(),
        token_ids,
        chunk=loaded.limits.prefill_chunk_tokens,
        checkpoint=control.checkpoint,
    )


def _check_caches(loaded: Loaded, caches: Sequence[LayerCache]) -> int:
    expected = loaded.new_caches()
    if not _fit(caches, expected):
        raise InvalidRequest(
            "caches: must be the list that new_caches() of a session of this model gave, got "
            f"{shown(caches)}",
            code="request.caches",
        )
    offsets = {cache.offset for cache in caches}
    if len(offsets) != 1:
        raise InvalidRequest(
            f"caches: must hold the same tokens in every layer, got lengths {sorted(offsets)}",
            code="request.caches",
            hint="caches of a failed request cannot be used again",
        )
    return offsets.pop()


def _fit(caches: object, expected: Sequence[LayerCache]) -> bool:
    """Whether these can stand in for new caches."""
    if not isinstance(caches, (list, tuple)) or len(caches) != len(expected):
        return False
    alike = all(
        type(given) is type(wanted) and given.layout == wanted.layout
        for given, wanted in zip(caches, expected, strict=True)
    )
    # Layers that share a cache share one object, and no others do.
    return alike and _repeats(caches) == _repeats(expected)


def _repeats(caches: Sequence[LayerCache]) -> list[int]:
    """Give for each layer the first layer that has the same cache."""
    first: dict[int, int] = {}
    return [first.setdefault(id(cache), layer) for layer, cache in enumerate(caches)]


def _check_ids(loaded: Loaded, ids: Sequence[int]) -> None:
    vocab_size = loaded.spec.answers.architecture.vocab_size
    if ids and max(ids) >= vocab_size:
        raise InvalidRequest(
            f"token ids: must lie in [0, {vocab_size}), got {max(ids)!r}",
            code="request.token_ids",
        )


def _context_limit(loaded: Loaded, options: GenerateOptions) -> int:
    limit = loaded.spec.answers.architecture.context_length
    return limit if options.context_tokens is None else min(limit, options.context_tokens)


def _sampling(loaded: Loaded, options: GenerateOptions) -> SamplingOptions:
    return SamplingOptions(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        min_tokens_to_keep=options.min_tokens_to_keep,
        xtc_probability=options.xtc_probability,
        xtc_threshold=options.xtc_threshold,
        xtc_protected=tuple(sorted({*loaded.eos_token_ids, *loaded.prompter.newline_ids()})),
        repetition_penalty=options.repetition_penalty,
        repetition_context_size=options.repetition_context_size,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=options.logit_bias,
        logits_processors=options.logits_processors,
        seed=options.seed,
    )


def _mask(known: int, unknown: Sequence[int]) -> mx.array | None:
    """Forbid ids without a token that lie between others."""
    if not unknown:
        return None
    return mx.zeros((known,), dtype=mx.float32).at[mx.array(list(unknown))].add(-math.inf)


def _refuse_unavailable(options: GenerateOptions) -> None:
    """Refuse what this engine cannot do for any checkpoint; nothing is ignored silently."""
    if options.speculative_tokens:
        raise CapabilityUnavailable("acceleration:mtp", "no certified draft module is loaded")


def _decode(
    decoder: Decoder,
    run: Run,
    text: ReplyText,
    budget: ReasoningBudget,
    close: Sequence[int],
) -> None:
    """Run the decoder and hand every segment on; stop where the caller or a stop text says so."""
    forced = 0
    for step in decoder:
        run.checkpoint()
        run.progress("decode", done_tokens=run.prompt_tokens, completion_tokens=step.ordinal + 1)
        segments = text.push(step)
        if step.is_forced:
            forced -= 1
            if forced == 0:
                text.expect_duplicate_close()
        elif budget.observe(is_open=text.in_reasoning):
            decoder.force(close, extends_limit=True)
            forced = len(close)
        if text.is_stopped:
            decoder.stop(FinishReason.STOP)
        if not _deliver(run, text, segments):
            decoder.stop(FinishReason.ABORTED)
            # A call that was complete counts; nothing further is delivered.
            text.finish()
            return
    segments = text.finish()
    if text.is_stopped:
        decoder.stop(FinishReason.STOP)
    if not _deliver(run, text, segments):
        decoder.stop(FinishReason.ABORTED)


def _deliver(run: Run, text: ReplyText, segments: Sequence[Segment]) -> bool:
    for segment in segments:
        text.record(segment)
        if not run.deliver(segment):
            return False
    return True
