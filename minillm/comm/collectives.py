"""Collectives from scratch: nothing but messages between two ranks.

    ring reduce-scatter   N-1 rounds; each rank passes a growing partial sum of one chunk to its right neighbour
    ring all-gather       N-1 rounds; each rank passes on the chunk it received last
    ring all-reduce       one after the other: 2(N-1)/N of the tensor per rank, the least possible
    binomial tree         ceil(log2 N) rounds of the whole tensor: few rounds, so good for small tensors
    recursive doubling    log2 N rounds, each with a partner twice as far away
    two-level             ring inside the node, ring across nodes on 1/g of the tensor, ring inside the node
    pairwise all-to-all   N-1 rounds; in round s with the ranks s to the right and s to the left
    parameter server      everything through one rank, to measure why it is not done

A tensor is cut into N chunks as `torch.tensor_split` does, so no size needs padding. Rings that add take a large tensor
slab by slab, a piece of every chunk at a time: a partial sum is still in the cache when it is added and sent on.
`x` may have any shape and layout; reductions and broadcasts work in place. With `async_op=True` each returns a handle.
Patarasuk & Yuan 2009 (ring), Thakur, Rabenseifner & Gropp 2005 (the rest); `predict/comms.py` has the cost of each.
"""

from collections.abc import Sequence

import torch

from minillm.comm.operands import (
    all_to_all_output,
    checked_output,
    collective,
    combiner,
    divide,
    flatten,
    gather_output,
    part_shape,
    write_back,
)
from minillm.comm.operation import Communicator, Message, Ranks

SEGMENT_BYTES = 2 << 20  # the largest message of a ring that adds: pieces of this size stay in the cache


@collective
def ring_reduce_scatter(
    x: torch.Tensor, group: Communicator, op: str = "sum", out: torch.Tensor | None = None
) -> torch.Tensor:
    """This rank's chunk (1-D) of the reduced x; x does not change. Sends (N-1)/N of x. out: where to put the chunk."""
    flat = flatten(x)
    own = flat.tensor_split(group.world_size)[group.rank]
    out = torch.empty_like(own) if out is None else checked_output(out, own, own.numel())
    slabs = _slabs(flat, group)
    for chunks, part in zip(slabs, out.tensor_split(len(slabs)), strict=True):
        _reduce_ring(chunks, part, group, op)
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
    _gather_ring(chunks, group)
    return out


@collective
def ring_all_reduce(x: torch.Tensor, group: Communicator, op: str = "sum") -> torch.Tensor:
    """Reduce-scatter, then all-gather: 2(N-1)/N of x per rank, in 2(N-1) rounds."""
    flat = flatten(x)
    _reduce_and_gather(flat, group, op)
    return write_back(x, flat)


def _reduce_and_gather(flat: torch.Tensor, group: Ranks, op: str) -> None:
    for chunks in _slabs(flat, group):
        own = chunks[group.rank]
        _reduce_ring(chunks, own, group, op)
        divide(own, group.world_size, op)
        _gather_ring(chunks, group)


def _slabs(flat: torch.Tensor, group: Ranks) -> list[tuple[torch.Tensor, ...]]:
    """The N chunks in pieces of up to SEGMENT_BYTES: [(piece 0 of every chunk), (piece 1 of every chunk), ...]."""
    chunks = flat.tensor_split(group.world_size)
    pieces = -(-chunks[0].nbytes // SEGMENT_BYTES) if group.cuts_messages else 1
    return list(zip(*(chunk.tensor_split(max(1, pieces)) for chunk in chunks), strict=True))


def _reduce_ring(chunks: Sequence[torch.Tensor], out: torch.Tensor, group: Ranks, op: str) -> None:
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


def _gather_ring(chunks: Sequence[torch.Tensor], group: Ranks) -> None:
    """Ring all-gather in place: in round s, rank r sends chunk r-s and receives chunk r-s-1."""
    n, r = group.world_size, group.rank
    for s in range(n - 1):
        group.exchange(send=(chunks[(r - s) % n], (r + 1) % n), recv=(chunks[(r - s - 1) % n], (r - 1) % n))


@collective
def tree_broadcast(x: torch.Tensor, group: Communicator, root: int = 0) -> torch.Tensor:
    """Binomial tree: in round k the 2^k ranks that have x send it to the rank 2^k further on. ceil(log2 N) rounds."""
    group.check_rank("root", root)
    flat, n = flatten(x), group.world_size
    place = (group.rank - root) % n  # 0 at the root
    distance = 1
    while distance < n:
        if place < distance and place + distance < n:
            group.exchange(send=(flat, (group.rank + distance) % n))
        elif distance <= place < 2 * distance:
            group.exchange(recv=(flat, (group.rank - distance) % n))
        distance *= 2
    return write_back(x, flat)


@collective
def tree_reduce(x: torch.Tensor, group: Communicator, root: int = 0, op: str = "sum") -> torch.Tensor:
    """The broadcast tree run backwards. x holds the result on root; on other ranks it does not change."""
    group.check_rank("root", root)
    n, place = group.world_size, (group.rank - root) % group.world_size
    total = x.detach().contiguous().flatten()
    combine, buffer = combiner(op, total), torch.empty_like(total)
    total = total.clone() if group.world_size > 1 else total
    distance = 1 << max(0, (n - 1).bit_length() - 1)
    while distance:
        if place < distance and place + distance < n:
            group.exchange(recv=(buffer, (group.rank + distance) % n))
            combine(total, buffer, out=total)
        elif distance <= place < 2 * distance:
            group.exchange(send=(total, (group.rank - distance) % n))
        distance //= 2
    return write_back(x, divide(total, group.world_size, op)) if place == 0 else x


@collective
def recursive_doubling_all_reduce(x: torch.Tensor, group: Communicator, op: str = "sum") -> torch.Tensor:
    """log2 N rounds: in round k, ranks that differ in bit k swap their sums.

    With p = the largest power of two in N, the N-p ranks beyond p first fold their tensor into a rank below and get
    the result from it at the end.
    """
    flat, n, r = flatten(x), group.world_size, group.rank
    combine, buffer = combiner(op, flat), torch.empty_like(flat)
    power = 1 << (n.bit_length() - 1)
    extra = n - power
    if r >= power:
        group.exchange(send=(flat, r - power))
        group.exchange(recv=(flat, r - power))
        return write_back(x, flat)
    if r < extra:
        group.exchange(recv=(buffer, r + power))
        combine(flat, buffer, out=flat)
    for k in range(power.bit_length() - 1):
        group.exchange(send=(flat, r ^ 1 << k), recv=(buffer, r ^ 1 << k))
        combine(flat, buffer, out=flat)
    flat = divide(flat, group.world_size, op)
    if r < extra:
        group.exchange(send=(flat, r + power))
    return write_back(x, flat)


@collective
def hierarchical_all_reduce(x: torch.Tensor, group: Communicator, ranks_per_node: int, op: str = "sum") -> torch.Tensor:
    """Reduce-scatter in each node, all-reduce between ranks with equal places in theirs, all-gather in each node.

    Nodes are `ranks_per_node` consecutive ranks. Each rank sends only 1/g of x to other nodes, all at the same time.
    """
    g, n = ranks_per_node, group.world_size
    if g < 1 or n % g:
        raise ValueError(f"ranks_per_node={g} does not divide the {n} ranks of group {group.name!r}")
    first = group.rank - group.rank % g
    node = _Slice(group, range(first, first + g))
    across = _Slice(group, range(group.rank % g, n, g))
    flat = flatten(x)
    for chunks in _slabs(flat, node):
        _reduce_ring(chunks, chunks[node.rank], node, op)
    chunks = flat.tensor_split(g)
    _reduce_and_gather(divide(chunks[node.rank], g, op), across, op)
    _gather_ring(chunks, node)
    return write_back(x, flat)


@collective
def pairwise_all_to_all(x: torch.Tensor, group: Communicator, out: torch.Tensor | None = None) -> torch.Tensor:
    """[N * n, ...]: part j of rank i becomes part i of rank j. Sends (N-1)/N of x; a rank's own part stays.

    out: where to put it, a tensor like x but not x.
    """
    part_shape(x, group.world_size, "all_to_all")
    out = torch.empty_like(x.contiguous()) if out is None else checked_output(out, x, x.numel())
    _exchange_parts(x.tensor_split(group.world_size), out.tensor_split(group.world_size), group)
    return out


def all_to_all(
    x: torch.Tensor, group: Communicator, output_splits: Sequence[int] | None, input_splits: Sequence[int] | None
) -> torch.Tensor:
    """Pairwise, with parts of input_splits[j] rows for rank j and output_splits[i] rows from rank i."""
    n, out = group.world_size, all_to_all_output(x.contiguous(), output_splits)
    incoming = out.tensor_split(n) if output_splits is None else out.split(list(output_splits))
    _exchange_parts(x.tensor_split(n) if input_splits is None else x.split(list(input_splits)), incoming, group)
    return out


def _exchange_parts(outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], group: Ranks) -> None:
    n, r = group.world_size, group.rank
    incoming[r].copy_(outgoing[r])
    for s in range(1, n):
        to, source = (r + s) % n, (r - s) % n
        group.exchange(send=(outgoing[to], to), recv=(incoming[source], source))


@collective
def parameter_server_all_reduce(x: torch.Tensor, group: Communicator, root: int = 0, op: str = "sum") -> torch.Tensor:
    """Every rank sends x to root, which adds and sends the sum to every rank: 2(N-1) times x through one rank."""
    group.check_rank("root", root)
    flat = flatten(x)
    combine, others = combiner(op, flat), [rank for rank in range(group.world_size) if rank != root]
    if group.rank != root:
        group.exchange(send=(flat, root))
        group.exchange(recv=(flat, root))
        return write_back(x, flat)
    buffer = torch.empty_like(flat)
    for rank in others:
        group.exchange(recv=(buffer, rank))
        combine(flat, buffer, out=flat)
    flat = divide(flat, group.world_size, op)
    for rank in others:
        group.exchange(send=(flat, rank))
    return write_back(x, flat)


class _Slice:
    """Some ranks of a group, numbered from 0, so that a two-level algorithm needs no process groups of its own."""

    def __init__(self, group: Communicator, ranks: range) -> None:
        self._group, self._ranks = group, ranks
        self.world_size, self.rank = len(ranks), ranks.index(group.rank)
        self.cuts_messages, self.scratch = group.cuts_messages, group.scratch

    def exchange(self, send: Message, recv: Message) -> None:
        self._group.exchange((send[0], self._ranks[send[1]]), (recv[0], self._ranks[recv[1]]))
