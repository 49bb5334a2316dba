"""The decode loop: ledgers, look-ahead, undo, forced tokens and failures.

The model mixes a full and a sliding attention cache, a recurrent one and a shared entry; every id
and every state is compared with a float64 NumPy model that recomputes the whole sequence.
"""

import mlx.core as mx
import numpy as np
import pytest

from engine_core.cache.kv import KvCache
from engine_core.cache.recurrent import RecurrentCache
from engine_core.decode import sampling, stepper
from engine_core.decode.finish import finish_reason, stronger_reason
from engine_core.decode.loop import Decoder
from engine_core.decode.prefill import run_prefill
from engine_core.decode.sampling import Sampler, SamplingOptions
from engine_core.errors import BackendError, CacheError, CallbackError, InvalidRequest, ModelError
from engine_core.messages import FinishReason
from engine_core.step import StepOutput

VOCAB, WIDTH, WINDOW = 41, 8, 4
RNG = np.random.default_rng(12)
EMBED, FULL_Q, SLIDE_Q, MIX, HEAD = (
    RNG.normal(size=shape) * scale
    for shape, scale in (
        ((VOCAB, WIDTH), 1.0),
        ((WIDTH, WIDTH), 0.5),
        ((WIDTH, WIDTH), 0.5),
        ((WIDTH, WIDTH), 0.4),
        ((WIDTH, VOCAB), 1.5),
    )
)
PROMPT = [3, 11, 7, 7, 20, 5]
BOTH = pytest.mark.parametrize("lookahead", [True, False], ids=["ahead", "plain"])


def attend64(queries, keys, window):
    scores = queries @ keys.T
    rows = np.arange(len(keys))
    visible = (rows[None] <= rows[:, None]) & (rows[None] > rows[:, None] - window)
    weights = np.where(visible, np.exp(scores - scores.max(axis=1, keepdims=True)), 0)
    return weights / weights.sum(axis=1, keepdims=True) @ keys


def reference(ids, origin=0):
    """Logits ``[T, V]`` of a whole sequence in float64."""
    x = EMBED[list(ids)] + 0.1 * np.sin(origin + np.arange(len(ids)))[:, None]
    x = x + attend64(x @ FULL_Q, x, len(ids) + 1)
    x = x + attend64(x @ SLIDE_Q, x, WINDOW)
    state, rows = np.zeros(WIDTH), []
    for row in x:
        state = np.tanh(state @ MIX + row)
        rows.append(state)
    return np.array(rows) @ HEAD


def rollout(prompt, count, adjust=lambda row, generated: row):
    generated = []
    for _ in range(count):
        row = adjust(reference([*prompt, *generated])[-1], generated)
        generated.append(int(np.argmax(row)))
    return generated


def array(values):
    return mx.array(values, dtype=mx.float32)


def recur(slots, inputs, _, ends):
    (state,), (x,) = slots, inputs
    states = []
    for row in range(x.shape[1]):
        state = mx.tanh(state @ array(MIX) + x[:, row])
        states.append(state)
    return mx.stack(states, axis=1), [(states[end - 1],) for end in ends]


class HybridModel:
    def __init__(self):
        self.positions = []
        self.head_rows = 0

    def embed(self, ids):
        return array(EMBED)[ids]

    def attend(self, queries, x, cache):
        rows = x.shape[1]
        keys, values = cache.append(x[:, None], x[:, None])
        total = keys.shape[2]
        at = mx.arange(total)[None, :]
        query_at = mx.arange(total - rows, total)[:, None]
        visible = (at <= query_at) & (at > query_at - (cache.window or total))
        scores = mx.where(visible, queries @ keys[:, 0].swapaxes(1, 2), -mx.inf)
        return mx.softmax(scores, axis=-1) @ values[:, 0]

    def forward(self, step, caches):
        full, sliding, recurrent, shared = caches
        assert shared is full
        rows = step.ids.shape[1]
        self.positions.append(step.positions)
        offsets = (step.positions + mx.arange(rows)).astype(mx.float32)
        x = self.embed(step.ids) + 0.1 * mx.sin(offsets)[None, :, None]
        x = x + self.attend(x @ array(FULL_Q), x, full)
        x = x + self.attend(x @ array(SLIDE_Q), x, sliding)
        return StepOutput(hidden=recurrent.run(recur, (x,)))

    def head(self, hidden):
        self.head_rows += hidden.shape[1]
        return hidden @ array(HEAD)


def new_caches():
    full = KvCache(kv_heads=1, head_dim=WIDTH, dtype=mx.float32, growth=4)
    sliding = KvCache(kv_heads=1, head_dim=WIDTH, dtype=mx.float32, window=WINDOW, growth=4)
    recurrent = RecurrentCache(shapes=[(1, WIDTH)], dtypes=[mx.float32])
    return [full, sliding, recurrent, full]


class Run:
    """A decoder over fresh caches, and what it delivered."""

    def __init__(self, options=None, *, model=None, prompt=PROMPT, max_tokens=12, **kwargs):
        self.model = model or HybridModel()
        self.prompt = prompt
        self.caches = new_caches()
        logits = run_prefill(self.model, self.caches, prompt)
        self.model.positions.clear()
        self.decoder = Decoder(
            self.model,
            self.caches,
            logits,
            options or SamplingOptions(),
            prompt=prompt,
            max_tokens=max_tokens,
            **kwargs,
        )
        self.steps = []

    def go(self, on_step=lambda decoder, step: None):
        with self.decoder as decoder:
            for step in decoder:
                self.steps.append(step)
                on_step(decoder, step)
        return self

    @property
    def ids(self):
        return [step.token for step in self.steps]

    def check_state(self):
        """Every layer equals a cold feed of prompt and committed tokens."""
        decoder = self.decoder
        assert decoder.caches_valid
        assert decoder.committed_len <= len(decoder.emitted)
        fed = [*self.prompt, *decoder.emitted[: decoder.committed_len]]
        assert [cache.offset for cache in self.caches] == [len(fed)] * 4
        row = run_prefill(HybridModel(), self.caches, [9, 30], start=len(fed))
        np.testing.assert_allclose(np.array(row), reference([*fed, 9, 30])[-1], atol=1e-4)


@BOTH
def test_decoder_greedy_follows_the_reference_to_max_tokens(lookahead):
    run = Run(max_tokens=40, lookahead=lookahead).go()
    assert run.ids == rollout(PROMPT, 40)
    assert [step.ordinal for step in run.steps] == list(range(40))
    outcome = run.decoder.outcome
    assert outcome.emitted == tuple(run.ids)
    assert outcome.finish is FinishReason.LENGTH
    assert outcome.committed_len == 39
    run.check_state()


@BOTH
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_decoder_last_allowed_token_is_not_fed(lookahead, max_tokens):
    run = Run(max_tokens=max_tokens, lookahead=lookahead).go()
    assert run.model.positions == list(range(len(PROMPT), len(PROMPT) + max_tokens - 1))
    assert run.decoder.committed_len == max_tokens - 1
    run.check_state()


@BOTH
@pytest.mark.parametrize("at", [0, 1, 6, 11])
def test_decoder_eos_is_emitted_but_not_committed(lookahead, at):
    ids = rollout(PROMPT, 12)
    at = ids.index(ids[at])
    run = Run(lookahead=lookahead, eos={ids[at], VOCAB + 7}).go()
    assert run.ids == ids[: at + 1]
    assert [step.is_eos for step in run.steps] == [False] * at + [True]
    assert run.decoder.outcome.finish is FinishReason.STOP
    assert run.decoder.committed_len == at
    run.check_state()


@BOTH
@pytest.mark.parametrize("at", [0, 4, 11])
@pytest.mark.parametrize("reason", [FinishReason.ABORTED, FinishReason.STOP])
def test_decoder_stop_takes_the_queued_step_back(lookahead, at, reason):
    run = Run(lookahead=lookahead)
    run.go(lambda decoder, step: decoder.stop(reason) if step.ordinal == at else None)
    assert run.ids == rollout(PROMPT, at + 1)
    assert run.decoder.outcome.finish is reason
    assert run.decoder.committed_len == at
    run.check_state()


@BOTH
def test_decoder_state_is_exact_between_any_two_tokens_after_close(lookahead):
    for at in range(10):
        run = Run(lookahead=lookahead)
        for _ in range(at + 1):
            next(run.decoder)
        run.decoder.close()
        assert run.decoder.committed_len == at
        run.check_state()
        with pytest.raises(StopIteration):
            next(run.decoder)


@BOTH
def test_decoder_error_in_the_callers_loop_leaves_an_exact_prefix(lookahead):
    run = Run(lookahead=lookahead)

    def fail(decoder, step):
        if step.ordinal == 3:
            raise ValueError("from the callback")

    with pytest.raises(ValueError, match="from the callback"):
        run.go(fail)
    assert run.decoder.outcome.finish is FinishReason.ABORTED
    assert run.decoder.committed_len == 3
    run.check_state()


def test_decoder_no_tokens_allowed_delivers_none():
    run = Run(max_tokens=0).go()
    assert run.ids == []
    assert run.decoder.outcome.finish is FinishReason.LENGTH
    run.check_state()


def test_decoder_lookahead_queues_the_next_forward_before_the_token_is_read():
    ahead, plain = Run(), Run(lookahead=False)
    for ordinal in range(4):
        next(ahead.decoder)
        next(plain.decoder)
        assert len(ahead.model.positions) == ordinal + 1
        assert len(plain.model.positions) == ordinal
        assert ahead.decoder.committed_len == plain.decoder.committed_len == ordinal


def test_decoder_lookahead_waits_once_a_token(monkeypatch):
    waits = []
    original = stepper.evaluate
    monkeypatch.setattr(
        stepper, "evaluate", lambda *arrays: (waits.append(len(arrays)), original(*arrays))
    )
    run = Run(SamplingOptions(temperature=1.0, seed=1, top_p=0.9, presence_penalty=0.1)).go()
    assert len(waits) == len(run.ids) == 12


def test_decoder_head_runs_for_one_row_a_token():
    run = Run()
    run.model.head_rows = 0
    run.go()
    assert run.model.head_rows == 11


def test_decoder_positions_start_where_the_caller_says():
    run = Run(position=100).go()
    assert run.model.positions == list(range(100, 111))


SAMPLED = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.8},
    {"temperature": 1.2, "top_k": 6, "min_p": 0.01},
    {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"temperature": 1.0, "top_p": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.02, "top_k": 9},
    {"repetition_penalty": 1.4},
    {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 1.0, "repetition_penalty": 1.2, "repetition_context_size": 3},
    {"logit_bias": {4: 3.0, 9: -5.0}, "frequency_penalty": 1.0},
]


@pytest.mark.parametrize("case", SAMPLED, ids=str)
def test_decoder_lookahead_changes_neither_ids_nor_logprobs(case):
    options = SamplingOptions(seed=42, **case)
    ahead = Run(options, max_tokens=25, top_logprobs=2).go()
    plain = Run(options, max_tokens=25, top_logprobs=2, lookahead=False).go()
    assert ahead.ids == plain.ids
    for left, right in zip(ahead.steps, plain.steps, strict=True):
        assert left.logprobs.logprob == pytest.approx(right.logprobs.logprob, abs=1e-5)
    ahead.check_state()
    plain.check_state()


@BOTH
def test_decoder_too_few_candidates_draw_again_and_change_nothing(monkeypatch, lookahead):
    options = SamplingOptions(temperature=2.0, top_p=0.97, seed=5, repetition_penalty=1.1)
    expected = Run(options, max_tokens=30, lookahead=lookahead).go()
    monkeypatch.setattr(sampling, "BLOCK", 2)
    monkeypatch.setattr(sampling, "LEVELS", (2, 4))
    monkeypatch.setattr(sampling, "NARROW_AFTER", 3)
    widened = []
    original = Sampler.widen
    monkeypatch.setattr(Sampler, "widen", lambda self: (widened.append(1), original(self)))
    run = Run(options, max_tokens=30, lookahead=lookahead).go()
    assert len(widened) > 5
    assert run.ids == expected.ids
    assert run.decoder.committed_len == 29
    run.check_state()


@BOTH
def test_decoder_penalties_match_the_reference_rollout(lookahead):
    options = SamplingOptions(
        repetition_penalty=1.5,
        repetition_context_size=5,
        presence_penalty=0.7,
        frequency_penalty=0.3,
        logit_bias={2: 1.0},
    )

    def adjust(row, generated):
        row = row.copy()
        row[2] += 1.0
        for token in set([*PROMPT, *generated][-5:]):
            row[token] = row[token] * 1.5 if row[token] < 0 else row[token] / 1.5
        for token in set(generated):
            row[token] -= 0.7 + 0.3 * generated.count(token)
        return row

    run = Run(options, max_tokens=20, lookahead=lookahead).go()
    assert run.ids == rollout(PROMPT, 20, adjust)
    run.check_state()


@BOTH
def test_decoder_logprobs_are_those_of_the_models_own_logits(lookahead):
    options = SamplingOptions(temperature=3.0, top_k=9, seed=2, logit_bias={1: 9.0})
    run = Run(options, top_logprobs=3, lookahead=lookahead).go()
    for step in run.steps:
        row = reference([*PROMPT, *run.ids[: step.ordinal]])[-1]
        expected = row - np.log(np.exp(row).sum())
        assert step.logprobs.token_id == step.token
        assert step.logprobs.logprob == pytest.approx(expected[step.token], abs=1e-4)
        top = np.argsort(-expected)[:3]
        assert [token for token, _ in step.logprobs.top] == top.tolist()
    assert all(step.logprobs is None for step in Run(options).go().steps)


def test_decoder_rows_without_a_token_are_never_chosen():
    def only_existing(row, generated):
        return np.where(np.arange(VOCAB) < 15, row, -np.inf)

    run = Run(vocab_size=15, max_tokens=20).go()
    assert run.ids == rollout(PROMPT, 20, only_existing)
    mask = array(np.where(np.arange(VOCAB) < 15, 0.0, -np.inf))
    assert Run(mask=mask, max_tokens=20).go().ids == run.ids
    sampled = Run(SamplingOptions(temperature=5.0, seed=1), vocab_size=15, max_tokens=60).go()
    assert max(sampled.ids) < 15


# Forced tokens.


@BOTH
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "frequency_penalty": 0.5}], ids=str)
def test_decoder_forced_tokens_are_delivered_fed_and_continued_from(lookahead, options):
    forced = [8, 8, 31]
    run = Run(SamplingOptions(seed=4, **options), lookahead=lookahead)
    run.go(lambda decoder, step: decoder.force(forced) if step.ordinal == 4 else None)
    assert run.ids[5:8] == forced
    assert [step.is_forced for step in run.steps] == [5 <= n < 8 for n in range(12)]
    assert run.decoder.committed_len == 11
    if not options:
        head = rollout(PROMPT, 5)
        assert run.ids == [*head, *forced, *rollout([*PROMPT, *head, *forced], 4)]
    other = Run(SamplingOptions(seed=4, **options), lookahead=not lookahead)
    other.go(lambda decoder, step: decoder.force(forced) if step.ordinal == 4 else None)
    assert other.ids == run.ids
    run.check_state()


@BOTH
def test_decoder_forced_before_the_first_token_begin_the_reply(lookahead):
    run = Run(lookahead=lookahead, max_tokens=5)
    run.decoder.force([1, 2])
    run.go()
    assert run.ids == [1, 2, *rollout([*PROMPT, 1, 2], 3)]
    run.check_state()


@BOTH
def test_decoder_stop_among_forced_tokens_commits_none_of_them(lookahead):
    run = Run(lookahead=lookahead)

    def on_step(decoder, step):
        if step.ordinal == 2:
            decoder.force([8, 9, 10])
        if step.ordinal == 4:
            decoder.stop(FinishReason.ABORTED)

    run.go(on_step)
    assert run.ids == [*rollout(PROMPT, 3), 8, 9]
    assert run.decoder.committed_len == 2
    run.check_state()


@BOTH
def test_decoder_forced_end_of_sequence_ends(lookahead):
    run = Run(lookahead=lookahead, eos={8})
    run.go(lambda decoder, step: decoder.force([1, 8, 2]) if step.ordinal == 0 else None)
    assert run.ids[1:] == [1, 8]
    assert run.steps[-1].is_eos
    assert run.decoder.outcome.finish is FinishReason.STOP
    run.check_state()


@BOTH
@pytest.mark.parametrize("extends", [True, False])
def test_decoder_forced_at_the_limit_count_unless_the_limit_is_extended(lookahead, extends):
    run = Run(lookahead=lookahead, max_tokens=4)
    run.go(
        lambda decoder, step: (
            decoder.force([8, 9], extends_limit=extends) if step.ordinal == 3 else None
        )
    )
    assert run.ids == [*rollout(PROMPT, 4), *([8, 9] if extends else [])]
    assert run.decoder.outcome.finish is FinishReason.LENGTH
    assert run.decoder.committed_len == 3
    run.check_state()


# Caller's processors.


def test_decoder_processors_see_all_tokens_once_a_token_and_run_without_lookahead():
    calls = []

    def avoid_repeats(token_ids, row):
        calls.append(list(token_ids))
        return mx.where(mx.arange(row.size) == token_ids[-1], -mx.inf, row)

    def adjust(row, generated):
        row = row.copy()
        row[[*PROMPT, *generated][-1]] = -np.inf
        return row

    run = Run(SamplingOptions(logits_processors=[avoid_repeats]))
    run.go(lambda decoder, step: calls.append("step"))
    assert run.ids == rollout(PROMPT, 12, adjust)
    tokens = [call for call in calls if call != "step"]
    assert tokens == [[*PROMPT, *run.ids[:n]] for n in range(12)]
    assert calls[1::2] == ["step"] * 12
    run.check_state()


def test_decoder_processor_raises_is_a_callback_error_after_an_exact_prefix():
    def fail(token_ids, row):
        if len(token_ids) == len(PROMPT) + 3:
            raise KeyError("grammar")
        return row

    run = Run(SamplingOptions(logits_processors=[fail]))
    with pytest.raises(CallbackError) as caught:
        run.go()
    assert isinstance(caught.value.__cause__, KeyError)
    assert run.ids == rollout(PROMPT, 3)
    assert run.decoder.committed_len == 3
    run.check_state()


@pytest.mark.parametrize("value", [-np.inf, np.nan, np.inf])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_p": 0.5}], ids=str)
def test_decoder_processor_leaves_no_token_is_a_typed_error(value, options):
    spoil = SamplingOptions(
        logits_processors=[lambda _, row: mx.full(row.shape, value)], seed=1, **options
    )
    run = Run(spoil)
    with pytest.raises(InvalidRequest) as caught:
        run.go()
    assert caught.value.code == "request.no_token"
    assert run.ids == []
    run.check_state()


# Failures.


class FailingModel(HybridModel):
    """Fails at one position, once the prompt is fed."""

    def __init__(self, position, stage, error=None):
        super().__init__()
        self.position, self.stage, self.error = position, stage, error

    def forward(self, step, caches):
        output = super().forward(step, caches)
        if step.positions == self.position and self.stage == "forward":
            raise self.error
        return output

    def head(self, hidden):
        logits = super().head(hidden)
        if self.positions[-1] == self.position:
            if self.stage == "evaluation":
                return logits + mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)[0, 0]
            if self.stage == "non_finite":
                return mx.where(mx.arange(VOCAB) == 3, self.error, logits)
        return logits


class WithoutTextError(Exception):
    def __str__(self):
        raise ZeroDivisionError


@BOTH
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyError("layer"), "model.forward"),
        (SystemExit(3), "model.forward"),
        (WithoutTextError(), "model.forward"),
        (ModelError("own", code="model.own"), "model.own"),
    ],
)
def test_decoder_forward_fails_after_its_token_was_delivered(lookahead, error, code):
    model = FailingModel(len(PROMPT) + 4, "forward", error)
    run = Run(model=model, lookahead=lookahead)
    with pytest.raises(ModelError) as caught:
        run.go()
    assert caught.value.code == code
    assert run.ids == rollout(PROMPT, 5)
    assert not run.decoder.outcome.caches_valid
    with pytest.raises(StopIteration):
        next(run.decoder)


@BOTH
def test_decoder_forward_nobody_wanted_fails_and_the_reply_stands(lookahead):
    ids = rollout(PROMPT, 12)
    at = next(n for n in range(3, 12) if ids[n] not in ids[:n])
    model = FailingModel(len(PROMPT) + at, "forward", KeyError("layer"))
    run = Run(model=model, lookahead=lookahead, eos={ids[at]}).go()
    assert run.ids == ids[: at + 1]
    assert run.decoder.outcome.finish is FinishReason.STOP
    assert run.decoder.caches_valid is not lookahead


@BOTH
def test_decoder_keyboard_interrupt_in_the_forward_is_not_held_back(lookahead):
    model = FailingModel(len(PROMPT) + 2, "forward", KeyboardInterrupt())
    run = Run(model=model, lookahead=lookahead)
    with pytest.raises(KeyboardInterrupt):
        run.go()
    assert not run.decoder.caches_valid


@BOTH
@pytest.mark.parametrize("position", [0, 3])
def test_decoder_evaluation_fails_is_a_backend_error_and_the_caches_are_lost(lookahead, position):
    run = Run(model=FailingModel(len(PROMPT) + position, "evaluation"), lookahead=lookahead)
    with pytest.raises(BackendError):
        run.go()
    # A fault of the queued step may surface while the token before it is waited for; a token
    # whose own computation failed is never delivered.
    assert run.ids in [rollout(PROMPT, position + 1), rollout(PROMPT, position + (not lookahead))]
    assert run.decoder.committed_len <= len(run.ids)
    assert not run.decoder.caches_valid
    # The thread goes on working.
    assert Run(lookahead=lookahead).go().ids == rollout(PROMPT, 12)


@BOTH
def test_decoder_runtime_error_in_the_forward_is_an_evaluation_failure(lookahead):
    model = FailingModel(len(PROMPT) + 4, "forward", RuntimeError("device"))
    run = Run(model=model, lookahead=lookahead)
    with pytest.raises(BackendError, match="device"):
        run.go()
    assert run.ids == rollout(PROMPT, 5 - lookahead)
    assert not run.decoder.caches_valid


def test_decoder_fault_of_an_undone_step_stays_within_its_own_request():
    ids = rollout(PROMPT, 12)
    at = next(n for n in range(3, 12) if ids[n] not in ids[:n])
    for _ in range(5):
        run = Run(model=FailingModel(len(PROMPT) + at, "evaluation"), eos={ids[at]})
        try:
            run.go()
        except BackendError:
            assert run.ids == ids[:at]
        else:
            assert run.ids == ids[: at + 1]
        assert not run.decoder.caches_valid
        assert Run().go().ids == ids


def test_decoder_queueing_fails_is_raised_before_the_token_is_delivered(monkeypatch):
    run = Run()
    original, calls = stepper.queue, []

    def queue(arrays):
        calls.append(arrays)
        if len(calls) == 4:
            raise BackendError("evaluation: must succeed on the device, got a fault")
        original(arrays)

    monkeypatch.setattr(stepper, "queue", queue)
    with pytest.raises(BackendError):
        run.go()
    assert run.ids == rollout(PROMPT, 2)
    assert not run.decoder.caches_valid


@BOTH
@pytest.mark.parametrize("ordinal", [0, 1, 5])
def test_decoder_sampling_fails_on_the_host_leaves_an_exact_prefix(monkeypatch, lookahead, ordinal):
    original = Sampler.draw

    def draw(self, row, at):
        if at == ordinal:
            raise RuntimeError("host")
        return original(self, row, at)

    monkeypatch.setattr(Sampler, "draw", draw)
    run = Run(lookahead=lookahead)
    with pytest.raises(RuntimeError, match="host"):
        run.go()
    assert run.ids == rollout(PROMPT, ordinal)
    run.check_state()


def test_decoder_sampling_of_an_undone_step_fails_and_forced_tokens_go_on(monkeypatch):
    original, failed = Sampler.draw, []

    def draw(self, row, at):
        if at == 3 and not failed:
            failed.append(at)
            raise RuntimeError("host")
        return original(self, row, at)

    monkeypatch.setattr(Sampler, "draw", draw)
    run = Run(max_tokens=6)
    run.go(lambda decoder, step: decoder.force([8]) if step.ordinal == 2 else None)
    head = [*rollout(PROMPT, 3), 8]
    assert failed == [3]
    assert run.ids == [*head, *rollout([*PROMPT, *head], 2)]
    run.check_state()


def test_decoder_sampling_evaluation_fails_without_lookahead_leaves_an_exact_prefix(monkeypatch):
    original = Sampler.draw

    def draw(self, row, at):
        if at == 4:
            row = row + mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)[0, 0]
        return original(self, row, at)

    monkeypatch.setattr(Sampler, "draw", draw)
    run = Run(lookahead=False)
    with pytest.raises(BackendError):
        run.go()
    assert run.decoder.committed_len == 4
    run.check_state()


@BOTH
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_k": 5, "seed": 1}], ids=str)
def test_decoder_non_finite_row_names_its_position(lookahead, value, options):
    position = len(PROMPT) + 4
    model = FailingModel(position, "non_finite", value)
    run = Run(SamplingOptions(**options), model=model, lookahead=lookahead)
    with pytest.raises(ModelError, match=f"position {position}$") as caught:
        run.go()
    assert caught.value.code == "model.non_finite"
    assert len(run.ids) == 5
    assert not run.decoder.caches_valid


def test_decoder_non_finite_prompt_row_names_the_last_prompt_position():
    run = Run(model=FailingModel(0, "non_finite", np.nan))
    with pytest.raises(ModelError, match=f"position {len(PROMPT) - 1}$"):
        run.go()


def test_decoder_undo_refused_loses_the_caches_but_not_the_reply(monkeypatch):
    def refuse(caches, marks, rows):
        raise CacheError("cache: no", code="cache.no")

    monkeypatch.setattr(stepper, "keep_caches", refuse)
    run = Run()
    run.go(lambda decoder, step: decoder.stop(FinishReason.STOP) if step.ordinal == 3 else None)
    assert run.ids == rollout(PROMPT, 4)
    assert run.decoder.outcome.finish is FinishReason.STOP
    assert not run.decoder.outcome.caches_valid


# Finish reasons.


def test_decoder_callers_stop_on_the_last_token_outranks_length():
    run = Run(max_tokens=3)
    run.go(lambda decoder, step: decoder.stop(FinishReason.ABORTED) if step.ordinal == 2 else None)
    assert run.decoder.outcome.finish is FinishReason.ABORTED


def test_decoder_end_of_sequence_outranks_the_callers_abort():
    ids = rollout(PROMPT, 1)
    run = Run(eos=ids)
    run.go(lambda decoder, step: decoder.stop(FinishReason.ABORTED))
    assert run.decoder.outcome.finish is FinishReason.STOP


def test_finish_reason_precedence_is_total():
    order = [
        FinishReason.TOOL_CALLS,
        FinishReason.STOP,
        FinishReason.ABORTED,
        FinishReason.LENGTH,
    ]
    for rank, strong in enumerate(order):
        for weak in order[rank:]:
            assert stronger_reason(strong, weak) is strong
            assert stronger_reason(weak, strong) is strong
        assert finish_reason(strong, has_tool_calls=True) is FinishReason.TOOL_CALLS
        assert finish_reason(strong, has_tool_calls=False) is strong
