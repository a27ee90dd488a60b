"""Where a tensor-parallel region begins and ends: the conjugate operators (Shoeybi et al. 2019, §3, "f" and "g").

                 outside          inside: each rank with its own weights          outside
    forward      x ──── enter: x as it is ──▶ column, ..., row ──▶ leave: Σ over ranks ──▶ y
    backward     Σ over ranks :enter ◀────── column, ..., row ◀──── dy as it is :leave ◀── dy

What is the same on all ranks goes in as it is, so each rank's gradient of it is a share, to be summed; what comes out
is a sum, so its gradient is every share's. `enter` and `leave` are each other's transpose: what one does forward the
other does backward. `sequence.SequenceRegion` is the same with the sequence split outside.
"""

from typing import Protocol

import torch
from torch import Tensor

from minillm.comm import Group
from minillm.comm.work import Work
from minillm.parallel.tensor_parallel.sequence import SequenceRegion, finished


class Region(Protocol):
    """Both ends of a parallel region, forward and backward, and what is kept of its input."""

    group: Group
    sequence: bool

    def enter(self, x: Tensor) -> Tensor: ...
    def enter_backward(self, dx: Tensor) -> Work: ...
    def leave(self, y: Tensor) -> Tensor: ...
    def leave_backward(self, dy: Tensor) -> Tensor: ...
    def keep(self, x: Tensor, entered: Tensor) -> Tensor: ...
    def kept(self, saved: Tensor) -> Work: ...
    def check(self, seq: int) -> None: ...


class TensorRegion:
    """Nothing in, all-reduce out; backward all-reduce in, nothing out. x and y: [..., hidden], whole on every rank."""

    sequence = False

    def __init__(self, group: Group) -> None:
        self.group = group

    def enter(self, x: Tensor) -> Tensor:
        """x, the same on every rank, as it is."""
        return x

    def enter_backward(self, dx: Tensor) -> Work:
        """Begins to sum dx over the ranks, in place; `wait` returns the sum."""
        return self.group.all_reduce(dx, async_op=True) if self.group.world_size > 1 else finished(dx)

    def leave(self, y: Tensor) -> Tensor:
        """y summed over the ranks, in place."""
        return self.group.all_reduce(y) if self.group.world_size > 1 else y

    def leave_backward(self, dy: Tensor) -> Tensor:
        """dy, the same on every rank, as it is."""
        return dy

    def keep(self, x: Tensor, entered: Tensor) -> Tensor:
        """What to save of a region's input."""
        return entered

    def kept(self, saved: Tensor) -> Work:
        """A handle for what `keep` saved."""
        return finished(saved)

    def check(self, seq: int) -> None:
        """Any sequence will do."""


def region_of(group: Group, sequence: bool = False, regather: bool = True) -> Region:
    """The region of a group; sequence, regather: see `SequenceRegion`."""
    return SequenceRegion(group, regather) if sequence else TensorRegion(group)


def enter(x: Tensor, region: Region) -> Tensor:
    """`region.enter` with its gradient."""
    return _Enter.apply(x, region)


def leave(y: Tensor, region: Region) -> Tensor:
    """`region.leave` with its gradient. It may work in place: y must not be needed by any other backward."""
    return _Leave.apply(y, region)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, region):
        ctx.region = region
        entered = region.enter(x)
        return x.view_as(x) if entered is x else entered

    @staticmethod
    def backward(ctx, dx):
        return ctx.region.enter_backward(dx.clone(memory_format=torch.contiguous_format)).wait(), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, region):
        ctx.region = region
        left = region.leave(y)
        if left is y:
            ctx.mark_dirty(y)
        return left

    @staticmethod
    def backward(ctx, dy):
        return ctx.region.leave_backward(dy), None
