"""Attention in tiles against torch's fused kernel and against whole score matrices, by length.

    tiled          against SDPA     the price of a loop in Python over what a kernel does in one call
    tiled          against dense    scores of [seq, seq] or of tiles
    tiled_triton   against SDPA     on a CUDA GPU, with triton

A sample is forward and backward of one causal layer; peak is the most that tensors took at any moment of it.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from minillm.bench.counts import peak_in, settling
from minillm.bench.harness import BenchRow, Comparison, bench_row, check_repeats, seconds_per_call, side_by_side
from minillm.model import dense, sdpa
from minillm.model.attention.tiled import tiled
from minillm.model.attention.tiled_triton import tiled_triton

LENGTHS = (512, 1024, 2048, 4096)
SHAPES = {"cpu": (1, 4, 2, 32), "cuda": (2, 32, 8, 128)}  # batch, heads, kv heads, head_dim
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def run(sizes: Sequence[int] = LENGTHS, repeats: int = 7, device: str | None = None) -> list[BenchRow]:
    """Two rows, time and peak bytes, for each length (sizes: tokens) and pair."""
    check_repeats(repeats)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    contests = [("tiled", tiled, "torch SDPA", sdpa), ("tiled", tiled, "whole scores", dense)]
    if where.type == "cuda" and find_spec("triton"):
        contests.append(("tiled_triton", tiled_triton, "torch SDPA", sdpa))
    return [row for size in sizes for contest in contests for row in compare(*contest, size, where, repeats)]


def compare(
    name: str, ours: Callable, peer: str, theirs: Callable, seq: int, device: torch.device, repeats: int
) -> list[BenchRow]:
    if seq < 1:
        raise ValueError(f"size {seq} must be at least 1 token")
    batch, heads, kv_heads, head_dim = SHAPES[device.type]
    dtype, draw = torch.bfloat16 if device.type == "cuda" else torch.float32, torch.Generator().manual_seed(0)
    shapes = [(batch, each, seq, head_dim) for each in (heads, kv_heads, kv_heads, heads)]
    *inputs, d_out = [torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes]
    inputs = [x.requires_grad_() for x in inputs]

    def step(attention: Callable) -> Callable[[], list[Tensor]]:
        def once() -> list[Tensor]:
            out = attention(*inputs)
            return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]

        return once

    mine, other = step(ours), step(theirs)

    def same() -> bool:
        pairs = zip(mine(), other(), strict=True)
        return all(torch.allclose(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]) for a, b in pairs)

    settle = settling(device)
    times = side_by_side(same, *(seconds_per_call(each, after=settle) for each in (mine, other)), repeats=repeats)
    title = f"{name}, {seq} tokens, {device.type}"
    rows = [bench_row(f"{title}: forward and backward", peer, times, "ms", scale=1e3)]
    if times.correct:
        peaks = Comparison(True, ((peak_in(mine), peak_in(other)),) * 3)
        rows.append(bench_row(f"{title}: peak", peer, peaks, "MB", scale=1e-6))
    return rows
