"""A fleet in simulated time: one queue, replicas of some slots, cold starts, a warm pool. A day takes seconds.

    arrivals ──▶ queue (first come, first served) ──▶ slots of ready replicas ──▶ ended
                                  started ── cold_start_s ──▶ pool, or ready

With one replica of one slot it is the M/G/1 queue of the formulas (`minillm/predict/serving/queueing.py`).
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from minillm.api.autoscale.policies import Sample

DAY_S = 86_400.0


@dataclass(frozen=True)
class Job:
    """A request. at: when it comes; service_s: how long it takes a slot."""

    at: float
    service_s: float


def varying(rate: Callable[[float], float], peak: float, seconds: float, seed: int = 0) -> Iterator[float]:
    """Times of a Poisson process of a changing rate, at most `peak` per second (Lewis, Shedler 1979: thinning)."""
    rng, at = random.Random(seed), 0.0
    while (at := at + rng.expovariate(peak)) < seconds:
        if rng.random() * peak < rate(at):
            yield at


def day(mean: float, swing: float = 0.8, peak_hour: float = 15.0) -> Callable[[float], float]:
    """Requests per second over a day: a wave around `mean`, by `swing` of it up and down."""
    return lambda at: mean * (1 + swing * math.cos(2 * math.pi * (at / DAY_S - peak_hour / 24)))


@dataclass(eq=False)
class Replica:
    """ready: it serves, or stands in the pool. leaving: it takes no more. busy: slots in use."""

    ready: bool = False
    leaving: bool = False
    busy: int = 0


@dataclass
class Outcome:
    """waits: seconds in the queue of each request that began, in that order. began: when. replica_s: seconds of all
    replicas from their start to their end, those of the pool included. longest: the most that waited at once."""

    waits: list[float] = field(default_factory=list)
    began: list[float] = field(default_factory=list)
    replica_s: float = 0.0
    cold_starts: int = 0
    longest: int = 0
    samples: list[Sample] = field(default_factory=list)


class SimulatedFleet:
    """jobs: in order of time. slots: requests that a replica computes at once. cold_start_s: from a start until it is
    ready; a function draws it. pool: ready replicas kept beside those that serve. begin: replicas ready at time 0.

    Events at one time happen in the order in which they were made.
    """

    def __init__(
        self,
        jobs: Iterable[Job],
        *,
        slots: int = 1,
        cold_start_s: float | Callable[[], float] = 0.0,
        pool: int = 0,
        begin: int = 1,
    ):
        self.jobs, self.slots, self.pool_size = iter(jobs), slots, pool
        self.cold_start = cold_start_s if callable(cold_start_s) else lambda: cold_start_s
        self.now, self.outcome = 0.0, Outcome()
        self.queue: deque[Job] = deque()
        self.serving = [Replica(ready=True) for _ in range(begin)]
        self.pool = [Replica(ready=True) for _ in range(pool)]
        self.leaving: list[Replica] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._came, self._looked = 0, 0.0
        self._next_arrival()

    @property
    def running(self) -> int:
        return sum(replica.busy for replica in (*self.serving, *self.leaving))

    def observe(self) -> Sample:
        ready = sum(replica.ready for replica in self.serving)
        rate = self._came / (self.now - self._looked) if self.now > self._looked else 0.0
        self._came, self._looked = 0, self.now
        waiting = len(self.queue)
        sample = Sample(self.now, rate, waiting, self.running, ready, len(self.serving) - ready)
        self.outcome.samples.append(sample)
        return sample

    def resize(self, count: int) -> None:
        """From the pool first, whose places are filled again; those that are starting go first, then idle ones."""
        while len(self.serving) < count:
            warm = next((replica for replica in self.pool if replica.ready), None)
            if warm is not None:
                self.pool.remove(warm)
                self.serving.append(warm)
            else:
                self.serving.append(self._start())
        while len(self.serving) > count:
            gone = min(reversed(self.serving), key=lambda replica: (replica.ready, replica.busy))
            self.serving.remove(gone)
            gone.leaving = True
            if gone.busy:
                self.leaving.append(gone)
        while len(self.pool) < self.pool_size:
            self.pool.append(self._start())
        self._dispatch()

    def sleep(self, seconds: float) -> None:
        """All that happens meanwhile."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            at, _, happen = heapq.heappop(self._events)
            self._pass(at)
            happen()
        self._pass(end)

    def finish(self) -> Outcome:
        """All that still comes, without another decision."""
        while self._events:
            self.sleep(self._events[0][0] - self.now)
        return self.outcome

    def _pass(self, at: float) -> None:
        self.outcome.replica_s += (at - self.now) * (len(self.serving) + len(self.pool) + len(self.leaving))
        self.now = at

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), happen))

    def _next_arrival(self) -> None:
        if (job := next(self.jobs, None)) is not None:
            heapq.heappush(self._events, (job.at, next(self._order), lambda: self._arrive(job)))

    def _arrive(self, job: Job) -> None:
        self._came += 1
        self.queue.append(job)
        self._dispatch()
        self.outcome.longest = max(self.outcome.longest, len(self.queue))
        self._next_arrival()

    def _start(self) -> Replica:
        replica = Replica()
        self.outcome.cold_starts += 1

        def is_ready() -> None:
            replica.ready = True
            self._dispatch()

        self._after(self.cold_start(), is_ready)
        return replica

    def _dispatch(self) -> None:
        """Requests to free slots, the replica with the fewest busy ones first."""
        while self.queue:
            free = [replica for replica in self.serving if replica.ready and replica.busy < self.slots]
            if not free:
                return
            replica, job = min(free, key=lambda each: each.busy), self.queue.popleft()
            replica.busy += 1
            self.outcome.waits.append(self.now - job.at)
            self.outcome.began.append(self.now)
            self._after(job.service_s, lambda replica=replica: self._end(replica))

    def _end(self, replica: Replica) -> None:
        replica.busy -= 1
        if replica.leaving and not replica.busy and replica in self.leaving:
            self.leaving.remove(replica)
        self._dispatch()
