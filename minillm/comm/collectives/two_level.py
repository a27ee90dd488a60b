"""Two levels: a ring inside each node, a ring across nodes on 1/g of the tensor, a ring inside each node."""

import torch

from minillm.comm.collectives.ring import gather_ring, reduce_and_gather, reduce_ring, slabs
from minillm.comm.operands import Communicator, collective, divide, flatten, write_back
from minillm.comm.operation import Message


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
    for chunks in slabs(flat, node):
        reduce_ring(chunks, chunks[node.rank], node, op)
    chunks = flat.tensor_split(g)
    reduce_and_gather(divide(chunks[node.rank], g, op), across, op)
    gather_ring(chunks, node)
    return write_back(x, flat)


class _Slice:
    """Some ranks of a group, numbered from 0: all that rings need of a Group, without process groups of their own."""

    def __init__(self, group: Communicator, ranks: range) -> None:
        self._group, self._ranks = group, ranks
        self.world_size, self.rank = len(ranks), ranks.index(group.rank)
        self.cuts_messages, self.scratch = group.cuts_messages, group.scratch

    def exchange(self, send: Message, recv: Message) -> None:
        self._group.exchange((send[0], self._ranks[send[1]]), (recv[0], self._ranks[recv[1]]))
