import gc
import threading
import time

import pytest

from course.lab11_data_pipeline.formulas import step_seconds, waits
from minillm.data import Prefetcher

pytestmark = pytest.mark.drawn(2)

PATIENCE_S = 20  # only a deadlock waits this long


class FakeClock:
    """Time that passes only when told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def pass_time(self, seconds):
        self.now += seconds


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("minillm-prefetch")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    for thread in threads():
        thread.join(PATIENCE_S)
    assert not threads()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_items_come_in_order_whoever_finishes_first(workers):
    def make(k):
        time.sleep(0.003 * (k % 3 == 0))  # every third is slow
        return k * k

    with Prefetcher(make, 40, workers, depth=4) as items:
        assert list(items) == [k * k for k in range(40)]
        assert items.items == 40


def test_the_next_item_is_made_while_the_consumer_computes():
    began = [threading.Event() for _ in range(5)]

    def make(k):
        began[k].set()
        return k

    with Prefetcher(make, 5, workers=1, depth=1) as items:
        for k in range(4):
            assert next(items) == k
            assert began[k + 1].wait(PATIENCE_S)  # "computing" on k: k + 1 is under way although nobody asked
    with Prefetcher(make, 5, workers=0) as items:
        for event in began:
            event.clear()
        next(items)
        assert [event.is_set() for event in began] == [True, False, False, False, False]


def test_workers_work_at_the_same_time():
    together = threading.Barrier(3, timeout=PATIENCE_S)  # breaks unless three are inside at once
    with Prefetcher(lambda _: together.wait(), 6, workers=3, depth=3) as items:
        assert sorted([next(items) for _ in range(3)]) == [0, 1, 2]
        assert sorted([next(items) for _ in range(3)]) == [0, 1, 2]


def let_it_finish(items):
    """Returns when the only worker has made everything it was asked for so far."""
    done = threading.Event()
    items._pool.submit(done.set)
    assert done.wait(PATIENCE_S)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_exactly_depth_items_are_made_ahead(depth):
    made = []
    with Prefetcher(made.append, workers=1, depth=depth) as items:
        for taken in range(6):
            let_it_finish(items)
            assert made == list(range(taken + depth))
            next(items)


def test_without_workers_the_consumer_waits_for_every_second_of_work():
    clock = FakeClock()
    items = Prefetcher(lambda k: clock.pass_time(2.0), total=10, workers=0, clock=clock)
    for _ in items:
        clock.pass_time(3.0)  # compute
    assert (items.waited_s, items.worked_s) == (20.0, 20.0)
    assert clock.now == 10 * step_seconds(2.0, 3.0, prefetch=False)


def test_what_is_ready_costs_no_waiting():
    clock = FakeClock()
    with Prefetcher(lambda k: clock.pass_time(2.0), total=4, workers=1, depth=4, clock=clock) as items:
        let_it_finish(items)
        assert len(list(items)) == 4
        assert (items.waited_s, items.worked_s) == (0.0, 8.0)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_exception_surfaces_where_its_item_was_due(workers):
    def make(k):
        if k == 3:
            raise KeyError("item 3 is broken")
        return k

    items = Prefetcher(make, workers=workers, depth=5)
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="item 3 is broken") as caught:
        next(items)
    assert "make" in [entry.name for entry in caught.traceback]
    assert not threads()
    with pytest.raises(StopIteration):
        next(items)


def test_closing_early_ends_the_threads_and_drops_what_was_not_begun():
    began, go = threading.Semaphore(0), threading.Event()
    made = []

    def make(k):
        began.release()
        assert go.wait(PATIENCE_S)
        made.append(k)

    items = Prefetcher(make, workers=1, depth=50)
    assert began.acquire(timeout=PATIENCE_S)
    go.set()
    items.close()
    items.close()
    assert not threads()
    assert list(items) == []


def test_a_forgotten_prefetcher_leaves_no_thread():
    items = Prefetcher(lambda k: k, workers=2)
    assert next(items) == 0
    del items


def test_an_exception_in_the_consumer_leaves_no_thread():
    with pytest.raises(RuntimeError, match="in the loop"), Prefetcher(lambda k: k, workers=2) as items:
        for _ in items:
            raise RuntimeError("in the loop")
    assert not threads()


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="workers -1"):
        Prefetcher(str, workers=-1)
    with pytest.raises(ValueError, match="depth 1 leaves some of 2 workers idle"):
        Prefetcher(str, workers=2, depth=1)


def test_the_recurrence_of_waits_is_the_formula_when_times_are_constant():
    for load, compute in [(2.0, 3.0), (3.0, 2.0), (1.0, 1.0)]:
        on_demand = waits([load] * 50, [compute] * 50, depth=0)
        ahead = waits([load] * 50, [compute] * 50, depth=2)
        assert on_demand == pytest.approx([load] * 50)
        assert ahead[0] == load
        assert ahead[10:] == pytest.approx([step_seconds(load, compute, prefetch=True) - compute] * 40)


def test_depth_rides_out_a_slow_batch():
    load = [1.0] * 20
    load[10] = 6.0
    waited = [sum(waits(load, [2.0] * 20, depth)[1:]) for depth in (0, 1, 2, 4)]
    assert waited == [24.0, 4.0, 2.0, 0.0]
