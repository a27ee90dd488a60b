"""Pairwise all-to-all: N-1 rounds; in round s with the ranks s to the right and s to the left."""

from collections.abc import Sequence

import torch

from minillm.comm.operands import Communicator, all_to_all_output, checked_output, collective, part_shape


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


def _exchange_parts(outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], group: Communicator) -> None:
    n, r = group.world_size, group.rank
    incoming[r].copy_(outgoing[r])
    for s in range(1, n):
        to, source = (r + s) % n, (r - s) % n
        group.exchange(send=(outgoing[to], to), recv=(incoming[source], source))
