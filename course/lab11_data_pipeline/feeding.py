"""What lab 11's checks do with a learner's sampler and prefetcher: deal on real ranks, take batches under watch.

Nothing here measures time. That a batch was made while another was computed is seen from the order of events: the
judge "computes" until the batches that should be made ahead are there, and only a mistake lets it wait in vain.
"""

import math
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import thread as pools
from types import FrameType
from typing import Any

import numpy as np

from course.kit.exercises import CheckFailed
from course.kit.receipts import Row, row
from course.shared.diagnose import expect, expect_whole
from minillm.comm import Group
from minillm.data.sampler import permutation
from minillm.measure import ledger

PATIENCE_S = 5.0  # only mistakes wait this long


# Sharding.


def deal_on_ranks(
    group: Group, deal: Callable, num_samples: int, seed: int, legs: Sequence[tuple[int, int, int]]
) -> tuple[list[list[list[int]]], int]:
    """([leg][step] -> the samples dealt to this rank, messages it sent); a leg is (ranks, batch size, steps)."""

    def order(epoch: int) -> np.ndarray:
        return permutation(num_samples, seed, int(epoch))

    dealt: list[list[list[int]]] = []
    position = 0
    with ledger() as led:
        for world_size, batch_size, steps in legs:
            dealt.append([])
            for _ in range(steps):
                if group.rank < world_size:
                    mine = deal(position, order, num_samples, batch_size, group.rank, world_size)
                    dealt[-1].append(expect_whole("a rank's share", mine, "a list of ints"))
                position += world_size * batch_size
    return dealt, led.messages


def judge_step(
    shares: Sequence[list[int]],
    position: int,
    num_samples: int,
    batch_size: int,
    order: Callable[[int], np.ndarray],
    resumed: bool,
) -> None:
    """Raises CheckFailed unless the ranks' shares together are the next samples of the stream."""
    world, D = len(shares), num_samples
    where = f"{D} samples, position {position}, {world} ranks with batch_size {batch_size}"
    where += " (just resumed on another number of ranks)" if resumed else ""
    for rank, share in enumerate(shares):
        if len(share) != batch_size:
            said = f"{where}: rank {rank} got {len(share)} samples, but its share of a step is batch_size"
            if len(share) < batch_size and position // D < (position + world * batch_size - 1) // D:
                said += ": a step that reaches the end of an epoch is filled up from the next epoch"
            raise CheckFailed(said)
        if outside := [sample for sample in share if not 0 <= sample < D]:
            raise CheckFailed(f"{where}: rank {rank} got sample {outside[0]}; samples are 0..{D - 1}")
    places = range(position, position + world * batch_size)
    due = Counter(int(order(place // D)[place % D]) for place in places)
    got = Counter(sample for share in shares for sample in share)
    if got == due:
        return
    if all(sorted(share) == sorted(shares[0]) for share in shares):
        raise CheckFailed(f"{where}: every rank got the same samples {shares[0]}: {world} ranks do the work of one")
    if got == Counter(int(order(0)[place % D]) for place in places):
        raise CheckFailed(f"{where}: epoch {places[-1] // D} comes in the order of epoch 0: ask order(epoch) for each")
    extra, missing = sorted((got - due).elements()), sorted((due - got).elements())
    said = f"{where}: sample {extra[0]} is not due in this step, sample {missing[0]} is, but no rank got it"
    seen = {int(order(place // D)[place % D]) for place in range(position // D * D, position)}
    if resumed and set(extra) & seen:
        raise CheckFailed(f"{said}. Resumed wrongly: this epoch has shown {sorted(set(extra) & seen)[0]} before")
    if twice := [sample for sample, times in got.items() if times > due[sample] and times > 1]:
        raise CheckFailed(f"{said}. Sample {twice[0]} was dealt {got[twice[0]]} times: shards must not overlap")
    raise CheckFailed(f"{said}. All ranks must cut the same order, and the cut must follow from the arguments alone")


# Prefetching.


class _Source:
    """Batches 0, 1, ... to be made; knows which were begun, which are done and which were asked for."""

    def __init__(self, total: int, limit: int):
        self.done = [threading.Event() for _ in range(total)]
        self.overrun = threading.Event()
        self.asked = self.begun = self.most_ahead = 0
        self._limit, self._lock = limit, threading.Lock()

    def make(self, k: int) -> int:
        with self._lock:
            self.begun += 1
            self.most_ahead = max(self.most_ahead, self.begun - self.asked)
            if self.begun - self.asked > self._limit:
                self.overrun.set()
        if k % 2 == 0 and k + 1 < len(self.done):
            self.done[k + 1].wait(0.03)  # slow: whoever makes k + 1 at the same time is done with it first
        self.done[k].set()
        return k


def judge_overlap(prefetch: Callable, depth: int = 3, total: int = 12) -> list[Row]:
    """Takes `total` batches: in order, `depth` made ahead during each step, never more than depth + 1."""
    source, before = _Source(total, depth + 1), set(threading.enumerate())
    batches = _iterated(prefetch(source.make, total, depth))
    least_ready = depth
    for k in range(total):
        source.asked = k + 1
        what, item = _take(batches, f"batch {k} of {total} (depth {depth})", before)
        if what == "error":
            raise item
        if what == "end":
            raise CheckFailed(f"the iteration ended after {k} of {total} batches: is an end mark taken for a batch?")
        if item != k:
            raise CheckFailed(f"batch {item!r} came where batch {k} was due: the order must not depend on who is quick")
        for ahead in range(k + 1, min(k + 1 + depth, total)):  # the step: compute until these are ready
            if not source.done[ahead].wait(PATIENCE_S):
                least_ready = min(least_ready, ahead - k - 1)
                ready = f"only {ahead - k - 1} of {depth} batches were" if ahead > k + 1 else "nothing was"
                raise CheckFailed(
                    f"{ready} made while you computed on batch {k}: loading does not overlap with compute"
                )
        _judge_threads(batches, before)
        if k == 0:
            source.overrun.wait(0.3)  # time to run away, for a producer that does
    if _take(batches, "the end", before)[0] != "end":
        raise CheckFailed(f"the iteration goes on after the last of {total} batches")
    if source.overrun.is_set():
        raise CheckFailed(
            f"{source.most_ahead} batches were begun before anyone asked for them, depth is {depth}: without a bound "
            "a fast loader fills the memory"
        )
    return [
        row(f"batches in order, depth {depth}", total, total),
        row("batches ready at the end of each step", depth, least_ready),
        row(f"begun ahead, {depth + 1} at most", True, source.most_ahead <= depth + 1),
    ]


def _iterated(batches: Any) -> Iterator:
    expect(isinstance(batches, Iterable), batches, "something that iterates over the batches")
    return iter(batches)


def _judge_threads(batches: Iterator, before: set[threading.Thread]) -> None:
    """CheckFailed for a new thread that is no daemon, but for a pool's: Python tells those to stop at its end."""
    for thread in _new(before):
        frames = _frames(thread)
        started = any(frame.f_code.co_filename != threading.__file__ for frame in frames)
        if started and not thread.daemon and not any(map(_is_pools, frames)):
            _drain(batches, before)
            raise CheckFailed(
                "your thread is no daemon: if the reader stops early, it waits for room for ever, and Python waits for "
                "it at the end of the program"
            )


def _drain(batches: Iterator, before: set[threading.Thread]) -> None:
    """Takes what is left, so that a thread that waits for room ends: else this program could not end either."""
    while _take(batches, "the end", before)[0] == "item":
        pass


def judge_early_stop(prefetch: Callable, total: int = 12) -> list[Row]:
    """A reader stops after 2 batches: no thread of a pool may be left inside a task, where it waits for room."""
    before = set(threading.enumerate())
    batches = _iterated(prefetch(lambda k: k, total, 2))
    for k in range(2):
        _take(batches, f"batch {k} of {total} (depth 2)", before)
    end = time.monotonic() + PATIENCE_S
    while busy := [thread for thread in _new(before) if not thread.daemon and not _is_idle(thread)]:
        if time.monotonic() > end:
            _drain(batches, before)
            raise CheckFailed(
                f"a reader stopped after 2 of {total} batches, and your pool's thread still waits inside its task: "
                "Python waits for it at the end of the program. Submit one task for each batch"
            )
        time.sleep(0.01)
    return [row("threads that keep a program from ending", 0, len(busy))]


def _new(before: set[threading.Thread]) -> list[threading.Thread]:
    """The threads that the answer has started and that are alive."""
    return [thread for thread in set(threading.enumerate()) - before if not isinstance(thread, _Reader)]


def _frames(thread: threading.Thread) -> list[FrameType]:
    """What the thread is doing, innermost call first."""
    frame, found = sys._current_frames().get(thread.ident), []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _is_pools(frame: FrameType) -> bool:
    return frame.f_code.co_filename == pools.__file__ and frame.f_code.co_name == "_worker"


def _is_idle(thread: threading.Thread) -> bool:
    """Whether a pool's thread waits for its next task."""
    frames = _frames(thread)
    return not frames or _is_pools(frames[0])


def judge_failure(prefetch: Callable, total: int = 6) -> list[Row]:
    """Batch 3 cannot be made: 0, 1, 2 arrive, then its error."""
    broken, before = _ShardError("shard 3 cannot be read"), set(threading.enumerate())

    def make(k: int) -> int:
        if k == 3:
            raise broken
        return k

    batches = _iterated(prefetch(make, total, 2))
    for k in range(4):
        what, item = _take(batches, f"batch {k}, after the loader had failed in batch 3,", before)
        if what == "error" and broken is item.__context__ is not item.__cause__:
            raise CheckFailed(
                f"batch 3 raised {broken!r}, and {item!r} came instead: raise the error itself, or `from` it"
            )
        if what == "error" and broken not in (item, item.__cause__):
            raise item
        if what == "error" and k < 3:
            raise CheckFailed(f"batch {k} was good, but the error of batch 3 came in its place")
        if what == "end":
            raise CheckFailed(
                f"batch 3 cannot be made, and the iteration just ended after {k} of {total}: its error is lost"
            )
        if what == "item" and item != k:
            raise CheckFailed(
                f"batch 3 cannot be made, and batch {item!r} came in place of batch {k}: its error is lost"
            )
    return [row("the loader's error arrives as batch", 3, k)]


class _ShardError(Exception):
    """An error of the loader's own, which no built-in type catches but Exception."""


class _Reader(threading.Thread):
    """A daemon itself, so that a hanging answer ends with the program. Its own threads inherit that they are none, as
    those of the main thread do."""

    inside = False

    @property
    def daemon(self) -> bool:
        return not self.inside

    def run(self) -> None:
        self.inside = True
        super().run()


def _take(batches: Any, what: str, before: set[threading.Thread]) -> tuple[str, Any]:
    """("item", batch), ("end", None) or ("error", exception) of the next batch; refuses to wait for ever.

    before: the threads that were there before the answer began.
    """
    box: queue.SimpleQueue = queue.SimpleQueue()

    def take() -> None:
        try:
            box.put(("item", next(batches)))
        except StopIteration:
            box.put(("end", None))
        except BaseException as error:
            box.put(("error", error))

    _Reader(target=take).start()
    try:
        return box.get(timeout=PATIENCE_S)
    except queue.Empty:
        waits = (
            "thread that waits, too: for room that only the consumer makes?" if _new(before) else "thread that is gone"
        )
        said = f"{what} has not come for {math.ceil(PATIENCE_S)} s: the consumer waits for a {waits}"
        raise CheckFailed(said) from None
