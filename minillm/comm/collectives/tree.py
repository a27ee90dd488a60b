"""Binomial trees: ceil(log2 N) rounds of the whole tensor. Few rounds, so good for small tensors."""

import torch

from minillm.comm.operands import Communicator, collective, combiner, divide, flatten, write_back


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
