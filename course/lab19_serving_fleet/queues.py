"""Queues in simulated time, without an engine: the knee, bounded queues, routing, prefixes on a ring.

requests ──▶ rule ──▶ one queue for each replica, first come, first served
"""

import heapq
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

from minillm.api.autoscale.controller import Controller, Policy, Scaling
from minillm.api.autoscale.simulated import Job, Outcome, SimulatedFleet
from minillm.serve.requests.summary import percentiles

Choose = Callable[[Sequence[int], random.Random], int]


def poisson(rate: float, seed: int):
    rng, at = random.Random(seed), 0.0
    while True:
        at += rng.expovariate(rate)
        yield at


def service(cv: float, seed: int = 0) -> Callable[[], float]:
    """Draws services of mean 1 s and this spread."""
    rng = random.Random(seed)
    return (lambda: 1.0) if cv == 0 else (lambda: rng.gammavariate(cv**-2, cv**2))


@cache
def mg1(load: float, cv: float, count: int = 30_000, seed: int = 19) -> tuple[float, float]:
    """(mean, p99) of the wait at one server, by the event simulator, in mean services."""
    draw, times = service(cv, seed + 1), poisson(load, seed)
    waits = SimulatedFleet(Job(next(times), draw()) for _ in range(count)).finish().waits
    return fmean(waits), percentiles(waits, [0.99])[0]


@cache
def bounded(load: float, places: int | None, count: int = 20_000, seed: int = 5) -> tuple[float, float]:
    """(p99 of the wait of those that are let in, share refused) with at most so many waiting; services exponential."""
    draw, times = service(1.0, seed + 1), poisson(load, seed)
    starts: list[float] = []  # of those that were let in, from the front of the queue
    free, waits, refused = 0.0, [], 0
    for _ in range(count):
        now = next(times)
        while starts and starts[0] <= now:
            heapq.heappop(starts)
        if places is not None and len(starts) >= places:
            refused += 1
            continue
        start = max(now, free)
        free = start + draw()
        waits.append(start - now)
        heapq.heappush(starts, start)
    return percentiles(waits, [0.99])[0], refused / count


@dataclass
class _Server:
    free: float = 0.0
    ends: list[float] = None

    def __post_init__(self):
        self.ends = []

    def outstanding(self, now: float) -> int:
        while self.ends and self.ends[0] <= now:
            heapq.heappop(self.ends)
        return len(self.ends)

    def serve(self, now: float, seconds: float) -> float:
        """Takes a request; returns its wait."""
        start = max(now, self.free)
        self.free = start + seconds
        heapq.heappush(self.ends, self.free)
        return start - now


def at_random(outstanding: Sequence[int], rng: random.Random) -> int:
    return rng.randrange(len(outstanding))


def least(outstanding: Sequence[int], rng: random.Random) -> int:
    fewest = min(outstanding)
    return rng.choice([index for index, count in enumerate(outstanding) if count == fewest])


def round_robin() -> Choose:
    turns = iter(range(10**9))
    return lambda outstanding, rng: next(turns) % len(outstanding)


def routed(choose: Choose, load: float = 0.9, replicas: int = 10, stale_s: float = 0.0, count: int = 20_000) -> float:
    """p99 of the wait, services exponential of mean 1 s. stale_s: the rule sees counts that are up to so old."""
    rng, draw, times = random.Random(3), service(1.0, 4), poisson(load * replicas, 5)
    servers, waits, seen, seen_at = [_Server() for _ in range(replicas)], [], None, -math.inf
    for _ in range(count):
        now = next(times)
        if seen is None or now - seen_at >= stale_s:
            seen, seen_at = [server.outstanding(now) for server in servers], now
        chosen = servers[choose(seen, rng)]
        chosen.outstanding(now)
        waits.append(chosen.serve(now, draw()))
    return percentiles(waits, [0.99])[0]


def central(load: float, replicas: int = 10, count: int = 20_000) -> float:
    """p99 of the wait when requests wait in one queue before all replicas."""
    draw, times = service(1.0, 4), poisson(load * replicas, 5)
    outcome = SimulatedFleet((Job(next(times), draw()) for _ in range(count)), begin=replicas).finish()
    return percentiles(outcome.waits, [0.99])[0]


@dataclass(frozen=True)
class Affinity:
    hits: float
    p99_s: float
    busiest: float  # requests of the busiest replica over the mean


def prefixes(
    choose: Callable[[str, dict[str, int]], str],
    replicas: int = 8,
    groups: int = 64,
    kept: int = 12,
    count: int = 12_000,
) -> Affinity:
    """Requests with shared prefixes of Zipf popularity: 0.3 s if the replica has the prefix, 1 s if it computes it.

    kept: prefixes that a replica's cache holds, the least recently used goes. choose: (prefix, open requests by
    replica) -> replica.
    """
    rng, times = random.Random(8), poisson(0.75 * replicas / 0.5, 9)
    names = [f"replica-{n}" for n in range(replicas)]
    servers, caches = {name: _Server() for name in names}, {name: OrderedDict() for name in names}
    weights = [1 / (1 + n) for n in range(groups)]
    hits, waits, sent = 0, [], dict.fromkeys(names, 0)
    for group in rng.choices(range(groups), weights, k=count):
        now = next(times)
        name = choose(f"prefix {group}", {each: servers[each].outstanding(now) for each in names})
        cached = caches[name]
        hit = group in cached
        cached[group] = True
        cached.move_to_end(group)
        if len(cached) > kept:
            cached.popitem(last=False)
        hits += hit
        sent[name] += 1
        seconds = rng.uniform(0.8, 1.2) * (0.3 if hit else 1.0)
        waits.append(servers[name].serve(now, seconds) + seconds)
    return Affinity(hits / count, percentiles(waits, [0.99])[0], max(sent.values()) / (count / replicas))


def ramp_jobs(seed: int = 2) -> list[Job]:
    """Two requests per second, rising over ten minutes to ten, then steady; four slots of 4 s are one per second."""
    rng, at, jobs = random.Random(seed), 0.0, []
    while at < 1800:
        at += rng.expovariate(10)
        rate = 2 + 8 * min(1.0, max(0.0, (at - 300) / 600))
        if rng.random() * 10 < rate:
            jobs.append(Job(at, rng.expovariate(0.25)))
    return jobs


def ramp(policy: Policy, cold_start_s: float = 120.0, pool: int = 0) -> Outcome:
    """The same half hour under any policy; a replica serves one request per second."""
    fleet = SimulatedFleet(ramp_jobs(), slots=4, cold_start_s=cold_start_s, pool=pool, begin=4)
    Controller(policy, Scaling(3, 20, 15.0, 300.0)).run(fleet, 1800)
    return fleet.finish()


def step_up(cold_start_s: float, arrivals: float, services: float) -> int:
    """The longest queue when the second replica, ordered at once, starts while too many requests come."""
    jobs = [Job((n + 1) / arrivals, 1 / services) for n in range(int(arrivals * (cold_start_s + 60)))]
    fleet = SimulatedFleet(jobs, cold_start_s=cold_start_s)
    fleet.resize(math.ceil(arrivals / services) + 1)
    return fleet.finish().longest


def of_policy(decide: Callable[..., int], **settings: Any) -> Policy:
    """A learner's function as a policy of the controller. Until ten samples have come it sees only the last one: a line
    through two of them follows their noise."""

    class Decides:
        def desired(self, history) -> int:
            recent = [(each.at, each.rate) for each in history[-20 if len(history) >= 10 else -1 :]]
            return decide(recent, history[-1].waiting, **settings)

    return Decides()
