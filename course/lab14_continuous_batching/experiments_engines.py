"""Lab 14's comparisons: static, timer and continuous batching; chunk sizes; policies; recompute and swap.

Engines run a real model on a simulated clock (one H100 and an 8B model at their peaks), so that counts and
times are the same on every machine; what only a schedule decides is played without a model.
"""

import random
import time
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from course.lab14_continuous_batching import formulas as predict
from course.lab14_continuous_batching.baselines import StaticBatches, TimerBatches
from course.lab14_continuous_batching.experiments import Flight, Player, draft, play, requests, target, text
from course.shared.faults import planted
from course.shared.faults.serving import PROMPTS_FIRST
from course.shared.measuring import one_thread
from course.shared.step_cost import H100_8B
from minillm.bench.load import Arrival, VirtualClock, arrivals, replay, skewed, uniform
from minillm.model import Transformer
from minillm.serve import LLM, POLICIES, BlockPool, SamplingParams, Scheduler
from minillm.serve.requests.summary import summary

COUNT, MAX_NUM_SEQS, PROMPT = 32, 8, 12
TRACES = {
    "uniform": lambda **o: uniform(COUNT, max_tokens=16, prompt_tokens=PROMPT, **o),
    "skewed": lambda **o: skewed(COUNT, max_tokens=64, prompt_tokens=PROMPT, **o),
}
ENGINES = {
    "static": lambda model, clock: StaticBatches(model, MAX_NUM_SEQS, clock=clock),
    "timer": lambda model, clock: TimerBatches(model, MAX_NUM_SEQS, 0.05, clock=clock),
    "continuous": lambda model, clock: LLM(
        model, clock=clock, max_num_seqs=MAX_NUM_SEQS, token_budget=MAX_NUM_SEQS * PROMPT + MAX_NUM_SEQS, num_blocks=256
    ),
}


def pace(tokens: int) -> float:
    """Seconds of a pass of so many tokens with short contexts, on the computed clock."""
    return H100_8B.step([(0, tokens)])


def trace_arrivals(trace: str, rate: float | None = None) -> list[Arrival]:
    """32 requests with uniform or skewed answers; prompts are cut from Python's standard library."""
    return TRACES[trace](rate=rate, text=text(), seed=14)


def answers(trace: Sequence[Arrival]) -> list[int]:
    return [each.params.max_tokens for each in trace]


@one_thread()
def compare(rate: float | None = None) -> dict[tuple[str, str], dict[str, Any]]:
    """(trace, engine) -> passes, ids of all answers, summary on the computed clock, seconds that really passed."""
    found = {}
    for trace in TRACES:
        for engine, build in ENGINES.items():
            clock = VirtualClock(pace)
            started = time.perf_counter()
            with clock.of(draft()):
                llm = build(draft(), clock)
                outputs = replay(llm, trace_arrivals(trace, rate))
            found[trace, engine] = {
                "passes": len(llm.records),
                "ids": [output.answers[0].ids for output in outputs],
                "summary": summary(outputs),
                "wall_s": time.perf_counter() - started,
                "wasted": getattr(llm, "waste", 0),
            }
    return found


# A long prompt among decoding sequences.

LONG, DECODING, HELD = 8192, 16, 512
CHUNKS = (128, 256, 512, 1024, 2048, 4096, None)


@cache
def stall(chunk: int | None, mixed: bool = True) -> dict[str, float]:
    """16 sequences decode when a prompt of 8,192 tokens comes: their worst gap, and its time to first token.

    mixed: False for a scheduler whose steps compute prompts or decode, and never both.
    """
    each = requests([(HELD, 160)] * DECODING + [(LONG, 4)], vocab_size=1000)
    after = H100_8B.step([(0, HELD)]) * DECODING + 40 * H100_8B.step([(HELD, 1)] * DECODING)
    each[-1] = Arrival(after, each[-1].prompt, each[-1].params)
    options = {"token_budget": (chunk or LONG) + DECODING, "chunk": chunk, "max_num_seqs": 32}
    with planted(() if mixed else (PROMPTS_FIRST,)):
        flight = play(each, num_blocks=2000, **options)
    *others, long = flight.histories.values()
    gaps = [b - a for history in others for a, b in pairwise(history.tokens) if b > long.arrived]
    held = [HELD + sum(at < long.arrived for at in history.tokens) for history in others]
    return {
        "gap": max(gaps),
        "predicted": predict.worst_gap(H100_8B, LONG, chunk, [n + LONG // (chunk or LONG) for n in held]),
        "ttft": long.ttft,
        "predicted_ttft": predict.chunked_prefill(H100_8B, LONG, chunk, held),
    }


def stalls(chunks: Sequence[int | None]) -> list[dict[str, Any]]:
    return [{"chunk": chunk or LONG, **stall(chunk)} for chunk in chunks]


def unmixed(chunk: int) -> dict[str, float]:
    """The same with phases that never mix: chunks do not help."""
    return stall(chunk, mixed=False)


# Policies, and what becomes of the victims.

CROWD_SIZE = 120  # requests
CROWD = {"num_blocks": 400, "token_budget": 1024, "max_num_seqs": 48, "chunk": 512, "patience": 32}


@cache
def crowded() -> tuple[Arrival, ...]:
    """120 requests, 60 a second, every fourth less important: short prompts whose answers outgrow the pool."""
    rng = random.Random(1)
    lengths = [rng.randint(50, 400) for _ in range(CROWD_SIZE)]
    each = arrivals(lengths, prompt_tokens=(30, 300), rate=60, vocab_size=1000, seed=3)
    return tuple(Arrival(a.at, a.prompt, a.params, int(i % 4 == 3)) for i, a in enumerate(each))


@cache
def crowd(
    policy: str = "latest", preemption: str = "recompute", reserve: int = 0, prefix_cache: bool = False
) -> Flight:
    """The crowded trace under one policy."""
    options = {"policy": policy, "preemption": preemption, "reserve": reserve, "prefix_cache": prefix_cache}
    return play(crowded(), **options, **CROWD)


def crowds() -> dict[tuple[str, str], Flight]:
    return {(policy, how): crowd(policy, how) for how in ("recompute", "swap") for policy in POLICIES}


def given_up(flight: Flight) -> list[int]:
    """Tokens that each victim had computed when it was preempted, from the records alone."""
    computed, found = {}, []
    for each in flight.records:
        found += [computed[name] for name in each.preempted]
        for name, first, tokens in each.batch:
            computed[name] = first + tokens
    return found


def just_used(flight: Flight) -> float:
    """Share of the victims that had computed tokens in the very step before."""
    pairs = pairwise(flight.records)
    fresh = [name in {entry[0] for entry in before.batch} for before, each in pairs for name in each.preempted]
    return sum(fresh) / len(fresh) if fresh else 0.0


# This machine.


@one_thread()
def step_seconds(model: Transformer, widths: Sequence[int] = (1, 4, 16), tokens: int = 12) -> dict[int, float]:
    """Median seconds of a decode step with so many sequences in it, on this machine."""
    found = {}
    for width in widths:
        llm = LLM(model, max_num_seqs=max(widths), token_budget=512)
        wide = arrivals([tokens] * width, prompt_tokens=16, text=text())
        llm.generate([each.prompt for each in wide], [each.params for each in wide])
        steps = sorted(each.seconds for each in llm.records if each.tokens == width)
        found[width] = steps[len(steps) // 2]
    return found


@one_thread()
def measured_stall(chunk: int | None, prompt: int = 440, decoding: int = 4, repeats: int = 3) -> dict[str, float]:
    """Seconds by the wall clock on this machine, the target model: 4 sequences decode when a prompt of 440 tokens
    arrives. Longest pause of the four before and after, and the prompt's time to first token; the best of `repeats`."""
    ids, found = list(text()), []
    for _ in range(repeats):
        budget = (chunk or prompt) + decoding
        llm = LLM(target(), prefix_cache=False, chunk=chunk, token_budget=budget, max_num_seqs=2 * decoding)
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        for place in range(decoding):
            llm.add(ids[1000 * place :][:16], params)
        for _ in range(10):
            llm.step()
        arrived = time.perf_counter()
        name = llm.add(ids[8000 : 8000 + prompt], SamplingParams(max_tokens=2, ignore_eos=True))
        while llm.unfinished:
            llm.step()
        ends = [each.started + each.seconds for each in llm.records]
        first = next(
            place for place, each in enumerate(llm.records)
            for who, start, tokens in each.batch if who.startswith(name) and start + tokens == prompt
        )  # fmt: skip
        gaps = [b - a for a, b in pairwise(ends)]
        found.append({"before": sorted(gaps[2:8])[3], "gap": max(gaps[8 : first + 1]), "ttft": ends[first] - arrived})
    return {key: min(each[key] for each in found) for key in found[0]}


def bookkeeping(widths: Sequence[int] = (16, 128), steps: int = 30) -> dict[int, float]:
    """Seconds of schedule and advance per scheduled sequence, with so many decoding, on this machine."""
    found = {}
    for width in widths:
        pool = BlockPool(width * 8, 16)
        scheduler = Scheduler(pool, token_budget=32 * width, max_num_seqs=width)
        player = Player(scheduler, requests([(16, steps + 10)] * width))
        while not all(each.tokens for each in player.flight.histories.values()) or not player.flight.histories:
            player.step()
        times = []
        for _ in range(steps):
            started = time.perf_counter()
            plan = scheduler.schedule()
            for sequence in scheduler.advance(plan):
                sequence.tokens.append(0)
            times.append((time.perf_counter() - started) / width)
        found[width] = sorted(times)[steps // 2]
    return found
