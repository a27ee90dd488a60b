"""A learner's Triton kernel in Triton's interpreter, in this process, with every load and store traced.

    seen = launch(kernel, (programs,), x, y, n, BLOCK=64)       # y is filled; needs triton, no GPU
    seen.loaded["x"], seen.stored["y"]                          # bytes that all programs asked for, by argument
    seen.outside, seen.races                                    # sentences: what a GPU would answer with garbage

A kernel is a plain function: arguments in capitals are compile-time constants (`tl.constexpr`), tensors arrive as
addresses. The interpreter runs one program after the other, so what goes wrong on a GPU only sometimes is looked for in
the trace instead: an address behind the end of a tensor (it gives NaN here, and a store to it is dropped), and an
address that two programs write, or one writes and another reads, without an atomic operation. What a mask leaves out is
NaN as well if the load names no `other`: Triton promises nothing about it.
"""

import ast
import inspect
import linecache
import math
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from typing import Any

import numpy as np
from torch import Tensor

from minillm.model.kernels import tl, triton

INSTALLED = triton is not None
MISSING = "Triton is not installed here, so this is left out: pip install triton (Linux, no GPU needed)."


@dataclass(frozen=True)
class Traced:
    """What the programs of one launch did. loaded, stored: bytes by argument, every request counted; distinct: bytes
    by argument, every address counted once, which is what a cache that forgets nothing would fetch from memory. tile:
    numbers of the largest single load or store."""

    loaded: dict[str, int]
    stored: dict[str, int]
    distinct: dict[str, int]
    outside: tuple[str, ...]
    races: tuple[str, ...]
    programs: int
    tile: int

    @property
    def bytes(self) -> int:
        return sum(self.loaded.values()) + sum(self.stored.values())


def left_out(count: int = 1) -> tuple[None, ...] | None:
    """In place of so many kernels, where they cannot run: says what is missing."""
    print(MISSING)
    return None if count == 1 else (None,) * count


def launch(function: Callable, grid: Sequence[int], *arguments: Any, **constants: Any) -> Traced:
    """Run the kernel on every program of the grid; tensors among the arguments are written as on a GPU.

    ValueError with one sentence where the kernel stops, or does not take these arguments.
    """
    names = list(inspect.signature(function).parameters)
    if len(arguments) + len(constants) != len(names) or not constants.keys() <= set(names[len(arguments) :]):
        handed = [*names[: len(arguments)], *constants]
        raise ValueError(f"the kernel takes ({', '.join(names)}) and is launched with ({', '.join(handed)})")
    trace = _Trace({name: value for name, value in zip(names, arguments, strict=False) if isinstance(value, Tensor)})
    with _interpreting(), trace.listening(), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's about all-NaN tiles
        from triton.runtime.interpreter import InterpretedFunction

        try:
            InterpretedFunction(as_kernel(function))[tuple(grid)](*arguments, **constants)
        except Exception as error:
            cause = error.__cause__ or error
            raise ValueError(f"{type(cause).__name__}: {' '.join(str(cause).split())[:200]}") from None
    return trace.result(math.prod(grid))


def as_kernel(function: Callable) -> Callable:
    """The function with its arguments in capitals marked as compile-time constants, as triton.jit wants it.

    Needs the function's text, which it has in a file, a notebook's cell and whatever linecache knows.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    tree.returns, tree.decorator_list = None, []
    for argument in tree.args.args:
        argument.annotation = ast.parse("tl.constexpr", mode="eval").body if argument.arg.isupper() else None
    text = ast.unparse(ast.fix_missing_locations(tree)) + "\n"
    name = f"<kernel {tree.name} {sha1(text.encode()).hexdigest()[:12]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    known = {"math": math, **inspect.unwrap(function).__globals__, "tl": tl, "triton": triton}
    exec(compile(text, name, "exec"), known)
    return known[tree.name]


@contextmanager
def _interpreting() -> Iterator[None]:
    """Triton's own helpers (tl.zeros, tl.sum ...) are interpreted, too; afterwards everything is as it was, so that a
    GPU can compile kernels in the same process."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction, mangle_type

    mangle_type(0)  # imports more of triton, which wants its helpers as they are
    homes = [tl, tl.core, tl.standard, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base]
    before = [dict(vars(home)) for home in homes]
    for home, names in zip(homes, before, strict=True):
        for name, value in names.items():
            if isinstance(value, JITFunction):
                setattr(home, name, InterpretedFunction(value.fn))
    try:
        yield
    finally:
        for home, names in zip(homes, before, strict=True):
            for name in [name for name, value in vars(home).items() if value is not names.get(name, home)]:
                if name in names:
                    setattr(home, name, names[name])
                elif inspect.isclass(home):  # a module keeps what the interpreter's own functions read there
                    delattr(home, name)


@dataclass
class _Trace:
    """tensors: the arguments, whose elements are the only memory there is."""

    tensors: dict[str, Tensor]
    loads: list[tuple] = field(default_factory=list)  # (program, argument, addresses)
    stores: list[tuple] = field(default_factory=list)
    outside: dict[str, None] = field(default_factory=dict)
    lanes: dict[str, None] = field(default_factory=dict)  # races inside one store
    tile: int = 0

    def __post_init__(self) -> None:
        self._places = {name: _addresses(each) for name, each in self.tensors.items()}

    @contextmanager
    def listening(self) -> Iterator[None]:
        from triton.runtime.interpreter import interpreter_builder as builder

        load, store, rmw = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

        def traced_load(pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
            inside = self._note("load", builder, pointers.data, mask.data, self.loads)
            unknown = other is None and pointers.data.size > 1  # the interpreter drops the 0 of a single number
            garbage = ~inside if unknown else mask.data.astype(bool) & ~inside
            mask.data = inside
            found = load(pointers, mask, other, *rest)
            if garbage.any() and found.data.dtype.kind == "f":
                found.data = np.where(garbage, np.nan, found.data).astype(found.data.dtype)
            return found

        def traced_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            inside = self._note("store", builder, pointers.data, mask.data, self.stores)
            mask.data = inside
            return store(pointers, value, mask, *rest)

        def traced_rmw(operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            inside = self._note("atomic", builder, pointers.data, mask.data, None)
            mask.data = inside
            return rmw(operation, pointers, value, mask, *rest)

        builder.create_masked_load, builder.create_masked_store = traced_load, traced_store
        builder.create_atomic_rmw = traced_rmw
        try:
            yield
        finally:
            del builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

    def _note(self, kind: str, builder: Any, pointers: Any, mask: Any, kept: list | None) -> np.ndarray:
        """Which lanes touch an element of an argument."""
        program, mask = builder.grid_idx, np.broadcast_to(mask, pointers.shape).astype(bool)
        self.tile = max(self.tile, pointers.size)
        inside = np.zeros(pointers.shape, bool)
        for name, places in self._places.items():
            mine = mask & _among(pointers, places)
            inside |= mine
            if mine.any() and kept is not None:
                kept.append((program, name, pointers[mine]))
            if kind == "store" and len(np.unique(pointers[mine])) < mine.sum():
                self.lanes[f"program {program[0]} stores several numbers of one tile to one place of {name}"] = None
        wrong = mask & ~inside
        if wrong.any() and len(self.outside) < 8:
            what = {"load": "loads", "store": "stores"}.get(kind, "updates")
            self.outside[f"program {program} {what} {self._where(int(pointers[wrong].reshape(-1)[0]))}"] = None
        return inside

    def _where(self, address: int) -> str:
        """The argument that begins last before the address, and how far away it is."""
        below = [(places[0], name) for name, places in self._places.items() if len(places) and places[0] <= address]
        if not below:
            return "an address before all tensors"
        start, name = max(below)
        tensor = self.tensors[name]
        return f"{name}[{(address - int(start)) // tensor.element_size()}], and {name} has {_span(tensor)} numbers"

    def result(self, programs: int) -> Traced:
        sizes = {name: each.element_size() for name, each in self.tensors.items()}
        loaded, stored, distinct = Counter(), Counter(), {}
        for kept, counts in ((self.loads, loaded), (self.stores, stored)):
            for _, name, addresses in kept:
                counts[name] += addresses.size * sizes[name]
        for name, size in sizes.items():
            touched = [addresses for _, each, addresses in self.loads + self.stores if each == name]
            distinct[name] = size * len(np.unique(np.concatenate(touched))) if touched else 0
        races = (*self.lanes, *self._races())
        return Traced(dict(loaded), dict(stored), distinct, tuple(self.outside), races, programs, self.tile)

    def _races(self) -> Iterator[str]:
        for name in self.tensors:
            writer: dict[int, Any] = {}
            for program, each, addresses in self.stores:
                for address in addresses.tolist() if each == name else ():
                    other = writer.setdefault(address, program)
                    if other != program:
                        yield f"programs {other} and {program} both store to {self._where(address).split(',')[0]}"
                        break
            for program, each, addresses in self.loads if writer else ():
                if each == name:
                    other = next((writer[a] for a in addresses.tolist() if writer.get(a, program) != program), None)
                    if other is not None:
                        yield f"program {program} loads from {name} what program {other} stores"
                        break


def _among(pointers: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Which pointers are one of the places, which ascend."""
    if not len(places):
        return np.zeros(pointers.shape, bool)
    return places[np.searchsorted(places, pointers).clip(max=len(places) - 1)] == pointers


def _addresses(tensor: Tensor) -> np.ndarray:
    """Of all elements, ascending."""
    places = np.array([tensor.data_ptr()], np.uint64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        steps = np.arange(size, dtype=np.uint64) * np.uint64(stride * tensor.element_size())
        places = (places[:, None] + steps[None]).reshape(-1)
    return np.unique(places)


def _span(tensor: Tensor) -> int:
    """Elements from the first to the last, gaps included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
