"""Five ways in which a fleet of sound replicas breaks down: each staged, with what its metrics say, and cured.

retry storm        a burst, clients that give up and send again: the load after it is the retries'
noisy neighbour    one tenant sends ten times its share, first come, first served
memory collapse    a burst admits more sequences than there are blocks for: they preempt each other
long prompts       a prompt of 1,500 tokens in one pass; short requests wait for it
cold-start storm   all missing replicas start at once and share one disk, or one registry
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

from course.lab19_serving_fleet.stage import VOCAB, Clients, Queue, Staged, stage
from minillm.api.autoscale.controller import Controller, Scaling
from minillm.api.autoscale.policies import Reactive
from minillm.api.autoscale.simulated import Job, Outcome, Replica, SimulatedFleet
from minillm.bench.arrival_times import poisson_times
from minillm.bench.load import Arrival, arrivals
from minillm.serve.requests.summary import percentiles
from minillm.serve.schedule.fair import FairScheduler

NAMES = ("retry storm", "noisy neighbour", "memory collapse", "long prompts", "cold-start storm")
HEALTHY = "healthy"
LIMIT_S = 1.0  # to the first token, for an answer to be in time


def come(times: list[float], prompt: int, answer: int, tenant: str = "", seed: int = 0) -> list[Arrival]:
    """Requests of one kind at these times."""
    made = arrivals(
        [answer] * len(times), times=times, prompt_tokens=prompt, vocab_size=VOCAB, seed=seed, temperature=0
    )
    return [replace(each, tenant=tenant) for each in made]


def between(start: float, end: float, rate: float, seed: int = 0) -> list[float]:
    """Poisson times in a span."""
    count = int(2 * rate * (end - start) + 50)
    return [start + at for at in poisson_times(count, rate, seed) if start + at < end]


def merged(*kinds: list[Arrival]) -> list[Arrival]:
    return sorted((each for kind in kinds for each in kind), key=lambda each: each.at)


class RetryBudget:
    """Retries are at most a share of the requests, and a few more."""

    def __init__(self, share: float = 0.1, reserve: float = 5.0):
        self.share, self.reserve, self.balance = share, reserve, reserve

    def request(self) -> None:
        self.balance = min(self.reserve, self.balance + self.share)

    def may_retry(self) -> bool:
        if self.balance < 1:
            return False
        self.balance -= 1
        return True


@cache
def retry_storm(retries: int = 3, budget: float | None = None, drops_expired: bool = False, seed: int = 0) -> Staged:
    """20 requests per second where 33 can be served, but for five seconds 70. Clients wait 1 s, then send again."""
    calm, burst = between(0, 40, 20, seed), between(10, 15, 50, seed + 1)
    own = None if budget is None else RetryBudget(budget)
    asks = {} if own is None else {"may_retry": own.may_retry, "on_request": own.request}
    clients = Clients(1.0, retries, drops_expired=drops_expired, **asks)
    return stage(come(sorted(calm + burst), 32, 8, seed=seed), gate=8, clients=clients, until=40)


@cache
def neighbours(queue: Callable[[], Queue] | None = None, noisy: float = 40.0, seed: int = 0) -> Staged:
    """A quiet tenant sends 4 requests per second, a noisy one ten times as many; 33 per second can be served."""
    quiet = come(between(0, 30, 4, seed), 32, 8, "quiet", seed)
    other = come(between(0, 30, noisy, seed + 1), 32, 8, "noisy", seed + 1) if noisy else []
    return stage(merged(quiet, other), gate=8, queue=None if queue is None else queue())


@cache
def neighbours_inside(noisy: float = 20.0, even_steps: bool = True, seed: int = 0) -> Staged:
    """No queue in front: the engine's own `FairScheduler` shares places and steps. Prompts have 128 tokens, answers 16,
    and 11 requests per second can be served. The quiet tenant sends one, which fits half of the places."""
    quiet = come(between(0, 58, 1, seed), 128, 16, "quiet", seed)
    other = come(between(0, 60, noisy, seed + 1), 128, 16, "noisy", seed + 1) if noisy else []
    return stage(merged(quiet, other), until=60, scheduler=partial(FairScheduler, even_steps=even_steps))


@cache
def memory(reserve: int = 0, seed: int = 0) -> Staged:
    """40 requests within a second, 200 prompt and 200 answer tokens each; 260 blocks of 16 tokens hold ten of them.

    reserve: blocks that admission keeps free for each sequence that runs.
    """
    times = between(0, 1, 40, seed) + between(1, 20, 0.5, seed + 1)
    return stage(come(times, 200, 200, seed=seed), num_blocks=261, max_num_seqs=40, reserve=reserve, prefix_cache=False)


@cache
def long_prompts(chunk: int | None = None, budget: int = 2048, seed: int = 0) -> Staged:
    """10 short requests per second, and every two seconds one with a prompt of 1,500 tokens."""
    short = come(between(0, 30, 10, seed), 16, 8, "short", seed)
    long = come(between(0, 30, 0.5, seed + 1), 1500, 8, "long", seed + 1)
    return stage(merged(short, long), token_budget=budget, chunk=chunk)


@cache
def cold_start_storm(shared: bool = True, pool: int = 0, at_once: int | None = None, seed: int = 0) -> Outcome:
    """Load rises from 2 to 12 requests per second; a replica serves 1. A start takes 30 s alone; several share a disk.

    at_once: start no more than so many together. simulated.
    """
    rng = random.Random(seed)
    times = between(0, 120, 1.4, seed) + between(120, 900, 8, seed + 1)
    jobs = [Job(at, rng.expovariate(0.25)) for at in times]
    kind = SharedDisk if shared else SimulatedFleet
    fleet = kind(jobs, slots=4, cold_start_s=30.0, pool=pool, begin=2)
    policy = Reactive(3.0) if at_once is None else _Staggered(Reactive(3.0), at_once)
    Controller(policy, Scaling(2, 16, 15.0, 120.0)).run(fleet, 900)
    return fleet.finish()


class SharedDisk(SimulatedFleet):
    """Replicas that start at the same time share what a start takes: n of them take n times as long."""

    def __init__(self, *jobs, **options):
        self.left: dict[Replica, float] = {}
        self.shared_until, self.turn = 0.0, 0
        super().__init__(*jobs, **options)

    def _start(self) -> Replica:
        replica, self.outcome.cold_starts = Replica(), self.outcome.cold_starts + 1
        self._share()
        self.left[replica] = self.cold_start()
        self._next_end()
        return replica

    def _share(self) -> None:
        """The work of those that are starting goes on until now."""
        done = (self.now - self.shared_until) / max(1, len(self.left))
        self.left = {replica: work - done for replica, work in self.left.items() if not replica.leaving}
        self.shared_until = self.now

    def _next_end(self) -> None:
        self.turn += 1
        if self.left:
            replica, work = min(self.left.items(), key=lambda pair: pair[1])
            self._after(max(0.0, work) * len(self.left), lambda turn=self.turn: self._is_ready(replica, turn))

    def _is_ready(self, replica: Replica, turn: int) -> None:
        if turn != self.turn:
            return  # another began meanwhile, which moved this end
        self._share()
        self.left.pop(replica, None)
        replica.ready = True
        self._next_end()
        self._dispatch()


@dataclass(frozen=True)
class _Staggered:
    """Starts at most so many at once."""

    policy: Reactive
    at_once: int

    def desired(self, history) -> int:
        now = history[-1]
        return min(self.policy.desired(history), now.ready + max(now.starting, self.at_once))


def ttft(staged: Staged, share: float, tenant: str | None = None) -> float:
    """Percentile of the time to the first token; a request that was given up counts as infinitely late."""
    mine = [s for s in staged.stories if tenant is None or s.arrival.tenant == tenant]
    return percentiles([float("inf") if s.ttft is None else s.ttft for s in mine], [share])[0]


def in_time(staged: Staged, start: float, end: float) -> float:
    """Share of the requests that were due in a span and whose clients got an answer."""
    mine = [s for s in staged.stories if start <= s.arrival.at < end]
    return sum(s.ended is not None for s in mine) / len(mine)
