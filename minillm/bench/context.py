"""Attention over a cut sequence: rings and Ulysses against gathering all keys, forward and backward of one layer.

    zigzag   against gather     the same work on every rank; the link behind it, or before it
    ring     against gather     contiguous parts: everybody waits for the last rank
    ulysses  against gather     heads for sequence
    hybrid   against gather     Ulysses in pairs, a ring across (4 ranks and more)

The peer is the all-gather form that Llama 3 was trained with, made of the same tiles, since torch's own
(`torch.distributed.tensor.experimental.context_parallel`) has no attention kernel for CPUs: with gloo it raises
"_scaled_dot_product_flash_attention_for_cpu does not have a sharding strategy registered". Outputs and gradients of the
two have to agree. Rows marked *emulated* are paced by a link as fast as their name says; bytes on the wire are what the
operating system counts for all ranks, and kept bytes are what autograd saves on rank 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.bench.comm import slowest
from minillm.bench.counts import sent_in, settling
from minillm.bench.harness import BenchRow, Comparison, bench_row, check_repeats, seconds_per_call, side_by_side
from minillm.comm import Group, Link, Mesh, launch
from minillm.parallel.context_parallel import ContextAttention, context_attention

HEADS, KV_HEADS, HEAD_DIM = 8, 8, 32
LENGTHS = (1024, 4096)
WORLD_SIZES = (4,)
LINKS = {"loopback": None, "emulated 100 MB/s": Link(1e-4, 100e6), "emulated 30 MB/s": Link(1e-4, 30e6)}
PEER, TOLERANCE = "gather", 1e-4


@dataclass
class Contestant:
    """One variant with this rank's q, k, v and the gradient of its output."""

    attention: ContextAttention
    inputs: list[Tensor]
    d_out: Tensor
    positions: Tensor

    def step(self) -> list[Tensor]:
        """Output and gradients of q, k and v."""
        out = self.attention(*self.inputs, positions=self.positions)
        return [out.detach(), *torch.autograd.grad(out, self.inputs, self.d_out)]


def run(
    world_sizes: Sequence[int] = WORLD_SIZES,
    sizes: Sequence[int] = LENGTHS,
    links: Sequence[str] = tuple(LINKS),
    repeats: int = 7,
    timeout: float = 600.0,
) -> list[BenchRow]:
    """Rows for each variant, length (sizes: tokens of the whole sequence), number of ranks and link."""
    check_repeats(repeats)
    for world_size in world_sizes:
        if world_size < 2:
            raise ValueError(f"world size {world_size} must be 2 or more: a rank alone has nobody to talk to")
        if bad := [size for size in sizes if size % (2 * world_size)]:
            raise ValueError(f"size {bad[0]} must be a multiple of {2 * world_size} tokens for {world_size} ranks")
        if HEADS % world_size:
            raise ValueError(f"{HEADS} heads do not divide over {world_size} ranks: leave out that world size")
    rows = []
    for world_size in world_sizes:
        for link in links:
            ranks = launch(measure, world_size, sizes, repeats, link=LINKS[link], timeout=timeout, device=None)
            for at, (variant, seq) in enumerate(_contests(world_size, sizes)):
                name = f"{variant}, {seq} tokens, {world_size} ranks, {link}"
                times = slowest([rank[at][0] for rank in ranks])
                rows.append(bench_row(f"{name}: step", PEER, times, "ms", scale=1e3))
                if LINKS[link] is None:
                    for quantity, each in zip(("wire per step", "kept per rank"), ranks[0][at][1:], strict=True):
                        rows.append(bench_row(f"{name}: {quantity}", PEER, each, "MB", scale=1e-6))
    return rows


def measure(group: Group, lengths: Sequence[int], repeats: int) -> list[tuple[Comparison, Comparison, Comparison]]:
    """On each rank, for every contest: seconds, bytes of all ranks on the wire, bytes that this rank keeps."""
    torch.set_num_threads(1)
    return [_compare(group, variant, seq, repeats) for variant, seq in _contests(group.world_size, lengths)]


def _contests(world_size: int, lengths: Sequence[int]) -> list[tuple[str, int]]:
    variants = ["zigzag", "ring", "ulysses", *(["hybrid"] if world_size % 2 == 0 and world_size >= 4 else [])]
    return [(variant, seq) for variant in variants for seq in lengths]


def _compare(group: Group, variant: str, seq: int, repeats: int) -> tuple[Comparison, Comparison, Comparison]:
    mine, other = (_contestant(group, name, seq) for name in (variant, PEER))

    def same() -> bool:
        pairs = zip(_whole(mine, group, seq), _whole(other, group, seq), strict=True)
        return all(torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE) for a, b in pairs)

    settle = settling(group.device)
    samples = (seconds_per_call(each.step, before=group.barrier, after=settle) for each in (mine, other))
    times = side_by_side(same, *samples, repeats=repeats, warmup=1)
    if not times.correct:
        return times, times, times
    sent = sent_in(mine.step, group), sent_in(other.step, group)
    return times, *(Comparison(True, (pair,) * 3) for pair in (sent, (_kept(mine), _kept(other))))


def _contestant(group: Group, variant: str, seq: int) -> Contestant:
    groups = (group,)
    if variant == "hybrid":
        mesh = Mesh(group, across=group.world_size // 2, node=2)
        groups = mesh.node, mesh.across
    attention, draw = context_attention(variant, *groups), torch.Generator().manual_seed(0)
    positions = attention.positions(seq)
    shapes = [(1, heads, seq, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    own = [torch.randn(shape, generator=draw)[:, :, positions].to(group.device) for shape in shapes]
    return Contestant(attention, [x.requires_grad_() for x in own[:3]], own[3], positions.to(group.device))


def _whole(contestant: Contestant, group: Group, seq: int) -> list[Tensor]:
    """Output and gradients of the whole sequence, in its order."""
    places = group.all_gather(contestant.positions).argsort()
    found = [group.all_gather(x.movedim(2, 0).contiguous()) for x in contestant.step()]
    return [x[places] for x in found]


def _kept(contestant: Contestant) -> int:
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        contestant.attention(*contestant.inputs, positions=contestant.positions)
    return sum(kept.values())
