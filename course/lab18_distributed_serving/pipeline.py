"""Batches that move through a pipeline, a stage at each tick: which sequences are in which, and what they write."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NextBatch = Callable[[list[str], list[list[str]]], list[str]]


@dataclass(frozen=True)
class Trace:
    """lengths: tokens that each sequence writes; arrivals: the tick at which it comes."""

    lengths: tuple[int, ...]
    arrivals: tuple[int, ...]

    @classmethod
    def draw(cls, lengths: Sequence[int]) -> "Trace":
        """Half of them are there at once, the others come one by one."""
        later = [random.randint(1, 2 * len(lengths)) if i % 2 else 0 for i in range(len(lengths))]
        return cls(tuple(lengths), tuple(later))

    @classmethod
    def at_once(cls, sequences: int, tokens: int) -> "Trace":
        return cls((tokens,) * sequences, (0,) * sequences)


@dataclass(frozen=True)
class Played:
    """ticks: until the last token; tokens written; batches: (tick of its start, its sequences) in order."""

    ticks: int
    tokens: int
    batches: tuple[tuple[int, tuple[str, ...]], ...]


def play(trace: Trace, stages: int, next_batch: NextBatch, most_ticks: int = 100_000) -> Played:
    """Runs the trace; next_batch(running, in flight) is asked whenever the first stage is free."""
    left = {f"s{number}": length for number, length in enumerate(trace.lengths)}
    coming = sorted(range(len(trace.lengths)), key=lambda number: trace.arrivals[number])
    running: list[str] = []
    flight: list[tuple[int, list[str]]] = []  # (tick at which it leaves, its sequences)
    batches, tokens, tick = [], 0, 0
    while coming or running:
        while coming and trace.arrivals[coming[0]] <= tick:
            running.append(f"s{coming.pop(0)}")
        while flight and flight[0][0] <= tick:
            for name in flight.pop(0)[1]:
                tokens, left[name] = tokens + 1, left[name] - 1
                running.remove(name)
                if left[name]:
                    running.append(name)  # behind those that have waited longer
        if batch := next_batch(list(running), [names for _, names in flight]):
            flight.append((tick + stages, batch))
            batches.append((tick, tuple(batch)))
        tick += 1
        if tick > most_ticks:
            break
    return Played(tick - 1, tokens, tuple(batches))
