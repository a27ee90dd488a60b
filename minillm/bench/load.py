"""A day of requests in miniature: when each arrives, with which prompt, for how many tokens.

arrivals = skewed(64, prompt_tokens=48, max_tokens=96, rate=20, vocab_size=4096)
for engine in (LLM(model), other_engine): print(summary(replay(engine, arrivals)))

The same arrivals go through any engine. With a `VirtualClock` seconds are computed instead of measured, so a comparison
of schedules comes out the same on every machine.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from math import exp
from statistics import NormalDist

from minillm.serve.requests.output import Output
from minillm.serve.requests.params import SamplingParams

EARLY_S = 1e-9  # so much before its time something is on time: clocks round


@dataclass(frozen=True)
class Arrival:
    """A request to come. at: seconds after the start. tenant: who sends it, where that matters."""

    at: float
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    tenant: str = ""


def uniform(count: int, *, max_tokens: int, **options) -> list[Arrival]:
    """Every answer has max_tokens tokens. options: see `arrivals`."""
    return arrivals([max_tokens] * count, **options)


def skewed(count: int, *, max_tokens: int, sigma: float = 1.0, **options) -> list[Arrival]:
    """Few long answers among many short ones, the longest of max_tokens. options: see `arrivals`.

    Lengths are the (i + ½) / count quantiles of a log-normal distribution, in random order: with sigma 1 and 64
    requests the longest is 11 times the median. No tail is left to luck, so that small traces are skewed too.
    """
    if not sigma >= 0:
        raise ValueError(f"sigma {sigma} must be at least 0 (0 makes all answers equally long).")
    relative = [exp(sigma * NormalDist().inv_cdf((i + 0.5) / count)) for i in range(count)]
    lengths = [max(1, round(max_tokens * each / relative[-1])) for each in relative]
    random.Random(options.get("seed", 0)).shuffle(lengths)
    return arrivals(lengths, **options)


def arrivals(
    lengths: Sequence[int],
    *,
    prompt_tokens: int | tuple[int, int],
    rate: float | None = None,
    times: Sequence[float] | None = None,
    shared_prefix: int = 0,
    groups: int = 1,
    vocab_size: int | None = None,
    text: Sequence[int] | None = None,
    seed: int = 0,
    **sampling,
) -> list[Arrival]:
    """One request for each answer length; it ends there and nowhere else (end of text is ignored).

    prompt_tokens: of every prompt, or (least, most). shared_prefix: so many of them, the first, are the same in all
    prompts of a group; each request falls into one of `groups` by chance. rate: requests per second, Poisson; None =
    all at once, or at the given `times` (seconds from the start, see `arrival_times.py`). Prompts are random ids below
    vocab_size, or cut from `text` (token ids). sampling: what else `SamplingParams` takes; request i draws with seed i.
    """
    least, most = prompt_tokens if isinstance(prompt_tokens, tuple) else (prompt_tokens, prompt_tokens)
    if not 1 <= least <= most or not 0 <= shared_prefix <= least:
        raise ValueError(
            f"prompt_tokens {prompt_tokens} and shared_prefix {shared_prefix}: a prompt has at least 1 token, and at "
            "least as many as are shared."
        )
    if rate is not None and not rate > 0:
        raise ValueError(f"rate {rate} must be above 0 requests per second, or None for all at once.")
    if times is not None and (rate is not None or len(times) != len(lengths)):
        raise ValueError(f"give a rate or {len(lengths)} times, one for each request; not both, and not {len(times)}.")
    if groups < 1:
        raise ValueError(f"groups {groups} must be at least 1.")
    if (vocab_size is None) == (text is None):
        raise ValueError("give either vocab_size (random prompts) or text (token ids to cut prompts from).")
    if text is not None and len(text) < most:
        raise ValueError(f"text of {len(text)} tokens is too short for prompts of {most}: give a longer one.")
    rng = random.Random(seed)

    def cut(length: int) -> list[int]:
        if text is None:
            return [rng.randrange(vocab_size) for _ in range(length)]
        start = rng.randrange(len(text) - length + 1)
        return [int(token) for token in text[start : start + length]]

    prefixes = [cut(shared_prefix) for _ in range(groups)]

    def prefix() -> list[int]:
        return prefixes[rng.randrange(groups) if groups > 1 else 0]

    if times is None:
        times = accumulate(rng.expovariate(rate) if rate is not None else 0.0 for _ in lengths)
    return [
        Arrival(at, prefix() + cut(rng.randint(least, most) - shared_prefix), _params(length, seed=number, **sampling))
        for number, (at, length) in enumerate(zip(times, lengths, strict=True))
    ]


def _params(max_tokens: int, **sampling) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **sampling})


class VirtualClock:
    """Time that stands still but for `sleep` and, inside `of(model)`, forward passes: `cost(tokens)` seconds each.

    tokens: those put through the model, padding among them. `LLM(model, clock=clock)`, likewise the other engines.
    """

    def __init__(self, cost: Callable[[int], float] = lambda tokens: 0.01 + 0.0005 * tokens):
        self.cost, self.now = cost, 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(0.0, seconds)

    @contextmanager
    def of(self, model, cost: Callable[[int], float] | None = None) -> Iterator["VirtualClock"]:
        """cost: of this model's passes, if not the clock's (a small draft beside its target)."""
        price = cost or self.cost
        hook = model.register_forward_hook(lambda _, inputs, __: self.sleep(price(inputs[0].numel())))
        try:
            yield self
        finally:
            hook.remove()


def replay(engine, arrivals: Sequence[Arrival], *, clock: Callable[[], float] | None = None) -> list[Output]:
    """Adds each request when its time has come, and steps until all have ended: outputs in the order of `arrivals`.

    clock: the engine's own by default; while there is nothing to compute, its `sleep` (else `time.sleep`) is called. A
    request that comes while a step runs is added after it, and its waiting counts from when it came.
    """
    clock = clock or engine.clock
    sleep, start = getattr(clock, "sleep", time.sleep), clock()
    order = sorted(range(len(arrivals)), key=lambda index: arrivals[index].at)
    coming, open_, outputs = list(reversed(order)), {}, {}
    try:
        while coming or open_:
            while coming and arrivals[coming[-1]].at <= clock() - start + EARLY_S:
                index = coming.pop()
                each = arrivals[index]
                open_[engine.add(each.prompt, each.params, priority=each.priority)] = index
            for output in engine.step():
                if (index := open_.pop(output.request_id, None)) is not None:  # not somebody else's
                    outputs[index] = replace(output, timing=replace(output.timing, arrived=start + arrivals[index].at))
            wakes = getattr(engine, "starts_at", None) if open_ else float("inf")  # None: it has work to do now
            if wakes is not None and (coming or open_):
                due = min([wakes, *(start + arrivals[index].at for index in coming[-1:])])
                sleep(max(0.0, due - clock()))
    finally:
        for request_id in open_:
            engine.cancel(request_id)
    return [outputs[index] for index in range(len(arrivals))]
