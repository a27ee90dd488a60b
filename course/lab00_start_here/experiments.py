"""Lab 00's measurements: matmuls under the roof, bytes by two witnesses, an all-reduce's time, too many threads."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from minillm import measure
from minillm.comm import Group

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
EDGES = (512, 1024, 4096)  # fp32 weights of 1 MB, 4 MB and 64 MB: they fit a cache, or they do not


def matmul_rates(edges: Sequence[int] = EDGES, sweeps: int = 8) -> dict[int, list[tuple[int, float]]]:
    """(tokens, best FLOP/s) by edge, for the fp32 matmul [tokens, edge] @ [edge, edge] on all cores.

    Sweeps over all sizes follow each other, so that a burst of other work spoils a sweep and not a size.
    """
    weights = {edge: torch.randn(edge, edge) for edge in edges}
    best = {(edge, tokens): float("inf") for edge in edges for tokens in TOKENS}
    for _ in range(sweeps):
        for edge, tokens in best:
            x, out = torch.randn(tokens, edge), torch.empty(tokens, edge)
            for _ in range(3):
                start = time.perf_counter()
                torch.mm(x, weights[edge], out=out)
                best[edge, tokens] = min(best[edge, tokens], time.perf_counter() - start)
    return {edge: [(tokens, 2 * tokens * edge**2 / best[edge, tokens]) for tokens in TOKENS] for edge in edges}


# Rank programs.


def two_witnesses(group: Group, program: Callable[[Group, torch.Tensor], Any], num_bytes: int) -> tuple[int, int]:
    """(bytes this rank sent by the ledger, bytes of all ranks on the loopback) of one run on fp32 numbers.

    The loopback belongs to the whole machine and others can only add to it: the least of three runs counts.
    """
    wires = []
    for _ in range(3):
        x = torch.ones(num_bytes // 4)
        group.barrier()
        with measure.ledger() as led, measure.wire() as wire:
            group.barrier()
            program(group, x)
            group.barrier()
        wires.append(wire.sent)
    return led.bytes("all_reduce"), min(wires)


def time_all_reduce(group: Group, num_bytes: int, repeats: int = 30) -> list[float]:
    """Seconds of each of `repeats` all-reduces on this rank, after two that do not count."""
    x, seconds = torch.zeros(num_bytes // 4), []
    for _ in range(2 + repeats):
        group.barrier()
        start = time.perf_counter()
        group.all_reduce(x)
        seconds.append(time.perf_counter() - start)
    return seconds[2:]


def one_message(group: Group, num_bytes: int) -> tuple[float, bool]:
    """(seconds from the call of send or recv to its return, whether the ledger calls the message emulated)."""
    x = torch.ones(num_bytes // 4)
    group.barrier()
    with measure.ledger() as led:
        start = time.perf_counter()
        group.send(x, dst=1) if group.rank == 0 else group.recv(x, src=0)
        seconds = time.perf_counter() - start
    return seconds, led.events[0].emulated


def crowd(group: Group, layouts: Sequence[tuple[int, int]], edge: int = 384, turn_s: float = 0.1) -> list[list[float]]:
    """FLOP/s of this rank's matmuls in each of five turns of each (ranks, threads per rank): [turn][layout].

    In its turn the first `ranks` ranks work side by side for `turn_s` seconds, the others sleep.
    """
    a, out = torch.randn(edge, edge), torch.empty(edge, edge)
    rates = []
    for _ in range(5):
        rates.append([])
        for ranks, threads in layouts:
            torch.set_num_threads(threads)
            group.barrier()
            start, done = time.perf_counter(), 0
            while group.rank < ranks and time.perf_counter() - start < turn_s:
                torch.mm(a, a, out=out)
                done += 1
            rates[-1].append(2 * edge**3 * done / (time.perf_counter() - start))
    return rates


def best_together(rates: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """The ranks' results of `crowd` -> FLOP/s of all ranks together, the best turn of each layout."""
    return torch.tensor(rates).sum(0).amax(0).tolist()
