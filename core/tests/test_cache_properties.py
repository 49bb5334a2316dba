"""Random histories of every cache kind against a plain list of the rows each view was fed."""

import gc

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_core.cache.kv import KvCache
from engine_core.cache.recurrent import RecurrentCache
from engine_core.errors import CacheError

KINDS = ["full", 1, 4, 8, "recurrent"]
KEEP_ROWS = 16


def recur(slots, inputs, _, ends):
    """Polynomial hash of everything fed: any lost, doubled or foreign row changes it."""
    (state,), (fed,) = slots, inputs
    states = []
    for row in range(fed.shape[1]):
        state = state * 31 + fed[:, row]
        states.append(state)
    return mx.stack(states, axis=1), [(states[end - 1],) for end in ends]


class View:
    """One cache beside the list of rows it was fed."""

    def __init__(self, kind, cache=None, rows=()):
        self.kind = kind
        self.rows = list(rows)
        self.marks = []  # (mark, length at the mark), oldest first, valid ones only
        self.undone = []
        self.furthest_start = 0
        self.planned = {}  # length -> rows after which it can be forked
        if cache is not None:
            self.cache = cache
        elif kind == "recurrent":
            self.cache = RecurrentCache(shapes=[(1, 1)], dtypes=[mx.uint32])
        else:
            self.cache = KvCache(
                kv_heads=2,
                head_dim=1,
                value_dim=3,
                dtype=mx.float32,
                window=None if kind == "full" else kind,
                growth=4,
            )

    def append(self, fresh):
        before = len(self.rows)
        self.rows += fresh
        self.furthest_start = max(self.furthest_start, before)
        if self.kind == "recurrent":
            self.cache.run(recur, (mx.array(fresh, mx.uint32).reshape(1, -1, 1),))
            self.check_state()
            return
        numbers = np.array(fresh, np.float32)
        keys = np.stack([numbers, -numbers])[None, :, :, None]
        values = np.repeat(keys * 2, 3, axis=3)
        got_keys, got_values = self.cache.append(mx.array(keys), mx.array(values))
        earlier = before if self.kind == "full" else min(before, self.kind - 1)
        seen = np.array(self.rows[before - earlier :], np.float32)
        want = np.stack([seen, -seen])[None, :, :, None]
        np.testing.assert_array_equal(np.array(got_keys), want)
        np.testing.assert_array_equal(np.array(got_values), np.repeat(want * 2, 3, axis=3))

    def check_state(self):
        assert self.cache.offset == len(self.rows)
        if self.kind == "recurrent":
            want = 0
            for row in self.rows:
                want = (want * 31 + row) % 2**32
            assert self.cache.slots[0].item() == want

    def mark(self):
        self.marks.append((self.cache.mark(), len(self.rows)))

    def keep(self, index, rows):
        every = self.marks + self.undone
        if not every:
            return
        mark, length = every[index % len(every)]
        valid = (
            index % len(every) < len(self.marks)
            and rows <= min(KEEP_ROWS, len(self.rows) - length)
            and self.furthest_start - length <= KEEP_ROWS
        )
        if not valid:
            with pytest.raises(CacheError):
                self.cache.keep(mark, rows)
        else:
            self.cache.keep(mark, rows)
            del self.rows[length + rows :]
            position = index % len(every)
            self.undone += self.marks[position + 1 :]
            del self.marks[position + 1 :]
        self.check_state()

    def forget_marks(self):
        """Let go of every mark, so that what they hold alive is released."""
        self.marks = []
        self.undone = []

    def fork(self):
        return View(self.kind, self.cache.fork(), self.rows)

    def plan(self, ahead, after):
        length = len(self.rows) + ahead
        possible = self.cache.plan_fork(length, after)
        assert possible or (self.kind not in ("full", "recurrent") and after > KEEP_ROWS)
        if possible:
            self.planned[length] = after

    def take(self, index):
        """Fork at a planned length, once it was passed; refused only when that was not promised."""
        if not self.planned:
            return None
        length = sorted(self.planned)[index % len(self.planned)]
        if length > len(self.rows):
            return None
        after = self.planned.pop(length)
        promised = self.kind == "recurrent" or len(self.rows) - length <= after
        if not promised and not self.cache.can_trim_to(length):
            with pytest.raises(CacheError):
                self.cache.fork_at(length)
            return None
        view = View(self.kind, self.cache.fork_at(length), self.rows[:length])
        view.check_state()
        self.check_state()
        return view

    def trim(self, back):
        length = max(len(self.rows) - back, 0)
        if not self.cache.can_trim_to(length):
            assert self.kind != "full"
            with pytest.raises(CacheError):
                self.cache.trim_to(length)
            return
        self.cache.trim_to(length)
        del self.rows[length:]
        self.undone += self.marks
        self.marks = []
        self.furthest_start = min(self.furthest_start, length)
        self.check_state()

    def detach(self):
        self.cache.detach()
        self.planned = {}
        self.undone += self.marks
        self.marks = []


OPERATIONS = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 3), st.integers(1, 12)),
    st.tuples(st.just("append"), st.integers(0, 3), st.integers(1, 3)),
    st.tuples(st.just("append"), st.integers(0, 3), st.integers(20, 50)),
    st.tuples(st.just("mark"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("keep"), st.integers(0, 3), st.integers(0, 20 * 17)),
    st.tuples(st.just("fork"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("plan"), st.integers(0, 3), st.integers(0, 20 * 40)),
    st.tuples(st.just("take"), st.integers(0, 3), st.integers(0, 5)),
    st.tuples(st.just("drop"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("trim"), st.integers(0, 3), st.integers(0, 20)),
    st.tuples(st.just("detach"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("forget"), st.integers(0, 3), st.just(0)),
)


@pytest.mark.parametrize("kind", KINDS)
@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(operations=st.lists(OPERATIONS, min_size=5, max_size=50))
def test_cache_random_history_never_shows_a_foreign_row(kind, operations):
    views = [View(kind)]
    count = 0
    for name, which, number in operations:
        view = views[which % len(views)]
        if name == "append":
            view.append(list(range(count + 1, count + 1 + number)))
            count += number
        elif name == "mark":
            view.mark()
        elif name == "keep":
            view.keep(number // 17, number % 17)
        elif name == "fork" and len(views) < 4:
            views.append(view.fork())
        elif name == "plan":
            view.plan(number // 40, number % 40)
        elif name == "take" and len(views) < 4 and (taken := view.take(number)) is not None:
            views.append(taken)
        elif name == "drop" and len(views) > 1:
            views.remove(view)
            del view
            gc.collect(0)
        elif name == "trim":
            view.trim(number)
        elif name == "detach":
            view.detach()
        elif name == "forget":
            view.forget_marks()
    for view in views:
        count += 1
        view.append([count])
        view.check_state()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", [0, 1, 3, 7, 8, 9, 30, 61])
@pytest.mark.parametrize("kept", [0, 1, 5, 16])
def test_keep_any_prefix_equals_a_fresh_feed(kind, prefix, kept):
    taken = View(kind)
    if prefix:
        taken.append(list(range(1, prefix + 1)))
    taken.mark()
    for row in range(16):
        taken.append([1000 + row])
    taken.keep(0, kept)
    fresh = View(kind)
    for row in taken.rows:
        fresh.append([row])
    for view in (taken, fresh):
        view.append([7])
        view.append([8, 9])
    assert taken.rows == fresh.rows


@pytest.mark.parametrize("kind", KINDS)
def test_keep_after_one_long_append_equals_a_fresh_feed(kind):
    view = View(kind)
    view.append(list(range(1, 40)))
    view.mark()
    view.append(list(range(100, 200)))
    view.keep(0, 9)
    view.append([5])
    assert view.rows == [*range(1, 40), *range(100, 109), 5]


@pytest.mark.parametrize("kind", KINDS)
def test_keep_repeated_rounds_equal_a_fresh_feed(kind):
    view = View(kind)
    for step in range(60):
        view.forget_marks()
        view.mark()
        view.append([step * 10 + column for column in range(1, 6)])
        view.keep(0, step % 6)
    view.append([99999])
