"""Lab 14's measurements: traces played through a scheduler without a model, on a simulated clock.

    arrivals ──▶ Scheduler + BlockPool ──▶ plan ──▶ StepCost: seconds ──▶ Flight: records, times, what moved

A schedule depends on lengths, not on what the tokens say, so what happens to a hundred requests can be played in a
moment and comes out the same on every machine. That the engine does the same, step by step, is checked on a model.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from course.shared.measuring import one_thread
from course.shared.step_cost import H100_8B, StepCost
from minillm.bench.load import Arrival
from minillm.data import corpus
from minillm.data.tokenizer import Tokenizer
from minillm.model import ModelConfig, Transformer, load_hf
from minillm.model.generate import folder_of
from minillm.serve import LLM, BlockPool, SamplingParams, Scheduler, StepRecord
from minillm.serve import Sequence as Seq
from minillm.serve.requests.summary import Spread, spread
from minillm.serve.run.recorder import record
from minillm.serve.run.step import Step
from minillm.serve.schedule.blocks import COPY

TINY = ModelConfig(61, 32, 64, 2, 4, 2, max_seq_len=256, init_std=0.2)


@dataclass
class RequestHistory:
    """What became of a request: when it came, when each of its tokens did, how often it lost its blocks."""

    prompt: int
    arrived: float
    tokens: list[float] = field(default_factory=list)
    preemptions: int = 0
    hit: int = 0

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.arrived

    @property
    def tpot(self) -> float | None:
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1) if len(self.tokens) > 1 else None

    @property
    def worst_gap(self) -> float:
        return max((b - a for a, b in pairwise(self.tokens)), default=0.0)


@dataclass
class Flight:
    """A played trace. histories: by name, "0", "1", ... in order of arrival.

    stuck: nothing could be scheduled, or no token was sampled for long.
    """

    records: list[StepRecord] = field(default_factory=list)
    histories: dict[str, RequestHistory] = field(default_factory=dict)
    seconds: float = 0.0
    swapped: int = 0
    stuck: bool = False

    @property
    def prompts(self) -> dict[str, int]:
        """Tokens of each prompt."""
        return {name: history.prompt for name, history in self.histories.items()}

    @property
    def computed(self) -> int:
        return sum(each.tokens for each in self.records)

    @property
    def needed(self) -> int:
        """Tokens that have to be computed once: all but each answer's last, less what prefix hits saved."""
        return sum(each.prompt + len(each.tokens) - 1 - each.hit for each in self.histories.values())

    @property
    def preemptions(self) -> int:
        return sum(len(each.preempted) for each in self.records)

    def spread(self, what: str) -> Spread:
        """p50, p99 and the most of "ttft", "tpot" or "worst_gap", over requests."""
        found = [getattr(each, what) for each in self.histories.values() if each.tokens]
        return spread([value for value in found if value is not None])


@dataclass
class Player:
    """Plays arrivals through a scheduler whose model computes nothing. `step` until `over`, or `play`.

    cost: seconds of a step, from (tokens computed before, tokens of this step) of each sequence.
    """

    scheduler: Scheduler
    arrivals: Sequence[Arrival]
    cost: StepCost = H100_8B
    blocks: bool = False
    flight: Flight = field(default_factory=Flight)

    def __post_init__(self):
        order = sorted(range(len(self.arrivals)), key=lambda i: self.arrivals[i].at)
        self.upcoming = [(str(place), self.arrivals[i]) for place, i in enumerate(order)][::-1]
        self.open: dict[str, Seq] = {}
        self.clock = 0.0

    @property
    def over(self) -> bool:
        return not self.upcoming and not self.open

    def step(self) -> StepRecord | None:
        """One step; None if nothing could be computed."""
        if not self.open and self.upcoming:
            self.clock = max(self.clock, self.upcoming[-1][1].at)
        while self.upcoming and self.upcoming[-1][1].at <= self.clock:
            name, each = self.upcoming.pop()
            limit = len(each.prompt) + each.params.max_tokens
            sequence = Seq(list(each.prompt), limit, priority=each.priority, name=name)
            self.scheduler.add(sequence)
            self.open[name], self.flight.histories[name] = sequence, RequestHistory(len(each.prompt), each.at)
        plan = self.scheduler.schedule()
        moved = sum(kind != COPY for kind, _, _ in self.scheduler.pool.take_moves())  # to and from the host
        starts = [sequence.num_computed for sequence, _ in plan.batch]
        if not plan.batch:
            return None
        seconds = self.cost.step([(start, n) for start, (_, n) in zip(starts, plan.batch, strict=True)])
        seconds += self.cost.swap(moved, self.scheduler.pool.block_size)
        started, self.clock = self.clock, self.clock + seconds
        self.flight.swapped += moved
        sampled = self.scheduler.advance(plan)
        ended = tuple(sequence.name for sequence in sampled if self._token(sequence))
        played = Step(self.scheduler.step, started, plan, starts, rows=[], tables=[])
        facts = {"seconds": seconds, "ended": ended, "sampled": len(sampled)}
        found = record(self.scheduler, played, blocks=self.blocks, **facts)
        self.flight.records.append(found)
        self.flight.seconds = self.clock
        return found

    def _token(self, sequence: Seq) -> bool:
        history = self.flight.histories[sequence.name]
        sequence.tokens.append(-1 - len(history.tokens) - 4096 * int(sequence.name))  # unlike any other's
        history.tokens.append(self.clock)
        if sequence.num_tokens < sequence.limit:
            return False
        history.preemptions, history.hit = sequence.preemptions, sequence.hit_tokens
        self.scheduler.finish(sequence)
        del self.open[sequence.name]
        return True

    def play(self, most: int = 20_000) -> Flight:
        """Plays until the end, at most `most` steps.

        Sets flight.stuck if nothing can be scheduled or 200 steps sample no token.
        """
        idle = 0
        while not self.over and len(self.flight.records) < most:
            found = self.step()
            idle = 0 if found is not None and found.sampled else idle + 1
            if found is None or idle > 200:
                break
        self.flight.stuck = not self.over
        return self.flight


def play(
    arrivals: Sequence[Arrival],
    *,
    num_blocks: int,
    block_size: int = 16,
    num_host_blocks: int | None = None,
    prefix_cache: bool = True,
    cost: StepCost = H100_8B,
    blocks: bool = False,
    make: Callable[..., Scheduler] = Scheduler,
    most: int = 20_000,
    **scheduling: Any,
) -> Flight:
    """A trace through a new scheduler (`make`) on a new pool. blocks: also record every table."""
    if num_host_blocks is None:
        num_host_blocks = num_blocks if scheduling.get("preemption") == "swap" else 0
    pool = BlockPool(num_blocks, block_size, num_host_blocks=num_host_blocks, prefix_cache=prefix_cache)
    return Player(make(pool, **scheduling), arrivals, cost, blocks).play(most)


# Traces.


@cache
def text() -> tuple[int, ...]:
    """Token ids of some of the held-out corpus, under the committed tokenizer."""
    tokenizer, ids = Tokenizer.load(folder_of("draft")), []
    for document in corpus().documents("validation"):
        ids += tokenizer.encode(document.text)
        if len(ids) > 20_000:
            break
    return tuple(ids)


@cache
def draft() -> Transformer:
    """The committed draft model, float32."""
    return load_hf(folder_of("draft"), dtype=torch.float32)


@cache
def target() -> Transformer:
    """The committed target model, float32."""
    return load_hf(folder_of("target"), dtype=torch.float32)


def requests(
    lengths: Sequence[tuple[int, int]], *, every: float = 0.0, priorities: Sequence[int] = (), vocab_size: int = 61
) -> list[Arrival]:
    """Arrivals with (prompt tokens, answer tokens) each, `every` seconds apart. No two prompts begin alike."""
    draw = torch.Generator().manual_seed(len(lengths))
    return [
        Arrival(
            number * every,
            torch.randint(vocab_size, (prompt,), generator=draw).tolist(),
            SamplingParams(max_tokens=answer, ignore_eos=True),
            priorities[number] if priorities else 0,
        )
        for number, (prompt, answer) in enumerate(lengths)
    ]


def draw(shares: Sequence[float], count: int, seed: int = 14) -> list[int]:
    """Lengths 1, 2, ... drawn with these shares, which need not sum to 1."""
    return random.Random(seed).choices(range(1, len(shares) + 1), shares, k=count)


# The engine, with a model.


@one_thread()
def fly(arrivals: Sequence[Arrival], model: Transformer, **options: Any) -> tuple[LLM, list]:
    """All arrivals added at once, in order; every block table recorded. Returns the engine and the outputs."""
    llm = LLM(model, record_blocks=True, **options)
    params = [each.params for each in arrivals]
    return llm, llm.generate([each.prompt for each in arrivals], params)


def same_flight(ours: Sequence[StepRecord], theirs: Sequence[StepRecord]) -> bool:
    """Whether two recordings have the same batches, admissions and preemptions in every step, whatever the names."""

    def facts(records: Sequence[StepRecord]) -> list[tuple]:
        known: dict[str, int] = {}
        number = lambda name: known.setdefault(name, len(known))  # noqa: E731
        return [
            (
                [(number(name), *rest) for name, *rest in each.batch],
                [number(name) for name in each.preempted],
                each.sampled,
                each.used,
            )
            for each in records
        ]

    return facts(ours) == facts(theirs)
