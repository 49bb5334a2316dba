"""Chunked prefill and scoring against a float64 NumPy model, and what they do not compute."""

import mlx.core as mx
import numpy as np
import pytest

from engine_core.cache.kv import KvCache
from engine_core.cache.recurrent import RecurrentCache
from engine_core.decode import prefill
from engine_core.decode.prefill import feed_prompt, run_prefill
from engine_core.decode.score import score
from engine_core.errors import BackendError, Cancelled, ModelError
from engine_core.step import StepOutput

VOCAB, WIDTH = 19, 6
RNG = np.random.default_rng(3)
EMBED = RNG.normal(size=(VOCAB, WIDTH))
MIX = RNG.normal(size=(WIDTH, WIDTH)) / 3
HEAD = RNG.normal(size=(WIDTH, VOCAB))


def reference(ids):
    """Running mean of the embeddings, then a recurrence with the position added."""
    rows = EMBED[list(ids)]
    means = np.cumsum(rows, axis=0) / np.arange(1, len(rows) + 1)[:, None]
    state = np.zeros(WIDTH)
    states = []
    for position, mean in enumerate(means):
        state = np.tanh(state @ MIX + mean + 0.01 * position)
        states.append(state)
    return np.array(states) @ HEAD


class MeanModel:
    """Attention with equal weights over a cache, then a recurrence."""

    def __init__(self):
        self.calls = []
        self.head_rows = []

    def embed(self, ids):
        return mx.array(EMBED, dtype=mx.float32)[ids]

    def forward(self, step, caches):
        attention, recurrent = caches
        self.calls.append((step.ids.tolist()[0], step.positions))
        rows = step.ids.shape[1]
        keys, values = attention.append(*(self.embed(step.ids)[:, None],) * 2)
        total = keys.shape[2]
        mask = mx.arange(total)[None, :] <= mx.arange(total - rows, total)[:, None]
        weights = mask / mask.sum(axis=1, keepdims=True)
        means = (weights @ values[:, 0]) + 0.01 * (
            step.positions + mx.arange(rows)[None, :, None].astype(mx.float32)
        )
        return StepOutput(hidden=recurrent.run(self.recur, (means,)))

    def recur(self, slots, inputs, _, ends):
        (state,), (means,) = slots, inputs
        states = []
        for row in range(means.shape[1]):
            state = mx.tanh(state @ mx.array(MIX, dtype=mx.float32) + means[:, row])
            states.append(state)
        return mx.stack(states, axis=1), [(states[end - 1],) for end in ends]

    def head(self, hidden):
        self.head_rows.append(hidden.shape[1])
        return hidden @ mx.array(HEAD, dtype=mx.float32)


def new_caches():
    return [
        KvCache(kv_heads=1, head_dim=WIDTH, dtype=mx.float32, growth=4),
        RecurrentCache(shapes=[(1, WIDTH)], dtypes=[mx.float32]),
    ]


IDS = np.random.default_rng(8).integers(0, VOCAB, size=23).tolist()


@pytest.mark.parametrize("chunk", [1, 7, 22, 23, 512])
def test_prefill_any_chunk_gives_the_last_row(chunk):
    model, caches = MeanModel(), new_caches()
    row = run_prefill(model, caches, IDS, chunk=chunk)
    np.testing.assert_allclose(np.array(row), reference(IDS)[-1], atol=1e-4)
    assert [cache.offset for cache in caches] == [23, 23]


def test_prefill_chunks_cover_the_prompt_once_and_the_head_runs_for_one_row():
    model = MeanModel()
    run_prefill(model, new_caches(), IDS, chunk=10)
    assert [len(ids) for ids, _ in model.calls] == [10, 10, 3]
    assert [position for _, position in model.calls] == [0, 10, 20]
    assert [token for ids, _ in model.calls for token in ids] == IDS
    assert model.head_rows == [1]


def test_prefill_last_token_shares_the_last_chunk():
    model = MeanModel()
    run_prefill(model, new_caches(), IDS[:20], chunk=10)
    assert [len(ids) for ids, _ in model.calls] == [10, 10]


class SharingModel(MeanModel):
    """Two more layers at the end that read the first one's keys and store nothing."""

    def forward(self, step, caches):
        return super().forward(step, caches[:2])


@pytest.mark.parametrize(
    ("cost", "sizes"), [(1, [10, 10, 2, 1]), (2, [10, 10, 3]), (64, [10, 10, 3])]
)
def test_prefill_last_token_goes_alone_where_layers_without_state_make_it_pay(
    monkeypatch, cost, sizes
):
    """3 rows through 2 of 4 layers are 1.5 rows through all: more than one, fewer than two."""
    monkeypatch.setattr(prefill, "LAST_ROW_COST", cost)
    model, caches, told = SharingModel(), new_caches(), []
    caches += [caches[0], caches[0]]
    row = run_prefill(model, caches, IDS, chunk=10, on_chunk=lambda *fed: told.append(fed))
    np.testing.assert_allclose(np.array(row), reference(IDS)[-1], atol=1e-4)
    assert [len(ids) for ids, _ in model.calls] == sizes
    assert told == [(end, 23) for end in np.cumsum(sizes)]
    assert model.head_rows == [1]


def test_prefill_of_one_token_with_layers_without_state(monkeypatch):
    monkeypatch.setattr(prefill, "LAST_ROW_COST", 0)
    model, caches = SharingModel(), new_caches()
    run_prefill(model, [*caches, caches[0]], IDS[:1])
    assert [len(ids) for ids, _ in model.calls] == [1]


def test_prefill_default_chunk_is_512_tokens():
    model = MeanModel()
    feed_prompt(model, new_caches(), [1] * 513)
    assert [len(ids) for ids, _ in model.calls] == [512, 1]


def test_feed_prompt_then_prefill_equals_one_prefill_and_skips_the_head():
    model, caches = MeanModel(), new_caches()
    feed_prompt(model, caches, IDS[:9], chunk=4)
    assert model.head_rows == []
    row = run_prefill(model, caches, IDS[9:], start=9, chunk=4)
    np.testing.assert_allclose(np.array(row), reference(IDS)[-1], atol=1e-4)


def test_prefill_earlier_chunks_evaluate_cache_arrays_only(monkeypatch):
    evaluated = []
    monkeypatch.setattr(prefill, "evaluate", lambda *arrays: evaluated.append(len(arrays)))
    run_prefill(MeanModel(), new_caches(), IDS, chunk=10)
    assert evaluated == [3, 3, 4]


def test_prefill_on_a_gpu_waits_for_the_chunk_before_the_queued_one(monkeypatch):
    log = []
    monkeypatch.setattr(prefill.mx, "default_device", lambda: mx.Device(mx.gpu))
    original_queue, original_evaluate = prefill.queue, prefill.evaluate
    monkeypatch.setattr(
        prefill, "queue", lambda arrays: (log.append("queue"), original_queue(arrays))
    )
    monkeypatch.setattr(
        prefill, "evaluate", lambda *arrays: (log.append("wait"), original_evaluate(*arrays))
    )
    row = run_prefill(MeanModel(), new_caches(), IDS, chunk=6)
    np.testing.assert_allclose(np.array(row), reference(IDS)[-1], atol=1e-4)
    assert log == ["queue", "queue", "wait", "queue", "wait", "wait"]


def test_prefill_progress_is_told_after_each_chunk():
    told = []
    run_prefill(
        MeanModel(),
        new_caches(),
        IDS,
        chunk=10,
        on_chunk=lambda done, all_: told.append((done, all_)),
    )
    assert told == [(10, 23), (20, 23), (23, 23)]


@pytest.mark.parametrize(("polls", "fed"), [(0, 0), (1, 10), (2, 10), (3, 20), (5, 23)])
def test_prefill_cancelled_at_any_checkpoint_leaves_whole_chunks(polls, fed):
    left = [polls]

    def checkpoint():
        if left[0] == 0:
            raise Cancelled("request: cancelled")
        left[0] -= 1

    caches = new_caches()
    with pytest.raises(Cancelled):
        run_prefill(MeanModel(), caches, IDS, chunk=10, checkpoint=checkpoint)
    assert [cache.offset for cache in caches] == [fed, fed]
    row = run_prefill(MeanModel(), caches, [*IDS, 5][fed:], start=fed)
    np.testing.assert_allclose(np.array(row), reference([*IDS, 5])[-1], atol=1e-4)


@pytest.mark.parametrize("call", [run_prefill, feed_prompt, score])
def test_prefill_nothing_to_feed_is_a_typed_error(call):
    with pytest.raises(ModelError) as caught:
        call(MeanModel(), new_caches(), [])
    assert caught.value.code == "model.empty"


def test_prefill_forward_raises_is_a_model_error_with_position_and_cause():
    class Broken(MeanModel):
        def forward(self, step, caches):
            if step.positions == 10:
                raise KeyError("weight")
            return super().forward(step, caches)

    with pytest.raises(ModelError, match="position 10") as caught:
        run_prefill(Broken(), new_caches(), IDS, chunk=10)
    assert caught.value.code == "model.forward"
    assert isinstance(caught.value.__cause__, KeyError)


def test_prefill_head_raises_is_a_model_error_and_typed_errors_pass_through():
    class Broken(MeanModel):
        def head(self, hidden):
            raise self.error

    model = Broken()
    model.error = ZeroDivisionError("x")
    with pytest.raises(ModelError, match="position 22") as caught:
        run_prefill(model, new_caches(), IDS)
    assert caught.value.code == "model.forward"
    model.error = ModelError("own", code="model.own")
    with pytest.raises(ModelError) as caught:
        run_prefill(model, new_caches(), IDS)
    assert caught.value.code == "model.own"


@pytest.mark.parametrize(
    ("hidden_shape", "logit_shape"), [((1, 2, WIDTH), None), (None, (1, 1)), (None, (1, 1, 0))]
)
def test_prefill_wrong_shapes_are_a_typed_error(hidden_shape, logit_shape):
    class Broken(MeanModel):
        def forward(self, step, caches):
            output = super().forward(step, caches)
            return output if hidden_shape is None else StepOutput(hidden=mx.zeros(hidden_shape))

        def head(self, hidden):
            return super().head(hidden) if logit_shape is None else mx.zeros(logit_shape)

    with pytest.raises(ModelError) as caught:
        run_prefill(Broken(), new_caches(), IDS)
    assert caught.value.code == "model.shape"


def test_prefill_evaluation_fails_is_a_backend_error():
    class Singular(MeanModel):
        def head(self, hidden):
            return super().head(hidden) + mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)[0, 0]

    with pytest.raises(BackendError):
        run_prefill(Singular(), new_caches(), IDS)
    row = run_prefill(MeanModel(), new_caches(), IDS)
    np.testing.assert_allclose(np.array(row), reference(IDS)[-1], atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 8, 23, 512])
def test_score_any_chunk_gives_every_row(chunk):
    model = MeanModel()
    rows = score(model, new_caches(), IDS, chunk=chunk)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, reference(IDS), atol=1e-4)
    assert sum(model.head_rows) == 23


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_score_non_finite_row_names_its_position(value):
    class Broken(MeanModel):
        def head(self, hidden):
            rows = np.zeros((1, hidden.shape[1], VOCAB), dtype=np.float32)
            if self.calls[-1][1] == 8:
                rows[0, 3, 2] = value
            return mx.array(rows)

    with pytest.raises(ModelError, match="position 11") as caught:
        score(Broken(), new_caches(), IDS, chunk=8)
    assert caught.value.code == "model.non_finite"
