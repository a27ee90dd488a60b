"""What lab 13's checks look at besides values: steps taken, tokens read, tensors made, contents of blocks.

A pool that searches for a free block, a hash that reads the whole prefix for every block, an attention that first
copies everything together: all of them return what they should.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from course.shared import new_tensors
from course.shared.new_tensors import NewTensors

WALKS = {  # methods that walk over the whole container; `in` and remove are quick in sets and dictionaries
    list: "__contains__ __add__ __reversed__ index remove count insert copy sort reverse",
    deque: "__contains__ __reversed__ index remove count insert copy reverse",
    set: "__sub__ __rsub__ __and__ __or__ copy difference intersection union",
    dict: "copy",
}


def steps_of(owner: Any, call: Callable[[], Any]) -> int:
    """Steps of call(): lines of Python, and entries of owner's lists, deques, sets and dictionaries walked over.

    A container is put in place of each of them that counts. Tensors made meanwhile count with the size of the largest.
    """
    steps = 0

    def walked(entries: int) -> None:
        nonlocal steps
        steps += entries

    def trace(frame, event, arg):
        if frame.f_code.co_filename in (__file__, new_tensors.__file__) or "torch" in frame.f_code.co_filename:
            return None
        walked(event == "line")
        return trace

    for name, value in list(vars(owner).items()):
        if type(value) in WALKS:
            setattr(owner, name, _counting(type(value), walked)(value))
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with NewTensors() as made:
            call()
    finally:
        sys.settrace(before)
    return steps + made.largest


def _counting(kind: type, walked: Callable[[int], None]) -> type:
    """A list, deque, set or dictionary that reports how many entries each of its operations walks over."""

    def whole(name: str) -> Callable:
        def walk(self, *args, **options):
            walked(len(self))
            return getattr(kind, name)(self, *args, **options)

        return walk

    def steps(self) -> Iterator:
        for entry in kind.__iter__(self):
            walked(1)
            yield entry

    def from_place(name: str) -> Callable:
        def take(self, place=-1, *args):
            moved = len(self) if isinstance(place, slice) else len(self) - (place % max(1, len(self)))
            walked(moved if name != "__getitem__" or isinstance(place, slice) else 1)
            return getattr(kind, name)(self, place, *args)

        return take

    methods = {name: whole(name) for name in WALKS[kind].split()}
    if kind is list:
        methods |= {name: from_place(name) for name in ("pop", "__delitem__", "__getitem__")}
    return type(f"Counting{kind.__name__}", (kind,), methods | {"__iter__": steps})


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
