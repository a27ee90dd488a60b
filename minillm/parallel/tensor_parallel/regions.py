"""Where a tensor-parallel region begins and ends: pairs of conjugate operators, named as in Megatron-LM.

                 outside                    inside: each rank with its own weights                outside
    forward      x ── copy_to: as it is ─────▶ column, ..., row ──▶ reduce_from: Σ over ranks ────▶ y
    backward     Σ over ranks ◀─────────────── column, ..., row ◀─────────────────── dy as it is

What is the same on all ranks goes in as it is, so each rank's gradient of it is a share of a sum; what comes out is a
sum, so its gradient is the gradient of every share (Shoeybi et al. 2019, §3, "f" and "g"). Sequence parallelism splits
what lies outside along the sequence, 1/t of the positions on each rank (Korthikanti et al. 2022, §4.2):

    forward      x ── gather_from: all-gather ─▶ column, ..., row ─▶ scatter_to: reduce-scatter ───▶ y
    backward     reduce-scatter ◀─────────────── column, ..., row ◀───────────────────── all-gather

An all-reduce is a reduce-scatter and an all-gather, so the bytes stay the same, while norms and the residual stream are
computed and kept 1/t each. A norm's weight then sees 1/t of the tokens: its placement is `Partial`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.comm import Group
from minillm.comm.operation import Work


@dataclass(frozen=True, eq=False)
class Region:
    """Both ends of a parallel region. Outside, tensors are [..., seq, hidden], or [..., seq / t, hidden] if `sequence`.

    regather: with `sequence`, keep a region's input as this rank's positions and gather it once more in backward, as
        Megatron does: a third all-gather per region for 1/t of the memory. False: keep it gathered.
    """

    group: Group
    sequence: bool = False
    regather: bool = True

    def begin(self, x: Tensor) -> Tensor:
        """The input as column layers read it."""
        return self._gather(x).wait() if self.sequence else x

    def begin_backward(self, dx: Tensor) -> Work:
        """Begins to sum this rank's share of the input's gradient, in place without `sequence`; `wait` returns the sum,
        with `sequence` this rank's positions of it."""
        if self.group.world_size == 1:
            return finished(dx)
        return self._scatter(dx, async_op=True) if self.sequence else self.group.all_reduce(dx, async_op=True)

    def end(self, y: Tensor) -> Tensor:
        """The sum of the row layers' shares, in place without `sequence`; with it, this rank's positions of the sum."""
        if self.group.world_size == 1:
            return y
        return self._scatter(y).wait() if self.sequence else self.group.all_reduce(y)

    def end_backward(self, dy: Tensor) -> Tensor:
        """The gradient of this rank's share."""
        return self._gather(dy).wait() if self.sequence else dy

    def to_save(self, x: Tensor, begun: Tensor) -> Tensor:
        """What to save for backward of a region's input: x, or what `begin` made of it."""
        return x if self.sequence and self.regather else begun

    def restore(self, saved: Tensor) -> Work:
        """Begins to fetch the column layers' input from what `to_save` chose."""
        return self._gather(saved, async_op=True) if self.sequence and self.regather else finished(saved)

    def own(self, x: Tensor) -> Tensor:
        """x: [..., seq, hidden], the same on every rank -> this rank's positions, [..., seq / t, hidden]."""
        self.check(x.shape[-2])
        return x.unflatten(-2, (self.group.world_size, -1)).select(-3, self.group.rank).contiguous()

    def check(self, seq: int) -> None:
        """ValueError unless `seq` positions can be dealt out."""
        t = self.group.world_size
        if self.sequence and seq % t:
            raise ValueError(
                f"a sequence of {seq} tokens does not divide over {t} sequence-parallel ranks: pad it to "
                f"{-(-seq // t) * t} or leave sequence parallelism off."
            )

    def _gather(self, x: Tensor, async_op: bool = False) -> Work:
        """[..., seq / t, hidden] on each rank -> [..., seq, hidden]."""
        if self.group.world_size == 1:
            return finished(x)
        gathered = self.group.all_gather(x.contiguous()[None], async_op=async_op)
        return then(gathered if async_op else finished(gathered), lambda rows: rows.movedim(0, -3).flatten(-3, -2))

    def _scatter(self, x: Tensor, async_op: bool = False) -> Work:
        """Shares [..., seq, hidden] -> this rank's [..., seq / t, hidden] of their sum."""
        self.check(x.shape[-2])
        rows = x.unflatten(-2, (self.group.world_size, -1)).movedim(-3, 0).contiguous()
        summed = self.group.reduce_scatter(rows, async_op=async_op)
        return then(summed if async_op else finished(summed), lambda part: part[0])


# The four operators with their gradients. layers.py fuses them with its products; these are for layers of your own.


def copy_to(x: Tensor, group: Group) -> Tensor:
    """x, the same on every rank, as it is; its gradient is summed over the ranks."""
    return _Begin.apply(x, Region(group))


def reduce_from(y: Tensor, group: Group) -> Tensor:
    """y summed over the ranks, in place: no other backward may need y. Its gradient passes as it is."""
    return end(y, Region(group))


def gather_from(x: Tensor, group: Group) -> Tensor:
    """x: [..., seq / t, hidden] -> [..., seq, hidden]; its gradient is reduce-scattered."""
    return _Begin.apply(x, Region(group, sequence=True))


def scatter_to(y: Tensor, group: Group) -> Tensor:
    """Shares [..., seq, hidden] -> this rank's positions of their sum; its gradient is gathered."""
    return end(y, Region(group, sequence=True))


def end(y: Tensor, region: Region) -> Tensor:
    """`reduce_from` or `scatter_to`, as the region says."""
    return _End.apply(y, region)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, region):
        ctx.region = region
        begun = region.begin(x)
        return x.view_as(x) if begun is x else begun

    @staticmethod
    def backward(ctx, dx):
        return ctx.region.begin_backward(dx.clone(memory_format=torch.contiguous_format)).wait(), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, region):
        ctx.region = region
        ended = region.end(y)
        if ended is y:
            ctx.mark_dirty(y)
        return ended

    @staticmethod
    def backward(ctx, dy):
        return ctx.region.end_backward(dy), None


def finished(value: Tensor) -> Work:
    """A handle whose `wait` returns `value` without waiting."""
    return Work(lambda: value)


def then(work: Work, function) -> Work:
    """A handle whose `wait` returns function(what `work` returns)."""
    return Work(lambda: function(work.wait()), work.done)
