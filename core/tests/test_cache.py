"""Cache contracts one by one: memory, sharing, marks, construction."""

import gc
import time

import mlx.core as mx
import numpy as np
import pytest

from engine_core.cache.build import build_caches
from engine_core.cache.detach import detach
from engine_core.cache.kv import KvCache
from engine_core.cache.layers import (
    cache_arrays,
    cache_nbytes,
    distinct_caches,
    fork_caches,
    keep_caches,
    mark_caches,
)
from engine_core.cache.recurrent import RecurrentCache
from engine_core.errors import CacheError, PluginError
from engine_core.family import Full, Recurrent, Shared, Sliding

MIB = 1 << 20
SLACK = 16 << 10  # scalars and rounding of the allocator


def kv(window=None, **options):
    return KvCache(kv_heads=1, head_dim=1, dtype=mx.float32, window=window, **options)


def rows(*numbers):
    return mx.array(numbers, mx.float32).reshape(1, 1, -1, 1)


def feed(cache, *numbers):
    keys, values = cache.append(rows(*numbers), rows(*(n + 0.5 for n in numbers)))
    assert np.array_equal(np.array(keys) + 0.5, np.array(values))
    return keys.reshape(-1).tolist()


def add(slots, inputs, _, ends):
    sums = slots[0][:, None] + mx.cumsum(inputs[0], axis=1)
    return sums, [(sums[:, end - 1],) for end in ends]


def recurrent():
    return RecurrentCache(shapes=[(1, 1)], dtypes=[mx.float32])


def advance(cache, *numbers):
    fed = mx.array(numbers, mx.float32).reshape(1, -1, 1)
    out = cache.run(add, (fed,))
    assert out.shape == fed.shape
    assert out[0, -1, 0].item() == cache.slots[0].item()
    return cache.slots[0].item()


def last_rows_of(chunk):
    slot = chunk[:, -3:]
    return lambda _slots, inputs, _lengths, _ends: (inputs[0], [(slot,)])


# --- memory ---------------------------------------------------------------------------------


def large_cache(length=4096):
    """A cache whose two buffers hold several MiB, with room for more rows."""
    cache = KvCache(kv_heads=4, head_dim=64, dtype=mx.float32)
    block = mx.ones((1, 4, length, 64))
    cache.append(block, block)
    mx.eval(cache.arrays())
    return cache


def append_one(cache):
    row = mx.ones((1, 4, 1, 64))
    keys, values = cache.append(row, row)
    mx.eval(keys[:, :, -1], values[:, :, -1], cache.arrays())


def active_memory():
    """Bytes in use; on a GPU memory is given back only after the work that used it."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()


def holds_at_most(count, start):
    """Whether no more bytes than these are in use beyond the start, now or as soon as a GPU has
    given back what it finished with."""
    deadline = time.monotonic() + 2
    while active_memory() - start > count and time.monotonic() < deadline:
        time.sleep(0.01)
    return active_memory() - start <= count


def address(array):
    """Where an evaluated array begins; arrays that share memory lie in one range."""
    return np.array(array, copy=False).ctypes.data


def peak_growth(action):
    """Bytes in use beyond the start at the worst moment of ``action``."""
    start = active_memory()
    mx.reset_peak_memory()
    action()
    mx.synchronize()
    return mx.get_peak_memory() - start


def test_append_with_room_writes_in_place():
    cache = large_cache()
    assert peak_growth(lambda: append_one(cache)) < MIB < cache.nbytes()


def test_append_with_live_mark_writes_in_place():
    cache = large_cache()
    mark = cache.mark()
    assert peak_growth(lambda: append_one(cache)) < MIB
    cache.keep(mark, 0)
    assert peak_growth(lambda: append_one(cache)) < MIB


def test_append_beside_shorter_fork_writes_in_place():
    cache = large_cache()
    entry = cache.fork()
    assert peak_growth(lambda: append_one(cache)) < MIB
    assert (entry.offset, cache.offset) == (4096, 4097)


def test_append_below_longer_view_copies_once():
    cache = large_cache()
    entry = cache.fork()
    append_one(cache)
    assert peak_growth(lambda: append_one(entry)) > 8 * MIB
    assert peak_growth(lambda: append_one(entry)) < MIB
    assert peak_growth(lambda: append_one(cache)) < MIB


def test_append_after_longer_view_died_writes_in_place():
    entry = large_cache()
    request = entry.fork()
    append_one(request)
    del request
    assert peak_growth(lambda: append_one(entry)) < MIB


def test_fork_allocates_nothing():
    cache = large_cache()
    assert peak_growth(lambda: cache.fork().arrays()) <= 0


def test_growth_moves_every_view_and_frees_the_old_buffer():
    cache = large_cache(256)
    entry = cache.fork()
    before = cache.nbytes()
    for _ in range(400):
        append_one(cache)
    assert cache.nbytes() > before
    assert entry.buffers() == cache.buffers()
    assert cache_nbytes([cache, entry]) == cache.nbytes()


def test_growth_copies_a_bounded_number_of_rows():
    cache = kv()
    copied = 0
    held = None
    for length in range(0, 20_000, 50):
        block = mx.zeros((1, 1, 50, 1))
        cache.append(block, block)
        capacity = cache.nbytes() // 8
        if capacity != held:
            copied += length
            held = capacity
        assert capacity <= max(256, (length + 50) * 9 // 8 + 256)
    assert copied < 12 * 20_000


def test_sliding_capacity_stays_near_the_window():
    cache = kv(window=64)
    feed(cache, *range(5000))
    assert cache.nbytes() // 8 > 5000
    for step in range(600):
        feed(cache, step)
    assert cache.nbytes() // 8 <= 256


def test_detach_slice_frees_its_parent():
    start = active_memory()
    parent = mx.ones((1, 512, 4096))
    mx.eval(parent)
    part = parent[:, 3:4]
    own = detach(part)
    del parent, part
    assert own.nbytes == 4096 * 4
    assert holds_at_most(own.nbytes + SLACK, start)
    assert np.array_equal(np.array(own), np.ones((1, 1, 4096), np.float32))


def test_detach_nearly_whole_parent_still_owns_its_memory():
    # The bytes in use cannot tell: allocators round up to more than what is left out here.
    parent = mx.ones((8, 1024))
    mx.eval(parent)
    first = address(parent)
    assert address(parent[1:]) == first + 4096
    own = detach(parent[:7])
    assert not first - own.nbytes < address(own) < first + parent.nbytes


@pytest.mark.parametrize("array", [mx.array(3.5), mx.zeros((0, 4)), mx.array([1, 2], mx.int32)])
def test_detach_any_shape_keeps_values(array):
    own = detach(array)
    assert (own.shape, own.dtype) == (array.shape, array.dtype)
    assert np.array_equal(np.array(own), np.array(array))


def test_recurrent_advance_with_long_chunk_does_not_pin_it():
    cache = RecurrentCache(shapes=[(1, 3, 1024)], dtypes=[mx.float32])
    start = active_memory()
    chunk = mx.ones((1, 512, 1024))
    cache.run(last_rows_of(chunk), (chunk,))
    mx.eval(cache.arrays())
    del chunk
    assert holds_at_most(16 * 1024 * 4, start)


def test_recurrent_detach_frees_the_parent_of_a_slot():
    cache = RecurrentCache(shapes=[(1, 3, 1024)], dtypes=[mx.float32])
    start = active_memory()
    chunk = mx.ones((1, 100, 1024))
    cache.run(last_rows_of(chunk), (chunk[:, -1:],))
    mx.eval(cache.arrays())
    del chunk
    assert active_memory() - start > 99 * 4096
    entry = cache.fork()
    entry.detach()
    del cache
    assert entry.nbytes() == 3 * 4096
    assert holds_at_most(3 * 4096 + SLACK, start)


def test_sliding_detach_holds_its_own_rows_only():
    cache = kv(window=4)
    for number in range(300):
        feed(cache, number)
    entry = cache.fork()
    entry.detach()
    assert entry.nbytes() == (4 - 1 + 16) * 8
    assert entry.buffers().keys().isdisjoint(cache.buffers())
    assert feed(entry.fork(), 1000) == [297, 298, 299, 1000]
    assert feed(cache, 2000) == [297, 298, 299, 2000]


# --- accounting and sharing -----------------------------------------------------------------


def test_new_cache_is_pristine_and_holds_nothing():
    cache = kv()
    assert cache.is_pristine
    assert (cache.offset, cache.nbytes(), cache.arrays()) == (0, 0, [])
    feed(cache, 1)
    assert not cache.is_pristine


def test_cache_nbytes_counts_a_shared_buffer_once():
    cache = kv()
    feed(cache, 1, 2)
    entries = [cache.fork() for _ in range(3)]
    assert cache_nbytes([cache, *entries]) == cache.nbytes() == 256 * 2 * 4
    feed(cache, 3)
    feed(entries[0], 4)
    assert cache_nbytes([cache, *entries]) == 2 * cache.nbytes()


def test_recurrent_fork_shares_slots_until_replaced():
    cache = recurrent()
    advance(cache, 1, 2)
    entry = cache.fork()
    assert cache_nbytes([cache, entry]) == 4
    advance(cache, 5)
    assert (cache.slots[0].item(), entry.slots[0].item()) == (8, 3)
    assert (cache.offset, entry.offset) == (3, 2)


def test_visible_predicts_append():
    for window in (None, 1, 4):
        cache = kv(window=window)
        for count in (1, 3, 1, 7):
            predicted = cache.visible(count)
            assert predicted == len(feed(cache, *range(count)))


def test_append_single_row_on_sliding_returns_exactly_the_window():
    cache = kv(window=3)
    assert [feed(cache, n) for n in range(5)] == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]


def test_trim_to_then_append_branches_from_the_untrimmed_entry():
    entry = kv()
    feed(entry, 1, 2, 3)
    request = entry.fork()
    request.trim_to(2)
    assert feed(request, 9) == [1, 2, 9]
    assert feed(entry, 4) == [1, 2, 3, 4]


@pytest.mark.parametrize("length", [-1, 4, True, 1.0])
def test_trim_to_bad_length_is_refused_and_changes_nothing(length):
    cache = kv()
    feed(cache, 1, 2, 3)
    with pytest.raises(CacheError) as caught:
        cache.trim_to(length)
    assert caught.value.code == "cache.cannot_trim"
    assert feed(cache, 4) == [1, 2, 3, 4]


def test_trim_to_dropped_sliding_positions_is_refused():
    cache = kv(window=4)
    for number in range(600):
        feed(cache, number)
    with pytest.raises(CacheError):
        cache.trim_to(10)
    cache.trim_to(599)
    assert feed(cache, 7) == [596, 597, 598, 7]


def test_sliding_takes_back_no_row_whose_window_is_cut():
    cache = kv(window=4)
    for number in range(300):
        feed(cache, number)
    cache.detach()  # leaves 3 rows of the window and 16 more, the first of them 281
    with pytest.raises(CacheError):
        cache.trim_to(283)
    cache.trim_to(284)
    assert feed(cache, 7) == [281, 282, 283, 7]


def test_trim_to_on_recurrent_is_refused():
    cache = recurrent()
    advance(cache, 1, 2)
    cache.trim_to(2)
    with pytest.raises(CacheError):
        cache.trim_to(1)
    assert cache.slots[0].item() == 3


# --- marks ----------------------------------------------------------------------------------


@pytest.fixture(params=["full", "sliding", "recurrent"])
def any_cache(request):
    if request.param == "recurrent":
        return recurrent(), advance
    return kv(window=4 if request.param == "sliding" else None), feed


def refusal(cache, mark, count):
    before = cache.offset
    with pytest.raises(CacheError) as caught:
        cache.keep(mark, count)
    assert cache.offset == before
    return caught.value.code


def test_keep_older_mark_invalidates_newer_ones_only(any_cache):
    cache, add_rows = any_cache
    oldest = cache.mark()
    add_rows(cache, 1, 2)
    middle = cache.mark()
    add_rows(cache, 3)
    newest = cache.mark()
    add_rows(cache, 4, 5)
    cache.keep(middle, 1)
    assert refusal(cache, newest, 0) == "cache.mark_invalid"
    add_rows(cache, 6)
    cache.keep(middle, 2)
    cache.keep(middle, 1)
    cache.keep(oldest, 2)
    assert refusal(cache, middle, 0) == "cache.mark_invalid"
    got = add_rows(cache, 10)
    assert got in ([1, 2, 10], 13)


def test_keep_replays_only_rows_since_its_own_mark(any_cache):
    cache, add_rows = any_cache
    outer = cache.mark()
    add_rows(cache, 1)
    add_rows(cache, 2)
    inner = cache.mark()
    add_rows(cache, 4)
    add_rows(cache, 8)
    cache.keep(inner, 1)
    assert add_rows(cache, 16) in ([1, 2, 4, 16], 23)
    cache.keep(outer, 1)
    assert add_rows(cache, 32) in ([1, 32], 33)


def test_keep_that_keeps_everything_still_invalidates_newer_marks(any_cache):
    cache, add_rows = any_cache
    older = cache.mark()
    add_rows(cache, 1)
    newer = cache.mark()
    cache.keep(older, 1)
    assert refusal(cache, newer, 0) == "cache.mark_invalid"


def test_keep_mark_of_another_cache_is_refused(any_cache):
    cache, add_rows = any_cache
    mark = cache.fork().mark()
    add_rows(cache, 1)
    assert refusal(cache, mark, 0) == "cache.mark_invalid"
    assert refusal(cache.fork(), cache.mark(), 0) == "cache.mark_invalid"


def test_keep_after_trim_or_detach_is_refused(any_cache):
    cache, add_rows = any_cache
    add_rows(cache, 1)
    mark = cache.mark()
    cache.trim_to(1)
    assert refusal(cache, mark, 0) == "cache.mark_invalid"
    mark = cache.mark()
    cache.detach()
    assert refusal(cache, mark, 0) == "cache.mark_invalid"


@pytest.mark.parametrize("count", [-1, 17, 3, True, 1.0])
def test_keep_rows_out_of_range_is_refused(any_cache, count):
    cache, add_rows = any_cache
    mark = cache.mark()
    add_rows(cache, *range(20 if count == 17 else 2))
    assert refusal(cache, mark, count) == "cache.keep_rows"


def test_keep_mark_far_behind_is_refused(any_cache):
    cache, add_rows = any_cache
    mark = cache.mark()
    for number in range(17):
        add_rows(cache, number)
    cache.keep(mark, 16)
    add_rows(cache, 1)
    cache.keep(mark, 16)
    for number in range(18):
        add_rows(cache, number)
    assert refusal(cache, mark, 16) == "cache.mark_expired"


def test_recurrent_without_mark_records_nothing():
    cache = recurrent()
    advance(cache, 1, 2)
    assert len(cache.arrays()) == 1
    mark = cache.mark()
    advance(cache, 3)
    assert len(cache.arrays()) == 2
    del mark
    advance(cache, 4)
    assert len(cache.arrays()) == 1


def test_recurrent_records_at_most_sixteen_rows():
    cache = recurrent()
    mark = cache.mark()
    for count in (10, 100, 50):
        advance(cache, *range(count))
        recorded = sum(array.shape[1] for array in cache.arrays()[1:])
        assert recorded <= 16
    del mark


def test_recurrent_replay_that_fails_changes_nothing():
    def broken(slots, inputs, lengths, ends):
        if inputs[0].shape[1] == 1:
            raise ArithmeticError
        return add(slots, inputs, lengths, ends)

    cache = recurrent()
    mark = cache.mark()
    cache.run(broken, (mx.ones((1, 2, 1)),))
    with pytest.raises(ArithmeticError):
        cache.keep(mark, 1)
    assert (cache.offset, cache.slots[0].item()) == (2, 2)


# --- refusals of rows -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (mx.zeros((1, 1, 0, 1)), mx.zeros((1, 1, 0, 1))),
        (mx.zeros((1, 1, 2, 1)), mx.zeros((1, 1, 3, 1))),
        (mx.zeros((1, 2, 2, 1)), mx.zeros((1, 2, 2, 1))),
        (mx.zeros((2, 1, 2, 1)), mx.zeros((2, 1, 2, 1))),
        (mx.zeros((1, 1, 2, 2)), mx.zeros((1, 1, 2, 1))),
        (mx.zeros((1, 2, 1)), mx.zeros((1, 2, 1))),
        (mx.zeros((1, 1, 2, 1), mx.float16), mx.zeros((1, 1, 2, 1))),
        (mx.zeros((1, 1, 2, 1)), mx.zeros((1, 1, 2, 1), mx.float16)),
    ],
)
def test_append_undeclared_rows_are_refused(keys, values):
    cache = kv()
    feed(cache, 1)
    with pytest.raises(CacheError) as caught:
        cache.append(keys, values)
    assert caught.value.code == "cache.rows"
    assert feed(cache, 2) == [1, 2]


@pytest.mark.parametrize(
    ("slots", "inputs"),
    [
        ((), (mx.zeros((1, 1, 1)),)),
        ((mx.zeros((1, 2)),), (mx.zeros((1, 1, 1)),)),
        ((mx.zeros((1, 1), mx.float16),), (mx.zeros((1, 1, 1)),)),
        ((mx.zeros((1, 1)),), ()),
        ((mx.zeros((1, 1)),), (mx.zeros((1, 0, 1)),)),
        ((mx.zeros((1, 1)),), (mx.zeros((1, 2, 1)), mx.zeros((1, 3, 1)))),
        ((mx.zeros((1, 1)),), (mx.zeros((1,)),)),
    ],
)
def test_run_undeclared_state_is_refused(slots, inputs):
    cache = recurrent()
    with pytest.raises(CacheError):
        cache.run(lambda *_: (mx.zeros((1, 1, 1)), [slots]), inputs)
    assert cache.is_pristine


@pytest.mark.parametrize("count", [0, 1, 3])
def test_run_with_another_number_of_states_is_refused(count):
    cache = recurrent()
    cache.plan_fork(2, 2)
    with pytest.raises(CacheError, match="one state an end") as caught:
        cache.run(
            lambda *_: (mx.zeros((1, 4, 1)), [(mx.zeros((1, 1)),)] * count), (mx.ones((1, 4, 1)),)
        )
    assert "each of ends" in caught.value.hint
    assert cache.is_pristine


# --- planned forks --------------------------------------------------------------------------


def test_planned_fork_holds_the_state_inside_a_call():
    cache = recurrent()
    advance(cache, 1)
    assert all(cache.plan_fork(length, 100) for length in (1, 3, 4, 5, 6))
    advance(cache, 2, 4, 8, 16)
    advance(cache, 32)
    held = {length: cache.fork_at(length) for length in (1, 3, 4, 5, 6)}
    sums = {at: fork.slots[0].item() for at, fork in held.items()}
    assert sums == {1: 1, 3: 7, 4: 15, 5: 31, 6: 63}
    assert all(fork.offset == at for at, fork in held.items())
    assert advance(held[3], 64) == 71
    assert advance(cache, 64) == 127
    with pytest.raises(CacheError, match="trim_to must name a position whose state"):
        cache.fork_at(3)


def test_planned_fork_asked_for_too_early_stays_planned():
    cache = recurrent()
    cache.plan_fork(2, 1)
    with pytest.raises(CacheError):
        cache.fork_at(2)
    advance(cache, 1, 2, 4)
    assert cache.fork_at(2).slots[0].item() == 3


def test_planned_state_costs_memory_only_until_it_is_taken():
    cache = recurrent()
    cache.plan_fork(2, 1)
    advance(cache, 1, 2, 4)
    assert (cache.nbytes(), cache.state_nbytes()) == (8, 4)
    cache.fork_at(2)
    assert cache.nbytes() == 4


def test_stored_cache_pins_no_planned_state():
    cache = recurrent()
    cache.plan_fork(2, 1)
    advance(cache, 1, 2, 4)
    cache.detach()
    assert (cache.nbytes(), cache.slots[0].item()) == (4, 7)
    with pytest.raises(CacheError):
        cache.fork_at(2)


def test_planned_fork_survives_rows_taken_back():
    cache = recurrent()
    cache.plan_fork(2, 1)
    mark = cache.mark()
    advance(cache, 1, 2, 4)
    cache.keep(mark, 1)
    advance(cache, 8, 16)
    assert cache.fork_at(2).slots[0].item() == 9


def test_planned_state_goes_with_the_rows_that_made_it():
    cache = recurrent()
    assert all(cache.plan_fork(length, 1) for length in (1, 2))
    mark = cache.mark()
    advance(cache, 1, 2, 4)
    cache.keep(mark, 1)
    # The first row is kept, and its state with it; the second one was taken back.
    with pytest.raises(CacheError, match="trim_to must name a position whose state"):
        cache.fork_at(2)
    assert cache.fork_at(1).slots[0].item() == 1
    assert cache.offset == 1


def test_rows_taken_back_count_the_valid_rows_of_each_sequence():
    def total(slots, inputs, lengths, ends):
        valid = mx.arange(inputs[0].shape[1])[None, :, None] < lengths[:, None, None]
        return add(slots, (mx.where(valid, inputs[0], 0),), None, ends)

    cache = RecurrentCache(shapes=[(3, 1)], dtypes=[mx.float32])
    mark = cache.mark()
    cache.plan_fork(2, 2)
    cache.run(total, (mx.ones((3, 4, 1)),), mx.array([1, 3, 4]))
    assert cache.slots[0].reshape(-1).tolist() == [1, 3, 4]
    assert cache.fork_at(2).slots[0].reshape(-1).tolist() == [1, 2, 2]
    cache.keep(mark, 3)
    assert cache.slots[0].reshape(-1).tolist() == [1, 3, 3]


def test_attention_plans_what_it_can_take_back():
    assert kv().plan_fork(10, 10_000)
    assert kv(window=4).plan_fork(10, 16)
    assert not kv(window=4).plan_fork(10, 17)
    cache = kv(window=4)
    feed(cache, *range(40))
    fork = cache.fork_at(24)
    assert feed(fork, 100) == [21, 22, 23, 100]


# --- lists of caches ------------------------------------------------------------------------

LAYERS = (
    Full(kv_heads=2, head_dim=4),
    Sliding(window=3, kv_heads=1, head_dim=2, value_dim=5),
    Shared(donor=1),
    Recurrent(shapes=((3, 2), (4,)), dtypes=("compute", "float32")),
    Shared(donor=0),
)


def test_build_caches_follows_the_specs():
    full, sliding, shared, state, shared_full = build_caches(LAYERS, mx.float16, batch=2)
    assert isinstance(full, KvCache)
    assert (full.window, full.kv_heads, full.head_dim, full.value_dim) == (None, 2, 4, 4)
    assert isinstance(sliding, KvCache)
    assert (sliding.window, sliding.value_dim, sliding.batch) == (3, 5, 2)
    assert sliding.dtype == mx.float16
    assert shared is sliding
    assert shared_full is full
    assert isinstance(state, RecurrentCache)
    assert [(slot.shape, slot.dtype) for slot in state.slots] == [
        ((2, 3, 2), mx.float16),
        ((2, 4), mx.float32),
    ]
    assert all(not slot.any().item() for slot in state.slots)


@pytest.mark.parametrize(
    "layers",
    [
        (Shared(donor=0),),
        (Full(kv_heads=1, head_dim=1), Shared(donor=-1)),
        (Full(kv_heads=1, head_dim=1), Shared(donor=0), Shared(donor=1)),
        (Recurrent(shapes=((1,),), dtypes=("float12",)),),
        ("full",),
    ],
)
def test_build_caches_bad_spec_is_refused(layers):
    with pytest.raises(PluginError):
        build_caches(layers, mx.float32)


def small_list():
    layers = (
        Full(kv_heads=1, head_dim=1),
        Shared(donor=0),
        Recurrent(shapes=((1,),), dtypes=("float32",)),
    )
    return build_caches(layers, mx.float32)


def test_fork_caches_keeps_layers_sharing():
    caches = small_list()
    feed(caches[0], 1)
    forks = fork_caches(caches)
    assert forks[0] is forks[1]
    assert forks[0] is not caches[0]
    assert len(distinct_caches(forks)) == 2
    assert len(cache_arrays(forks)) == 3


def test_keep_caches_takes_rows_back_on_every_layer():
    caches = small_list()
    feed(caches[0], 1)
    advance(caches[2], 1)
    marks = mark_caches(caches)
    feed(caches[0], 2, 3)
    advance(caches[2], 2, 3)
    keep_caches(caches, marks, 1)
    assert feed(caches[0], 9) == [1, 2, 9]
    assert advance(caches[2], 9) == 12


def test_keep_caches_refusal_of_one_layer_changes_none():
    caches = small_list()
    marks = mark_caches(caches)
    feed(caches[0], 2, 3)
    with pytest.raises(CacheError):
        keep_caches(caches, marks, 1)
    with pytest.raises(CacheError):
        keep_caches(caches, marks[:1], 0)
    assert caches[0].offset == 2


def test_restored_caches_share_no_array_with_the_state_or_one_another():
    """An append writes into a buffer in place, which must not be the caller's array object."""
    source = kv()
    feed(source, *range(10))
    state = source.state()
    first, second = kv(), kv()
    for cache in (first, second):
        cache.restore(10, state)
    first.trim_to(5)
    assert feed(first, 100) == [0, 1, 2, 3, 4, 100]
    assert np.array(state["keys"]).reshape(-1).tolist() == list(range(10))
    assert feed(second, 10) == list(range(11))
