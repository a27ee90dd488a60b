"""What lab 13's checks look at besides values: steps taken, tokens read, memory, counts, contents of blocks.

A pool that searches for a free block, a hash that reads the whole prefix for every block, an attention that first
copies everything together: all of them return what they should.
"""

import inspect
import re
import sys
import tracemalloc
from collections import Counter, deque
from collections.abc import Callable, ItemsView, Iterator, KeysView, Sequence, Sized, ValuesView
from typing import Any

import numpy as np

from course.kit.exercises import CheckFailed
from course.shared import new_tensors
from course.shared.new_tensors import NewTensors

WALKS = {  # methods that walk over the whole container; `in` and remove are quick in sets and dictionaries
    list: "__contains__ __add__ __reversed__ index remove count insert copy sort reverse",
    deque: "__contains__ __reversed__ index remove count insert copy reverse",
    set: "__sub__ __rsub__ __and__ __or__ copy difference intersection union",
    dict: "copy",
    Counter: "copy most_common",
}
SEARCHES = "find rfind index rindex count insert nonzero argmin argmax min max sum sort argsort tolist"


def steps_of(owner: Any, call: Callable[[], Any]) -> int:
    """Steps of call(): lines of Python, and entries of owner's containers and arrays walked over.

    In place of each list, deque, set, dictionary and array one is put that counts; of all other containers, methods
    that search count. Tensors made meanwhile count with the size of the largest.
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

    def profile(frame, event, function):
        if event == "c_call" and function.__name__ in SEARCHES.split():
            searched = function.__self__
            if isinstance(searched, Sized) and getattr(searched, "ndim", 1):
                walked(len(searched))

    for name in (*getattr(owner, "__dict__", ()), *getattr(owner, "__slots__", ())):
        value = getattr(owner, name, None)
        if isinstance(value, np.ndarray):
            setattr(owner, name, value.view(_counting_array(walked)))
        elif type(value) in WALKS:
            setattr(owner, name, _counting(type(value), walked)(value))
    before = sys.gettrace(), sys.getprofile()
    sys.settrace(trace)
    try:
        with NewTensors() as made:
            steps = 0
            sys.setprofile(profile)
            call()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return steps + made.largest


def _counting_array(walked: Callable[[int], None]) -> type:
    """An array that reports the size of each array that is made from it."""

    class CountingArray(np.ndarray):
        def __array_finalize__(self, source):
            walked(self.size)

    return CountingArray


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
    if issubclass(kind, dict):  # views that walk as the dictionary does
        methods |= {"keys": lambda d: KeysView(d), "values": lambda d: ValuesView(d), "items": lambda d: ItemsView(d)}
    return type(f"Counting{kind.__name__}", (kind,), methods | {"__iter__": steps})


def counts_of(pool: Any, num_blocks: int) -> list[int]:
    """references[b] of every block: a list, a Counter, an array or a tensor will do."""
    try:
        return [int(pool.references[block]) for block in range(num_blocks)]
    except KeyError as error:
        raise CheckFailed(f"references[{error}] does not exist: it must say 0 for a block without a holder") from None
    except IndexError:
        raise CheckFailed(f"references must have a count for each of the {num_blocks} blocks") from None


def bytes_kept(call: Callable[[], Any]) -> int:
    """The most bytes that Python's objects and numpy's arrays made by call() take at one time; tensors do not count."""
    began = tracemalloc.is_tracing()
    if not began:
        tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        if not began:
            tracemalloc.stop()


def written_in(function: Callable) -> tuple[set[str], set[int]]:
    """Short texts and whole numbers that stand in a function, and in the functions and constants of its module that it
    names. Of a text to format, the parts between its fields."""
    function = inspect.unwrap(function)
    known = getattr(function, "__globals__", {})
    left, seen, texts, numbers = [getattr(function, "__code__", None)], set(), set(), set()
    while left:
        each = left.pop()
        if inspect.isfunction(each) and each.__globals__ is known:
            each = each.__code__
        if inspect.iscode(each) and each not in seen:
            seen.add(each)
            left += [*each.co_consts, *(known[name] for name in each.co_names if name in known)]
        elif isinstance(each, tuple):
            left += each
        elif isinstance(each, (str, bytes)) and len(each) < 40:
            text = each.decode("latin1") if isinstance(each, bytes) else each
            texts.update(part for part in re.split(r"%[sr]|\{[^}]*\}", text) if part)
        elif isinstance(each, int):
            numbers.add(each)
    return texts, numbers


class Read(Sequence):
    """Tokens that count in `.reads` how many of them were handed out, and in `.written` how many were turned into text,
    bytes or a hash: those of a copy, too."""

    def __init__(self, tokens: Sequence[int]):
        self.reads = self.written = 0

        def writes(name: str) -> Callable:
            def write(token, *args, **options):
                self.written += 1
                return getattr(int, name)(token, *args, **options)

            return write

        names = ("__repr__", "__str__", "__format__", "__hash__", "to_bytes")
        token_kind = type("Token", (int,), {name: writes(name) for name in names})
        self._tokens = [token_kind(token) for token in tokens]

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
