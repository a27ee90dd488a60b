"""What lab 13's checks look at besides values: steps taken, tokens read, tensors made, contents of blocks.

A pool that searches for a free block, a hash that reads the whole prefix for every block, an attention that first
copies everything together: all of them return what they should.
"""

import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.measure.watch import Watch

WALKS = {"index", "remove", "count", "insert", "copy", "sort", "reverse"}  # methods of lists that walk over them
FUNCTIONS = {"min", "max", "sum", "sorted", "any", "all"}


def steps_of(call: Callable[[], Any], size: int) -> int:
    """Lines of Python that call() runs, and for each built-in that walks over a list, the entries of that list.

    size: what a built-in function whose argument cannot be seen is taken to walk over.
    """
    steps = 0

    def trace(frame, event, arg):
        nonlocal steps
        steps += event == "line"
        return trace

    def profile(frame, event, arg):
        nonlocal steps
        if event == "c_call":
            owner = getattr(arg, "__self__", None)
            if isinstance(owner, list) and arg.__name__ in WALKS:
                steps += len(owner)
            elif arg.__name__ in FUNCTIONS:
                steps += size

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return steps


def cpu_seconds(call: Callable[[], Any], repeats: int = 7) -> float:
    """CPU time of this thread in the quickest of a few calls: other programs can only make it longer, never shorter."""
    seconds = []
    for _ in range(repeats):
        began = time.thread_time()
        call()
        seconds.append(time.thread_time() - began)
    return max(min(seconds), 1e-7)


class Read(Sequence):
    """Tokens that count how many of them were handed out, in `.reads`."""

    def __init__(self, tokens: Sequence[int]):
        self._tokens, self.reads = list(tokens), 0

    def __getitem__(self, index):
        found = self._tokens[index]
        self.reads += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        for token in self._tokens:
            self.reads += 1
            yield token

    def __len__(self) -> int:
        return len(self._tokens)


class NewTensors(Watch):
    """What torch made anew inside the block, in numbers: the largest tensor, and the most alive at once (no views)."""

    def __init__(self, *known: Tensor):
        super().__init__()
        self.largest = self.most_alive = 0
        self._known = {x.untyped_storage().data_ptr() for x in known}
        self._alive: dict[int, int] = {}  # numbers by the storage's address

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler first, which takes seconds

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for x in found if isinstance(found, (list, tuple)) else (found,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self._known:
                self.largest = max(self.largest, x.numel())
                self._keep(x.untyped_storage())
        return found

    def _keep(self, storage) -> None:
        address = storage.data_ptr()
        if address not in self._alive:
            self._alive[address] = storage.nbytes() // 8
            weakref.finalize(storage, self._alive.pop, address, None)
            self.most_alive = max(self.most_alive, sum(self._alive.values()))


class Contents:
    """Blocks that hold tokens instead of keys and values; `copies` lists (source, target) of every copy."""

    def __init__(self, num_blocks: int, block_size: int):
        self.cells: list[list[Any]] = [[None] * block_size for _ in range(num_blocks)]
        self.block_size, self.copies = block_size, []

    def copy(self, source: int, target: int) -> None:
        self.copies.append((source, target))
        self.cells[target] = list(self.cells[source])

    def write(self, table: Sequence[int], position: int, token: Any) -> None:
        self.cells[table[position // self.block_size]][position % self.block_size] = token

    def read(self, table: Sequence[int], tokens: int) -> list[Any]:
        return [self.cells[table[p // self.block_size]][p % self.block_size] for p in range(tokens)]
