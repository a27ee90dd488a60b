"""Recursive doubling: log2 N rounds of the whole tensor, each with a partner twice as far away."""

import torch

from minillm.comm.operands import Communicator, collective, combiner, divide, flatten, write_back


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
