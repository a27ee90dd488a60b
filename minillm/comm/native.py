"""The backend's own collectives, with the signatures of minillm's: what a `Group` on NCCL uses.

A backend moves its bytes out of sight, so the ledger gets what the ring algorithm would send, marked as not counted.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from minillm.comm.operands import checked_output, part_shape

if TYPE_CHECKING:
    from minillm.comm.group import Group

_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def _reduce_op(op: str) -> dist.ReduceOp:
    if op not in _OPS:
        raise ValueError(f"op={op!r} is not a reduction: choose one of {', '.join(_OPS)}")
    return _OPS[op]


def _num_bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


def all_reduce(x: torch.Tensor, group: "Group", op: str) -> torch.Tensor:
    dense = x.detach().contiguous()
    dist.all_reduce(dense, _reduce_op(op), group.process_group)
    group.assume(2 * (group.world_size - 1) * _num_bytes(x) // group.world_size)
    if dense.data_ptr() != x.data_ptr():
        x.detach().copy_(dense)
    return x


def broadcast(x: torch.Tensor, group: "Group", root: int) -> torch.Tensor:
    dense = x.detach().contiguous()
    dist.broadcast(dense, group=group.process_group, group_src=root)
    group.assume(0 if group.rank == (root - 1) % group.world_size else _num_bytes(x))
    if dense.data_ptr() != x.data_ptr():
        x.detach().copy_(dense)
    return x


def all_gather(x: torch.Tensor, group: "Group", out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        out = x.new_empty((group.world_size * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.detach().contiguous(), group.process_group)
    group.assume((group.world_size - 1) * _num_bytes(x))
    return out


def reduce_scatter(x: torch.Tensor, group: "Group", op: str, out: torch.Tensor | None = None) -> torch.Tensor:
    part = part_shape(x, group, "reduce_scatter")
    out = x.new_empty(part) if out is None else checked_output(out, x, math.prod(part)).view(part)
    dist.reduce_scatter_tensor(out, x.detach().contiguous(), _reduce_op(op), group.process_group)
    group.assume((group.world_size - 1) * _num_bytes(out))
    return out


def all_to_all(x: torch.Tensor, group: "Group") -> torch.Tensor:
    x = x.detach().contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group.process_group)
    group.assume((group.world_size - 1) * _num_bytes(x) // group.world_size)
    return out


COLLECTIVES: dict[str, Callable[..., Any]] = {
    "all_reduce": all_reduce,
    "broadcast": broadcast,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
}
