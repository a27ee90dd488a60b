"""A real engine behind a queue and its clients, on a simulated clock: what happens is decided, not how long it takes.

    clients ── due ──▶ queue of the server ── at most `gate` inside ──▶ LLM: scheduler, blocks, forward passes
       ▲  give up after patience_s, try again ──┘                        each pass: 10 ms + 0.5 ms per token

Scheduler, blocks, preemption and prefix cache are the engine's own. The model says the same token every time, since no
schedule depends on what tokens say, and the seconds of a pass are computed: a collapse looks the same everywhere.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from course.shared.measuring import one_thread
from minillm.bench.load import EARLY_S, Arrival, VirtualClock
from minillm.model import ModelConfig, Transformer
from minillm.serve import LLM
from minillm.serve.requests.output import Output

PASS_S, TOKEN_S = 0.010, 0.0005  # of the simulated clock
VOCAB = 61


class SameToken(Transformer):
    """A model that computes nothing."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None, *, rows: Tensor, **_) -> Tensor:
        return tokens.new_zeros((1, len(rows), self.config.vocab_size), dtype=torch.float32)


@cache
def model() -> Transformer:
    return SameToken(ModelConfig(VOCAB, 16, 32, 1, 2, 1, max_seq_len=2048), seed=19)


def pace(tokens: int) -> float:
    """Simulated seconds of a pass."""
    return PASS_S + TOKEN_S * tokens


class Queue(Protocol):
    """What waits in front of the engine."""

    def push(self, tenant: str, request: Any) -> None: ...

    def pop(self) -> tuple[str, Any] | None: ...

    def charge(self, tenant: str, tokens: float) -> None: ...


class FirstComeFirstServed:
    def __init__(self):
        self.waiting: deque = deque()

    def push(self, tenant: str, request: Any) -> None:
        self.waiting.append((tenant, request))

    def pop(self) -> tuple[str, Any] | None:
        return self.waiting.popleft() if self.waiting else None

    def charge(self, tenant: str, tokens: float) -> None:
        """Nobody pays here."""


@dataclass
class Story:
    """A client's request. Times in seconds from the start; ended, first: of the answer that the client waited for, None
    if it gave up. attempts: how often it was sent."""

    arrival: Arrival
    attempts: int = 0
    scheduled: float | None = None
    first: float | None = None
    ended: float | None = None

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.arrival.at

    @property
    def parts(self) -> tuple[float, float, float]:
        """Seconds in the queue, in prefill, in decoding."""
        return self.scheduled - self.arrival.at, self.first - self.scheduled, self.ended - self.first


@dataclass
class Staged:
    """waiting: (time, requests that wait) after each step. computed, needed: tokens put through the model, and those
    that had to be. wasted: answers for which nobody waited any more. blocks: the largest share of the pool in use."""

    stories: list[Story]
    waiting: list[tuple[float, int]] = field(default_factory=list)
    inside: list[tuple[float, int]] = field(default_factory=list)
    computed: int = 0
    needed: int = 0
    preemptions: int = 0
    wasted: int = 0
    refused: int = 0
    blocks: float = 0.0
    seconds: float = 0.0

    @property
    def answered(self) -> list[Story]:
        return [story for story in self.stories if story.ended is not None]

    @property
    def attempts(self) -> int:
        return sum(story.attempts for story in self.stories)


@dataclass(frozen=True)
class Clients:
    """patience_s: after which a client gives up, None = never. retries: how often it sends again then. may_retry: asked
    before each retry, see `RetryBudget`. The server goes on computing what was given up, unless it drops_expired: what
    has waited longer than a client does is not begun."""

    patience_s: float | None = None
    retries: int = 0
    may_retry: Callable[[], bool] = lambda: True
    on_request: Callable[[], None] = lambda: None
    drops_expired: bool = False


@one_thread()
@torch.no_grad()
def stage(
    arrivals: Sequence[Arrival],
    *,
    gate: int | None = None,
    queue: Queue | None = None,
    clients: Clients | None = None,
    until: float | None = None,
    **engine,
) -> Staged:
    """Plays the arrivals to the end, or to a time. gate: requests inside the engine at most; engine: options of LLM."""
    clock = VirtualClock(pace)
    llm = LLM(model(), clock=clock, **{"max_num_seqs": 8, "token_budget": 512, "num_blocks": 4096} | engine)
    with clock.of(model()):
        return _Play(llm, clock, arrivals, gate, queue or FirstComeFirstServed(), clients or Clients()).run(until)


@dataclass(eq=False)
class _Attempt:
    story: Story
    sent: float
    given_up: bool = False
    over: bool = False
    request_id: str = ""


class _Play:
    def __init__(
        self, llm: LLM, clock: VirtualClock, arrivals: Sequence[Arrival], gate, queue: Queue, clients: Clients
    ):
        self.llm, self.clock, self.queue, self.clients = llm, clock, queue, clients
        self.gate = gate or len(arrivals) + 10**9
        self.found = Staged([Story(each) for each in arrivals])
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order, self.open, self.waiting = itertools.count(), {}, 0
        for story in self.found.stories:
            self.at(story.arrival.at, lambda story=story: self.send(story))

    def at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, next(self.order), happen))

    def run(self, until: float | None) -> Staged:
        end = float("inf") if until is None else until
        while (self.events or self.open or self.waiting) and self.clock() < end:
            while self.events and self.events[0][0] <= self.clock() + EARLY_S:
                heapq.heappop(self.events)[2]()
            self.admit()
            for output in self.llm.step() if self.open else ():
                self.end(output)
            self.found.waiting.append((self.clock(), self.waiting + self.llm.scheduler.num_waiting))
            self.found.inside.append((self.clock(), self.waiting + len(self.open)))
            self.found.blocks = max(self.found.blocks, self.llm.pool.used / self.llm.pool.total)
            if not self.open and self.events:
                self.clock.sleep(self.events[0][0] - self.clock())
        self.found.seconds = self.clock()
        return self.found

    def send(self, story: Story) -> None:
        attempt = _Attempt(story, self.clock())
        story.attempts += 1
        if story.attempts == 1:
            self.clients.on_request()
        self.queue.push(story.arrival.tenant, attempt)
        self.waiting += 1
        if self.clients.patience_s is not None:
            self.at(self.clock() + self.clients.patience_s, lambda: self.give_up(attempt))

    def give_up(self, attempt: _Attempt) -> None:
        if attempt.over:
            return
        attempt.given_up = True
        if attempt.story.attempts <= self.clients.retries and self.clients.may_retry():
            self.send(attempt.story)

    def admit(self) -> None:
        while len(self.open) < self.gate and self.waiting:
            tenant, attempt = self.queue.pop()
            self.waiting -= 1
            if self.clients.drops_expired and attempt.given_up:
                attempt.over = True
                self.found.refused += 1
                continue
            arrival = attempt.story.arrival
            whose = {"priority": arrival.priority, "salt": arrival.tenant or None}
            attempt.request_id = self.llm.add(arrival.prompt, arrival.params, **whose)
            self.open[attempt.request_id] = attempt
            self.queue.charge(tenant, len(arrival.prompt))

    def end(self, output: Output) -> None:
        attempt, answered = self.open.pop(output.request_id), len(output.answers[0].tokens)
        attempt.over, story, found = True, attempt.story, self.found
        self.queue.charge(story.arrival.tenant, answered)
        found.computed += output.computed
        found.needed += len(output.prompt) + answered - 1 - output.hit
        found.preemptions += output.preemptions
        if attempt.given_up or story.ended is not None:
            found.wasted += 1
            return
        story.scheduled, story.first, story.ended = (
            output.timing.scheduled,
            output.timing.first_token,
            output.timing.ended,
        )
