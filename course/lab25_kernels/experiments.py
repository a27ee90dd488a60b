"""Lab 25's measurements: fusing on one thread, what torch's compiler makes of a block, first calls, where it loses.

experiments_recorded.py    a recorded decode step, as a CUDA graph holds it
experiments_breaks.py      the six programs of the last exercise
"""

import logging
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from course.shared.kernels import as_kernel
from course.shared.measuring import one_thread
from minillm.model.compiler import check_compiler
from minillm.model.kernels import triton

NUMBERS = 16 << 20  # 64 MB in float32
WIDTH = 4096  # numbers of a row of biases: 16 kB stay in any cache
LATER = 100  # calls until "the hundredth"


@cache
def missing_compiler() -> str:
    """What torch's compiler lacks here, in one sentence; "" if nothing."""
    try:
        check_compiler(torch.device("cpu"))
    except ValueError as error:
        return f"{error} What stands on it is left out."
    return ""


def seconds_of(*works: Callable[[], Any], repeats: int = 7) -> list[float]:
    """The median of each, taken in turn so that a busy moment meets all of them."""
    for work in works:
        work()
    found: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for work, times in zip(works, found, strict=True):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
    return [median(times) for times in found]


@dataclass(frozen=True)
class Fusion:
    """Seconds by setting, "same" (bias as large as x) or "row": of the roof (one torch.add of x and bias,
    which moves the
    bytes of the fused kernel), of two kernels and of one."""

    roof: dict[str, float]
    eager: dict[str, float]
    compiled: dict[str, float]  # empty without a compiler
    missing: str


@one_thread()
def fusion(numbers: int = NUMBERS, repeats: int = 7) -> Fusion:
    x, temporary, y = (torch.randn(numbers).view(-1, WIDTH) for _ in range(3))
    roof, eager, compiled = {}, {}, {}
    missing = missing_compiler()

    def as_one(x: Tensor, bias: Tensor, y: Tensor) -> None:
        y.copy_(torch.relu(x + bias))

    one = None if missing else torch.compile(as_one, dynamic=False)
    for name, bias in (("same", torch.randn(numbers).view(-1, WIDTH)), ("row", torch.randn(WIDTH))):

        def add(bias: Tensor = bias) -> None:
            torch.add(x, bias, out=y)

        def two(bias: Tensor = bias) -> None:
            torch.add(x, bias, out=temporary)
            torch.relu_(temporary)

        works = [add, two] if missing else [add, two, lambda bias=bias: one(x, bias, y)]
        roof[name], eager[name], *rest = seconds_of(*works, repeats=repeats)
        compiled |= dict(zip([name], rest, strict=False))
        if not missing and not torch.equal(y, temporary):
            raise ValueError("torch.compile's relu(x + b) differs from eager's, so its time means nothing")
    return Fusion(roof, eager, compiled, missing)


@dataclass(frozen=True)
class Compiled:
    """What torch.compile made of a function. operations: of the graph; kernels: names of the generated ones; guards:
    conditions that later calls check; seconds of the first call without caches on disk, of the hundredth, and of an
    eager call."""

    missing: str
    operations: int = 0
    kernels: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()
    first: float = 0.0
    hundredth: float = 0.0
    eager: float = 0.0


@one_thread()
def compile_and_read(function: Callable, rows: int = 256, width: int = 512) -> Compiled:
    if missing := missing_compiler():
        return Compiled(missing)
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._inductor.utils import run_and_get_code

    inputs = torch.randn(rows, width), torch.randn(width), torch.randn(width)
    with fresh_compiler() as graphs, torch.no_grad():
        torch.compile(function, backend=graphs)(*inputs)
        operations = sum(node.op.startswith("call_") for node in graphs.made[0].graph.nodes)
    cold = torch._inductor.config.patch(force_disable_caches=True)  # as on a machine that has compiled nothing yet
    with fresh_compiler(), torch.no_grad(), cold, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one says that caches are off
        compiled = torch.compile(function)
        start = time.perf_counter()
        _, code = run_and_get_code(compiled, *inputs)
        first = time.perf_counter() - start
        hundredth, eager = seconds_of(lambda: compiled(*inputs), lambda: function(*inputs), repeats=LATER)
        conditions = _debug_get_cache_entry_list(function)[0].guard_manager.code_parts
    kernels = tuple(re.findall(r"^(\w+_fused_\w+) =", "\n".join(code), re.MULTILINE))
    guards = tuple(part for part in conditions if "L['" in part and "_dynamo_" not in part)
    return Compiled("", operations, kernels, guards, first, hundredth, eager)


class Graphs:
    """A backend of torch.compile that compiles nothing and keeps the graphs that it is given."""

    def __init__(self) -> None:
        self.made: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list) -> Callable:
        self.made.append(graph)
        return graph.forward


@contextmanager
def fresh_compiler() -> Iterator[Graphs]:
    """Nothing compiled before counts, and breaks are not printed: they are counted here."""
    log = logging.getLogger("torch._dynamo")
    level = log.level
    torch._dynamo.reset()
    log.setLevel(logging.ERROR)
    try:
        yield Graphs()
    finally:
        log.setLevel(level)
        torch._dynamo.reset()


def graphs_by_call(module: nn.Module, inputs: list[Tensor]) -> list[int]:
    """How many graphs torch.compile has made after each call."""
    counts = []
    with fresh_compiler() as graphs:
        compiled = torch.compile(module, backend=graphs, dynamic=True)
        for x in inputs:
            compiled(x)
            counts.append(len(graphs.made))
    return counts


def breaks_graph(module: nn.Module, x: Tensor) -> str:
    """Why torch.compile cannot make one graph of this call, in a line of its own; "" if it can."""
    with fresh_compiler() as graphs:
        try:
            torch.compile(module, backend=graphs, dynamic=True, fullgraph=True)(x)
        except torch._dynamo.exc.Unsupported as error:
            return str(error).strip().splitlines()[0]
    return ""


def tile_seconds(kernel: Callable, size: int = 4096) -> dict[int, float]:
    """Device seconds of a product in square tiles, by tile; {} without a CUDA GPU."""
    if triton is None or not torch.cuda.is_available():
        return {}
    a, b, c = (torch.randn(size, size, device="cuda", dtype=torch.float16) for _ in range(3))
    compiled, times = triton.jit(as_kernel(kernel)), {}
    for tile in (32, 64, 128):
        grid = (-(-size // tile),) * 2
        sizes = (size, size, size, size, 1, size, 1)

        def run(grid: tuple = grid, sizes: tuple = sizes, tile: int = tile) -> None:
            compiled[grid](a, b, c, *sizes, M=tile, N=tile, K=32)

        times[tile] = triton.testing.do_bench(run) / 1e3
    return times


@dataclass(frozen=True)
class Losing:
    """Seconds, eager and compiled, by what was compiled; missing: see `missing_compiler`."""

    times: dict[str, tuple[float, float]]
    missing: str


@one_thread()
def losing() -> Losing:
    if missing := missing_compiler():
        return Losing({}, missing)

    def gained(x: Tensor, bias: Tensor) -> Tensor:
        return torch.relu(x + bias)

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return torch.relu(x @ weight)

    large, square = torch.randn(1 << 20), torch.randn(1024, 1024)
    works = {
        "relu(x + b), 4 MB": (gained, (large, large)),
        "relu(A B), 1,024 x 1,024": (product, (square, square)),
        "relu(x + b), 8 numbers": (gained, (torch.randn(8), torch.randn(8))),
    }
    times = {}
    with torch.no_grad():
        for name, (function, inputs) in works.items():
            compiled = torch.compile(function, dynamic=False)
            eager, one = seconds_of(lambda f=function, i=inputs: f(*i), lambda f=compiled, i=inputs: f(*i), repeats=31)
            times[name] = eager, one
    return Losing(times, "")
