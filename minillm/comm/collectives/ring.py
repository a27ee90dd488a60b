"""Ring collectives: each rank sends to its right neighbour and receives from its left one.

    reduce-scatter   N-1 rounds; each rank passes on a growing partial sum of one chunk
    all-gather       N-1 rounds; each rank passes on the chunk it received last
    all-reduce       one after the other: 2(N-1)/N of the tensor per rank, the least possible

A tensor is cut into N chunks as `torch.tensor_split` does, so no size needs padding. Rings that add take a large tensor
slab by slab, a piece of every chunk at a time: a partial sum is still in the cache when it is added and sent on.
Patarasuk & Yuan 2009; `predict/comms.py` has the costs.
"""

from collections.abc import Sequence

import torch

from minillm.comm.operands import (
    Communicator,
    checked_output,
    collective,
    combiner,
    divide,
    flatten,
    gather_output,
    write_back,
)

SEGMENT_BYTES = 2 << 20  # the largest message of a ring that adds: pieces of this size stay in the cache


@collective
def ring_reduce_scatter(
    x: torch.Tensor, group: Communicator, op: str = "sum", out: torch.Tensor | None = None
) -> torch.Tensor:
    """This rank's chunk (1-D) of the reduced x; x does not change. Sends (N-1)/N of x. out: where to put the chunk."""
    flat = flatten(x)
    own = flat.tensor_split(group.world_size)[group.rank]
    out = torch.empty_like(own) if out is None else checked_output(out, own, own.numel())
    pieces = slabs(flat, group)
    for chunks, part in zip(pieces, out.tensor_split(len(pieces)), strict=True):
        reduce_ring(chunks, part, group, op)
    return divide(out, group.world_size, op)


@collective
def ring_all_gather(x: torch.Tensor, group: Communicator, out: torch.Tensor | None = None) -> torch.Tensor:
    """[n, ...] on each rank -> [N * n, ...] in rank order. Sends (N-1)/N of the result.

    out: where to put it (contiguous). If x is one of the chunks into which `tensor_split` cuts `out`, ranks may hold
    chunks of different size; otherwise every x has the same shape.
    """
    flat, out = flatten(x), gather_output(x, group.world_size, out)
    chunks = out.flatten().tensor_split(group.world_size)
    own = chunks[group.rank]
    if own.numel() != x.numel():
        raise ValueError(
            f"rank {group.rank} gathers {x.numel()} elements, but its chunk of out {list(out.shape)} has {own.numel()}"
        )
    if own.data_ptr() != flat.data_ptr():
        own.copy_(flat)
    gather_ring(chunks, group)
    return out


@collective
def ring_all_reduce(x: torch.Tensor, group: Communicator, op: str = "sum") -> torch.Tensor:
    """Reduce-scatter, then all-gather: 2(N-1)/N of x per rank, in 2(N-1) rounds."""
    flat = flatten(x)
    reduce_and_gather(flat, group, op)
    return write_back(x, flat)


def reduce_and_gather(flat: torch.Tensor, group: Communicator, op: str) -> None:
    for chunks in slabs(flat, group):
        own = chunks[group.rank]
        reduce_ring(chunks, own, group, op)
        divide(own, group.world_size, op)
        gather_ring(chunks, group)


def slabs(flat: torch.Tensor, group: Communicator) -> list[tuple[torch.Tensor, ...]]:
    """The N chunks in pieces of up to SEGMENT_BYTES: [(piece 0 of every chunk), (piece 1 of every chunk), ...]."""
    chunks = flat.tensor_split(group.world_size)
    pieces = -(-chunks[0].nbytes // SEGMENT_BYTES) if group.cuts_messages else 1
    return list(zip(*(chunk.tensor_split(max(1, pieces)) for chunk in chunks), strict=True))


def reduce_ring(chunks: Sequence[torch.Tensor], out: torch.Tensor, group: Communicator, op: str) -> None:
    """Ring reduce-scatter into `out`, which may be chunk r itself; no other chunk changes.

    In round s, rank r sends its partial sum of chunk r-s-1 and receives that of chunk r-s-2, to which it adds its own.
    """
    combine, n, r = combiner(op, out), group.world_size, group.rank
    buffers = [group.scratch.take(chunks[0]) for _ in range(min(2, n - 1))]  # one arrives, one is sent
    partial = chunks[(r - 1) % n]
    for s in range(n - 1):
        own = chunks[(r - s - 2) % n]
        arriving = buffers[s % 2][: own.nbytes].view(own.dtype)
        group.exchange(send=(partial, (r + 1) % n), recv=(arriving, (r - 1) % n))
        partial = combine(own, arriving, out=arriving if s < n - 2 else out)
    group.scratch.give(buffers)
    if n == 1 and out.data_ptr() != chunks[0].data_ptr():
        out.copy_(chunks[0])


def gather_ring(chunks: Sequence[torch.Tensor], group: Communicator) -> None:
    """Ring all-gather in place: in round s, rank r sends chunk r-s and receives chunk r-s-1."""
    n, r = group.world_size, group.rank
    for s in range(n - 1):
        group.exchange(send=(chunks[(r - s) % n], (r + 1) % n), recv=(chunks[(r - s - 1) % n], (r - 1) % n))
