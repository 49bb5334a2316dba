"""The pool on caches of every kind: what is found, what is shared, what goes, what is measured."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest

import engine_core.cache.layers as cache_layers
from engine_core.backend import evaluate
from engine_core.cache.build import build_caches
from engine_core.cache.layers import cache_arrays, cache_nbytes, fork_caches
from engine_core.cache.pool import PromptPool, make_pool
from engine_core.cache.pool_entry import EntryKind
from engine_core.errors import BackendError, CacheError, InvalidRequest
from engine_core.family import Full, Recurrent, Shared, Sliding
from engine_core.prompt_key import MediaSpan, PromptKey

WIDTH = 64
WINDOW = 8
LAYERS = {
    "full": [Full(kv_heads=1, head_dim=WIDTH)],
    "sliding": [Sliding(window=WINDOW, kv_heads=1, head_dim=WIDTH)],
    "recurrent": [Recurrent(shapes=((WIDTH,),), dtypes=("compute",))],
    "shared": [Full(kv_heads=1, head_dim=WIDTH), Shared(donor=0)],
    "hybrid": [
        Full(kv_heads=1, head_dim=WIDTH),
        Sliding(window=WINDOW, kv_heads=1, head_dim=WIDTH),
        Recurrent(shapes=((WIDTH,),), dtypes=("compute",)),
        Shared(donor=0),
    ],
}
SPARE = 16
ROW = 2 * WIDTH * 4
REPLY, BOUNDARY, OPENING = EntryKind.REPLY, EntryKind.BOUNDARY, EntryKind.OPENING
ANY_KIND = pytest.mark.parametrize("kind", LAYERS)


def recur(slots, inputs, _, ends):
    (state,), (fed,) = slots, inputs
    states = []
    for row in range(fed.shape[1]):
        state = state * 0.5 + fed[:, row]
        states.append(state)
    return fed, [(states[end - 1],) for end in ends]


def feed(caches, ids):
    """Put one row a token into every layer; the row says which token it is."""
    rows = mx.array(np.repeat(np.array(ids, np.float32)[:, None], WIDTH, axis=1))
    for cache in dict.fromkeys(caches):
        if hasattr(cache, "slots"):
            cache.run(recur, (rows[None],))
        else:
            cache.append(rows[None, None], -rows[None, None])
    evaluate(*cache_arrays(caches))


def state(caches, ids):
    """What the layers say they hold, as numbers, against a list of tokens."""
    got, want = [], []
    for cache in dict.fromkeys(caches):
        assert cache.offset == len(ids)
        if hasattr(cache, "slots"):
            got.append(cache.slots[0][0, 0].item())
            value = 0.0
            for one in ids:
                value = value * 0.5 + one
            want.append(value)
            continue
        seen = len(ids) if cache.window is None else min(len(ids), cache.window - 1)
        fork = cache.fork()
        probe = mx.zeros((1, 1, 1, WIDTH))
        keys, values = fork.append(probe, probe)
        got += [*np.array(keys)[0, 0, :-1, 0], *-np.array(values)[0, 0, :-1, 0]]
        want += 2 * list(ids[len(ids) - seen :])
        del fork
    return got, want


class Pool:
    """A pool with requests that use it as a session does."""

    def __init__(self, kind, budget=2**30, **options):
        self.layers = LAYERS[kind]
        self.pool = PromptPool(budget, **options)

    def new_caches(self):
        return build_caches(self.layers, mx.float32)

    def store(self, ids, kind=BOUNDARY, *, at=None, media=()):
        """Run a prompt from what is stored, keep its state at ``at`` (its end when omitted)."""
        at = len(ids) if at is None else at
        key = PromptKey(tuple(ids), media)
        hit = self.pool.find("model", key)
        caches, length = (self.new_caches(), 0) if hit is None else (hit.caches, hit.length)
        del hit
        kept = None
        if length < at:
            feed(caches, ids[length:at])
            kept = fork_caches(caches)
        if max(at, length) < len(ids):
            feed(caches, ids[max(at, length) :])
        got, want = state(caches, ids)
        assert got == pytest.approx(want)
        stored = kept is not None and self.pool.publish("model", key.first(at), kept, kind)
        del caches, kept
        self.pool.settle()
        return length, stored

    def length(self, ids, media=()):
        """Tokens a prompt would be served."""
        hit = self.pool.find("model", PromptKey(tuple(ids), media))
        if hit is None:
            return 0
        got, want = state(hit.caches, ids[: hit.length])
        assert got == pytest.approx(want)
        return hit.length

    @property
    def info(self):
        return self.pool.report()

    @property
    def stored(self):
        return sorted(entry.length for entry in self.pool._entries())

    def measured(self):
        return cache_nbytes(cache for entry in self.pool._entries() for cache in entry.caches)


def run(count, start=1):
    return list(range(start, start + count))


@ANY_KIND
def test_pool_entry_is_found_by_prompts_that_begin_with_it(kind):
    pool = Pool(kind)
    assert pool.length(run(30)) == 0
    pool.store(run(30))
    assert pool.length(run(31)) == 30
    assert pool.length(run(90)) == 30
    assert pool.length(run(30, start=2)) == 0
    assert pool.info.hits == 2
    assert pool.info.misses == 3
    assert pool.info.reused_tokens == 60


@ANY_KIND
@pytest.mark.parametrize("back", [1, 5, 16, 17, 29])
def test_pool_common_prefix_is_rewound_as_far_as_every_layer_can(kind, back):
    pool = Pool(kind)
    pool.store(run(60))
    prompt = [*run(60 - back), 500, 501]
    possible = {"recurrent": 0, "hybrid": 0, "sliding": SPARE}.get(kind, 60)
    assert pool.length(prompt) == (60 - back if back <= possible else 0)


@ANY_KIND
def test_pool_entry_equal_to_the_prompt_is_used_by_rewinding_or_by_its_boundary(kind):
    pool = Pool(kind)
    pool.store(run(40), at=35)
    pool.store(run(40), REPLY)
    assert pool.length(run(40)) == (35 if kind in {"recurrent", "hybrid"} else 39)


@ANY_KIND
def test_pool_longest_of_nested_entries_wins_and_branches_keep_their_branch_point(kind):
    pool = Pool(kind)
    pool.store(run(20))
    pool.store([*run(20), 300, 301, 302])
    pool.store([*run(20), 400, 401, 402])
    pool.store(run(50))
    assert pool.length([*run(20), 300, 301, 302, 9]) == 23
    assert pool.length([*run(20), 400, 401, 402, 9]) == 23
    assert pool.length([*run(20), 600]) == 20
    assert pool.stored == [20, 23, 23, 50]


@ANY_KIND
def test_pool_boundary_is_never_given_up_for_a_reply(kind):
    pool = Pool(kind)
    pool.store(run(20), BOUNDARY)
    caches = pool.new_caches()
    feed(caches, run(20))
    pool.pool.publish("model", PromptKey(tuple(run(20))), caches, REPLY)
    [entry] = pool.pool._entries()
    assert entry.kind is BOUNDARY
    pool.store([*run(20), 7, 8], REPLY)
    assert pool.info.boundaries == 1
    assert pool.info.entries == 2
    pool.pool.publish("model", PromptKey(tuple(run(20))), caches, OPENING)
    assert {entry.kind for entry in pool.pool._entries()} == {OPENING, REPLY}
    assert pool.length([*run(20), 9]) == 20


@ANY_KIND
def test_pool_another_fingerprint_finds_nothing(kind):
    pool = Pool(kind)
    pool.store(run(20))
    assert pool.pool.find("other", PromptKey(tuple(run(30)))) is None


# Media.


def test_pool_other_media_at_the_same_tokens_end_the_shared_prefix():
    pool = Pool("full")
    cat, dog = MediaSpan(5, 9, b"cat"), MediaSpan(5, 9, b"dog")
    pool.store(run(20), media=(cat,))
    assert pool.length(run(30), media=(cat,)) == 20
    assert pool.length(run(30), media=(dog,)) == 5
    assert pool.length(run(30)) == 5
    pool.store(run(20), media=(dog,))
    assert pool.length(run(30), media=(dog,)) == 20
    assert pool.length(run(30), media=(cat,)) == 20


@pytest.mark.parametrize("end", [6, 7, 8, 9])
def test_pool_rewind_never_cuts_a_media_item(end):
    pool = Pool("full")
    cat = MediaSpan(5, 9, b"cat")
    pool.store(run(20), media=(cat,))
    # A prompt that ends inside the item (or right behind it, with its last token left to feed).
    assert pool.length(run(end + 1), media=(MediaSpan(5, min(end + 1, 9), b"cat"),)) in {5, 9}
    prompt = [*run(end), 900, 901, 902, 903]
    assert pool.length(prompt, media=(MediaSpan(5, 9, b"cat"),)) == (9 if end == 9 else 5)


@pytest.mark.parametrize(
    "spans",
    [
        (MediaSpan(3, 3, b"x"),),
        (MediaSpan(3, 11, b"x"),),
        (MediaSpan(3, 5, b"x"), MediaSpan(4, 6, b"y")),
        (MediaSpan(-1, 2, b"x"),),
    ],
)
def test_prompt_key_with_misplaced_media_is_refused(spans):
    with pytest.raises(CacheError) as caught:
        PromptKey(tuple(run(10)), spans)
    assert caught.value.code == "cache.key"


def test_media_span_without_a_digest_is_refused():
    for digest in (b"", "text", None):
        with pytest.raises(CacheError):
            MediaSpan(0, 1, digest)


# Sharing.


def test_pool_hit_copies_nothing_and_its_continuation_appends_in_place():
    pool = Pool("full")
    pool.store(run(2000))
    gc.collect()
    before = mx.get_active_memory()
    hit = pool.pool.find("model", PromptKey(tuple(run(2010))))
    assert mx.get_active_memory() == before
    mx.reset_peak_memory()
    feed(hit.caches, run(10, start=2001))
    # One row a token is all that is new: no second buffer of 2,000 rows.
    assert mx.get_peak_memory() - before < 200 * ROW
    [entry] = pool.pool._entries()
    assert entry.caches[0].buffers() == hit.caches[0].buffers()


def test_pool_branch_copies_once_and_leaves_the_entry_alone():
    pool = Pool("full")
    pool.store(run(100))
    branch = [*run(50), 700, 701]
    hit = pool.pool.find("model", PromptKey(tuple(branch)))
    feed(hit.caches, branch[hit.length :])
    assert state(hit.caches, branch)[0] == pytest.approx(state(hit.caches, branch)[1])
    [entry] = pool.pool._entries()
    got, want = state(entry.caches, run(100))
    assert got == pytest.approx(want)


@ANY_KIND
def test_pool_bytes_count_every_buffer_once(kind):
    pool = Pool(kind)
    pool.store(run(100), at=60)
    pool.store(run(100), REPLY)
    pool.store(run(150), REPLY)
    assert pool.info.entries == 3
    assert pool.info.bytes == pool.measured()
    if kind in {"full", "shared"}:
        # Three prefixes, one buffer.
        assert pool.info.bytes == 256 * ROW
    every = sum(cache_nbytes(entry.caches) for entry in pool.pool._entries())
    assert (pool.info.bytes < every) == (kind not in {"sliding", "recurrent"})


@ANY_KIND
def test_pool_measured_bytes_are_what_the_allocator_holds(kind):
    gc.collect()
    mx.clear_cache()  # a larger freed buffer would be used again whole
    before = mx.get_active_memory()
    pool = Pool(kind)
    for start in range(1, 2000, 500):
        pool.store(run(300, start=start), at=120)
        pool.store(run(300, start=start), REPLY)
    gc.collect()
    held = mx.get_active_memory() - before
    assert pool.info.bytes == pool.measured()
    # The allocator rounds small buffers up to a page.
    assert pool.info.bytes <= held <= pool.info.bytes * 1.05 + 64 * 1024
    pool.pool.clear()
    gc.collect()
    assert mx.get_active_memory() - before <= 16 * 1024


def test_pool_request_that_grew_a_shared_buffer_and_is_dropped_frees_its_rows():
    pool = Pool("full")
    pool.store(run(100))
    hit = pool.pool.find("model", PromptKey(tuple(run(20_000))))
    feed(hit.caches, run(19_900, start=101))
    assert pool.measured() > 20_000 * ROW
    del hit
    pool.pool.settle()
    assert pool.measured() <= 256 * ROW
    assert pool.length(run(101)) == 100


def test_pool_sliding_entry_holds_its_window_however_often_it_is_continued():
    pool = Pool("sliding")
    pool.store(run(100))
    assert pool.measured() == (WINDOW - 1 + SPARE) * ROW
    for rows in (1, 30, 800):
        hit = pool.pool.find("model", PromptKey(tuple(run(900))))
        feed(hit.caches, run(rows, start=101))
        del hit
        pool.pool.settle()
        assert pool.measured() == (WINDOW - 1 + SPARE) * ROW
    assert pool.length(run(101)) == 100


# Budget.


@ANY_KIND
def test_pool_budget_evicts_the_least_recently_used(kind):
    probe = Pool(kind)
    probe.store(run(200))
    size = probe.info.bytes
    pool = Pool(kind, budget=3 * size)
    for start in (1000, 2000, 3000):
        pool.store(run(200, start=start))
    assert pool.length(run(201, start=1000)) == 200
    pool.store(run(200, start=4000))
    assert pool.info.bytes <= 3 * size
    assert [pool.length(run(201, start=start)) for start in (1000, 2000, 3000, 4000)] == [
        200,
        0,
        200,
        200,
    ]
    assert pool.info.evicted == 1


@ANY_KIND
def test_pool_oversize_entry_is_refused_before_anything_is_evicted(kind):
    probe = Pool(kind)
    probe.store(run(10))
    small = probe.info.bytes
    pool = Pool(kind, budget=2 * small)
    pool.store(run(10, start=1000))
    pool.store(run(10, start=2000))
    assert pool.info.entries == 2
    if kind in {"sliding", "recurrent"}:
        pool.pool.budget_bytes = small // 2
        caches = pool.new_caches()
        feed(caches, run(5000))
        assert not pool.pool.publish("model", PromptKey(tuple(run(5000))), caches, REPLY)
        pool.pool.budget_bytes = 2 * small
        pool.pool.settle()
    else:
        assert pool.store(run(5000), REPLY)[1] is False
    assert pool.info.refused == 1
    assert pool.info.evicted == 0
    assert pool.length(run(11, start=1000)) == 10
    assert pool.length(run(11, start=2000)) == 10


def test_pool_small_boundary_of_a_prompt_larger_than_the_budget_is_kept():
    pool = Pool("full", budget=1000 * ROW)
    pool.store(run(10, start=5000))
    pool.store(run(6000), at=100)
    assert pool.stored == [10, 100]
    assert pool.info.bytes <= 1000 * ROW
    assert pool.info.refused == pool.info.evicted == 0


def test_pool_entry_larger_than_the_budget_only_by_its_spare_rows_goes_alone():
    pool = Pool("full", budget=300 * ROW)
    pool.store(run(10, start=5000))
    pool.store(run(290))
    assert pool.stored == [10]
    assert (pool.info.refused, pool.info.evicted) == (1, 0)


def test_pool_under_pressure_gives_up_the_middle_of_a_conversation_first():
    probe = Pool("recurrent")
    probe.store(run(10))
    pool = Pool("recurrent", budget=4 * probe.info.bytes)
    pool.store(run(20), OPENING, at=10)
    for turn in range(2, 12):
        pool.store(run(10 * turn))
    assert pool.stored[0] == 10
    assert pool.stored[-1] == 110
    assert len(pool.stored) == 4


def test_pool_number_of_entries_is_bounded():
    pool = Pool("full", max_entries=3)
    for start in range(100, 800, 100):
        pool.store(run(5, start=start))
    assert pool.info.entries == 3
    assert pool.info.evicted == 4


@ANY_KIND
def test_pool_unused_entry_is_dropped_after_its_time(kind):
    now = [100.0]
    pool = Pool(kind, ttl_seconds=10, clock=lambda: now[0])
    pool.store(run(20))
    pool.store(run(20, start=500))
    now[0] += 9
    assert pool.length(run(21)) == 20
    now[0] += 9
    assert pool.length(run(21, start=500)) == 0
    assert pool.length(run(21)) == 20
    now[0] += 10.5
    pool.pool.settle()
    assert (pool.info.entries, pool.info.bytes, pool.info.evicted) == (0, 0, 2)


def test_pool_without_ttl_keeps_entries_for_ever():
    now = [0.0]
    pool = Pool("full", clock=lambda: now[0])
    pool.store(run(20))
    now[0] = 1e12
    assert pool.length(run(21)) == 20


# Failures.


@ANY_KIND
def test_pool_caches_of_another_length_are_not_stored(kind):
    pool = Pool(kind)
    caches = pool.new_caches()
    feed(caches, run(20))
    for ids in (run(19), run(21), []):
        assert not pool.pool.publish("model", PromptKey(tuple(ids)), caches, REPLY)
    assert not pool.pool.publish("model", PromptKey((1,)), [], REPLY)
    assert pool.stored == []
    assert pool.info.failed == 4


@ANY_KIND
def test_pool_failed_copy_stores_nothing_and_is_counted(kind, monkeypatch):
    pool = Pool(kind)
    pool.store(run(20))

    def fail(*_):
        raise BackendError("evaluation: must succeed")

    caches = pool.new_caches()
    feed(caches, run(30, start=700))
    with monkeypatch.context() as patch:
        patch.setattr(cache_layers, "evaluate", fail)
        assert not pool.pool.publish("model", PromptKey(tuple(run(30, start=700))), caches, REPLY)
    assert pool.info.failed == 1
    assert pool.length(run(31, start=700)) == 0
    assert pool.length(run(21)) == 20


def test_pool_discard_drops_what_shares_a_buffer_and_nothing_else():
    pool = Pool("hybrid")
    pool.store(run(60), at=30)
    pool.store(run(60), REPLY)
    pool.store(run(20, start=900))
    hit = pool.pool.find("model", PromptKey(tuple(run(70))))
    assert hit.length == 60
    feed(hit.caches, run(10, start=61))
    pool.pool.discard_sharing(hit.caches)
    pool.pool.settle()
    assert pool.stored == [20]
    assert pool.info.failed == 2
    assert pool.length(run(21, start=900)) == 20


def test_pool_failed_cut_leaves_the_entry_usable(monkeypatch):
    import engine_core.cache.kv as kv

    pool = Pool("full")
    pool.store(run(100))
    hit = pool.pool.find("model", PromptKey(tuple(run(5000))))
    feed(hit.caches, run(4900, start=101))
    del hit

    def fail(*_):
        raise BackendError("evaluation: must succeed")

    with monkeypatch.context() as patch:
        patch.setattr(kv, "evaluate", fail)
        pool.pool.settle()
    assert pool.info.failed == 1
    assert pool.length(run(101)) == 100


# Options.


@pytest.mark.parametrize("budget", [-1, 1.5, "1", True, 2**70])
def test_make_pool_budget_out_of_range_is_refused(budget):
    with pytest.raises(InvalidRequest) as caught:
        make_pool(budget, None)
    assert caught.value.code == "request.prompt_cache_bytes"


@pytest.mark.parametrize("ttl", [0, -1.0, "1", True, float("nan"), float("inf")])
def test_make_pool_ttl_out_of_range_is_refused(ttl):
    with pytest.raises(InvalidRequest) as caught:
        make_pool(None, ttl)
    assert caught.value.code == "request.prompt_cache_ttl"


def test_make_pool_default_is_bounded_by_an_eighth_of_the_memory(monkeypatch):
    import engine_core.cache.pool as module

    pages = {"SC_PHYS_PAGES": 2**20, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(module.os, "sysconf", lambda name: pages[name])
    assert make_pool(None, None).report().budget_bytes == 2**29
    pages["SC_PHYS_PAGES"] = 2**30
    assert make_pool(None, None).report().budget_bytes == 2**31
    assert make_pool(0, None) is None
