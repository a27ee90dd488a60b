"""Lab 14: four loads of one model. Chats, documents and offline work, with lengths as drawn and with their means.

Played through a scheduler on the simulated clock of an 8B model on one H100, in a pool of 128,000 tokens.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from course.lab14_continuous_batching.experiments import Flight, play, requests
from minillm.bench.load import Arrival

Lengths = list[tuple[int, int]]  # tokens of each prompt and of its answer
COUNT, BLOCKS, BUDGET = 60, 8000, 2048


@dataclass(frozen=True)
class Load:
    """Median tokens of prompts and answers, the spread of both (of the logarithm), requests per second (None: all are
    there at the start) and how many sequences may run."""

    prompt: int
    answer: int
    sigma: float
    rate: float | None
    at_once: int = 256


LOADS = {
    "chat": Load(300, 100, 1.0, 20),
    "documents": Load(4000, 60, 1.0, 3),
    "offline, 16 at once": Load(500, 150, 0.7, None, 16),
    "offline, all 60 at once": Load(500, 150, 0.7, None),
}


def drawn(load: Load, seed: int = 14) -> Lengths:
    """Lognormal lengths, as those of real traffic are skewed; at most eight times the median."""
    draw = random.Random(seed)

    def length(median: int) -> int:
        return max(1, min(8 * median, round(median * draw.lognormvariate(0.0, load.sigma))))

    return [(length(load.prompt), length(load.answer)) for _ in range(COUNT)]


def means(lengths: Lengths) -> Lengths:
    """As many requests, all of the mean lengths, rounded: the same tokens in all but for that."""
    prompt, answer = (round(sum(each) / len(lengths)) for each in zip(*lengths, strict=True))
    return [(prompt, answer)] * len(lengths)


def played(load: Load, lengths: Lengths) -> Flight:
    """These requests at random times (the same for all lengths)."""
    draw, now, times = random.Random(1), 0.0, []
    for _ in lengths:
        now += draw.expovariate(load.rate) if load.rate else 0.0
        times.append(now)
    options = {"token_budget": BUDGET, "max_num_seqs": load.at_once, "prefix_cache": False}
    return play(_at(times, requests(lengths, vocab_size=1000)), num_blocks=BLOCKS, **options)


def _at(times: Sequence[float], arrivals: Sequence[Arrival]) -> list[Arrival]:
    return [Arrival(at, each.prompt, each.params) for at, each in zip(times, arrivals, strict=True)]
