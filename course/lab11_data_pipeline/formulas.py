"""Lab 11's closed forms: units of loss, padding, samplers, and how loading hides behind compute.

Symbols: D samples (or documents), N ranks, B documents per batch.
"""

import math
from collections.abc import Iterable, Sequence

from minillm.predict.model import bits_per_byte, entropy

__all__ = [
    "bits_per_byte",
    "entropy",
    "packing_waste",
    "padding_waste",
    "perplexity",
    "sampler_duplicates",
    "step_seconds",
    "uniform_padding_waste",
    "waits",
]


def perplexity(nats_per_token: float) -> float:
    """exp(nats/token): the number of equally likely tokens that would be as hard to guess."""
    return math.exp(nats_per_token)


def padding_waste(batches: Iterable[Sequence[int]]) -> float:
    """Share of the computed positions that are padding, when each batch of lengths is padded to its longest."""
    batches = [list(lengths) for lengths in batches]
    return 1 - sum(map(sum, batches)) / sum(len(lengths) * max(lengths) for lengths in batches)


def uniform_padding_waste(batch_size: int) -> float:
    """Expected waste of random batches when lengths are uniform on (0, max]: the mean is max/2, the expected longest
    of B is max * B/(B+1), so 1 - (B+1)/(2B) = (B-1)/(2B). 7/16 = 43.75 % for batches of 8."""
    return (batch_size - 1) / (2 * batch_size)


def packing_waste(tokens: int, seq_len: int) -> float:
    """Share of the tokens that packing into windows of `seq_len` never uses as a target."""
    return 1 - (tokens - 1) // seq_len * seq_len / tokens


def sampler_duplicates(samples: int, world_size: int) -> int:
    """Samples that torch's DistributedSampler shows twice per epoch to make all ranks equal: N * ceil(D/N) - D."""
    return world_size * math.ceil(samples / world_size) - samples


def step_seconds(load_s: float, compute_s: float, prefetch: bool, workers: int = 1) -> float:
    """Steady-state time of a step: load + compute in turn, max(load / workers, compute) with prefetching."""
    return max(load_s / workers, compute_s) if prefetch else load_s + compute_s


def waits(load_s: Sequence[float], compute_s: Sequence[float], depth: int) -> list[float]:
    """Seconds the consumer waits for each batch, for one producer that runs at most `depth` batches ahead.

    Batch k is begun when k-1 is made and batch k-depth has been taken; depth 0 means loading on demand. This is the
    recurrence behind `step_seconds` for times that vary: depth is what rides out a slow batch.
    """
    taken: list[float] = []
    made = done = 0.0
    result = []
    for k, (load, compute) in enumerate(zip(load_s, compute_s, strict=True)):
        room = done if depth == 0 else taken[k - depth] if k >= depth else 0.0
        made = max(made, room) + load
        result.append(max(0.0, made - done))
        taken.append(max(made, done))
        done = taken[-1] + compute
    return result
