"""How the labs measure: on one thread, FLOPs by the counter, the slowest rank, bytes on the wire, on the same text."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from minillm import measure
from minillm.comm import Group
from minillm.data import Tokenizer, Tokens, corpus, tokenize


@contextmanager
def one_thread() -> Iterator[None]:
    """The device of this lab is one core: on a machine that others use as well, two threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def count_flops(work: Callable[[], Any]) -> int:
    """FLOPs of the matmuls that torch sees while `work()` runs."""
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _NoModules()
    with counter:
        work()
    return counter.get_total_flops()


class _NoModules(nullcontext):
    """For the counter's tally by module, whose hooks cannot be inside a block that backward runs again."""

    parents = frozenset({"Global"})


def timed(group: Group, work: Callable[[], Any]) -> tuple[float, measure.Ledger]:
    """(seconds until the last rank is done with `work()`, this rank's ledger of it); all ranks begin together."""
    group.barrier()
    start = time.monotonic()
    with measure.ledger() as led:
        work()
    return max(group.gather_objects(time.monotonic() - start)), led


def on_the_wire(group: Group, work: Callable[[], Any], repeats: int = 3) -> int:
    """Bytes per rank of `work()` on all ranks, by the loopback interface. It belongs to the whole machine, and others
    can only add to it: the least of `repeats` runs counts."""
    sent = []
    for _ in range(repeats):
        group.barrier()
        with measure.wire() as counter:
            group.barrier()
            work()
            group.barrier()
        sent.append(counter.sent)
    return min(sent) // group.world_size


@cache
def text_tokens() -> Tokens:
    """The held-out files of the standard library in the committed vocabulary."""
    return tokenize(corpus(), Tokenizer.load(), "validation")
