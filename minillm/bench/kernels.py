"""What lies between a layer's products, as torch has it, compiled by torch.compile, and as minillm's Triton kernels.

    compiled    against torch    where torch's compiler has what it needs: on a CPU a C++ compiler, on a GPU triton
    triton      against torch, and against compiled: the rotation and the gate, on a CUDA GPU

sizes: rows (tokens) of 4,096 numbers. A name says how many times fewer bytes one kernel moves than torch's operations
do: what there is to win if nothing but bytes took time. Products are not here (`bench step`); attention has
`bench attention` and `bench tiles`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.bench.counts import settling
from minillm.bench.harness import BenchRow, bench_row, check_repeats, seconds_per_call, side_by_side
from minillm.model.compiler import check_compiler
from minillm.model.elementwise import FUNCTIONS, gated, rotate_both
from minillm.model.elementwise_triton import gated_triton, rotate_both_triton

LAUNCHES = (
    "What takes less than about 100 µs here is what the host takes to launch it, most of it Python. A step of the "
    "engine is a CUDA graph, which pays that once for all its kernels."
)
WIDTH, HEAD_DIM = 4096, 128
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Work:
    """fewer: bytes of torch's operations over those of one kernel. triton: minillm's kernel, if there is one."""

    name: str
    fewer: float
    torch: Callable
    inputs: tuple[Tensor, ...]
    triton: Callable | None = None


def run(sizes: Sequence[int] = (8, 2048), repeats: int = 7, device: str | None = None) -> list[BenchRow]:
    """A row for each work, number of rows, and pair. ValueError where no pair can run."""
    check_repeats(repeats)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    check_compiler(where)
    return [row for size in sizes for work in works(size, where) for row in compare(work, size, where, repeats)]


def works(rows: int, device: torch.device) -> Iterator[Work]:
    if rows < 1:
        raise ValueError(f"size {rows} must be at least 1 row")
    dtype, draw = torch.bfloat16 if device.type == "cuda" else torch.float32, torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(device, dtype)

    x, weight = numbers(1, rows, WIDTH), numbers(WIDTH)
    yield Work("relu(x + b)", 2.0, lambda x, b: torch.relu(x + b), (x, weight))
    yield Work("x + norm(x) · w", 2.5, lambda x, w: x + F.rms_norm(x, (WIDTH,), w, 1e-6), (x, weight))
    yield Work("silu(gate) · up", 5 / 3, lambda g, u: gated(FUNCTIONS["silu"], g, u), (x, numbers(1, rows, WIDTH)),
               lambda g, u: gated_triton(FUNCTIONS["silu"], g, u))  # fmt: skip
    heads = [numbers(1, count, rows, HEAD_DIM) for count in (WIDTH // HEAD_DIM, WIDTH // HEAD_DIM // 4)]
    cos, sin = (turn.to(device, dtype) for turn in (torch.rand(rows, HEAD_DIM), torch.rand(rows, HEAD_DIM)))
    yield Work("rotation of q and k", 5.0, rotate_both, (*heads, cos, sin), rotate_both_triton)


@torch.no_grad()
def compare(work: Work, rows: int, device: torch.device, repeats: int) -> Iterator[BenchRow]:
    ways = {"torch": work.torch, "torch.compile": torch.compile(work.torch, dynamic=False)}
    if work.triton is not None and device.type == "cuda" and find_spec("triton"):
        ways["minillm's kernel"] = work.triton
    pairs = [("torch.compile", "torch"), *(("minillm's kernel", peer) for peer in list(ways)[:2] if len(ways) == 3)]
    settle = settling(device)
    calls = max(1, 200 // rows)
    samples = {
        name: seconds_per_call(lambda way=way: way(*work.inputs), calls, after=settle) for name, way in ways.items()
    }
    for name, peer in pairs:
        found = side_by_side(lambda name=name, peer=peer: same(ways[name], ways[peer], work.inputs), samples[name],
                             samples[peer], repeats)  # fmt: skip
        title = f"{work.name}, {rows:,} rows, {name} ({work.fewer:.2g} times fewer bytes), {device.type}"
        yield bench_row(title, peer, found, "µs", scale=1e6)


def same(ours: Callable, theirs: Callable, inputs: Sequence[Tensor]) -> bool:
    results = [way(*inputs) for way in (ours, theirs)]
    pairs = zip(*(each if isinstance(each, tuple) else (each,) for each in results), strict=True)
    tolerance = TOLERANCE[inputs[0].dtype]
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs)


def notes() -> list[str]:
    """What stands under the table."""
    return [LAUNCHES] if torch.cuda.is_available() else []
