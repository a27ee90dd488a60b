"""Everything through one rank, to measure why it is not done."""

import torch

from minillm.comm.operands import Communicator, collective, combiner, divide, flatten, write_back


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
