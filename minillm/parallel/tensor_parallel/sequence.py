"""Sequence parallelism: what lies between the parallel regions is split along the sequence.

              [b, s/t, h]           [b, s, h]                     [b, s, h]           [b, s/t, h]
    forward     norm ───▶ all-gather ───▶ column ───▶ row ───▶ reduce-scatter ───▶ + residual
    backward    norm ◀── reduce-scatter ◀─ column ◀─── row ◀──── all-gather ◀────── + residual

An all-reduce is a reduce-scatter and an all-gather: the two halves of what tensor parallelism sends anyway move to the
two ends of a region, and what lies between regions (norms, residual stream) is computed and kept 1/t each. A norm's
weight then sees 1/t of the tokens, so its gradient is `partial` (`splits.sum_partial`). Korthikanti et al. 2022, §4.2.
"""

from torch import Tensor

from minillm.comm import Group
from minillm.comm.work import Work


class SequenceRegion:
    """All-gather in, reduce-scatter out, of tensors [batch, seq, hidden] or [seq, hidden]. See `regions.TensorRegion`.

    regather: keep a region's input as this rank's positions and gather it once more in backward, for the weight
    gradients, as Megatron does: a third all-gather per region for 1/t of the memory. False: keep it gathered.
    """

    sequence = True

    def __init__(self, group: Group, regather: bool = True) -> None:
        self.group, self.regather = group, regather and group.world_size > 1

    def enter(self, x: Tensor) -> Tensor:
        """This rank's positions -> all positions."""
        return self._gather(x).wait()

    def enter_backward(self, dx: Tensor) -> Work:
        """Begins to sum dx, all positions, over the ranks; `wait` returns this rank's positions of it."""
        return self._scatter(dx, async_op=True)

    def leave(self, y: Tensor) -> Tensor:
        """Shares of y, all positions -> this rank's positions of their sum."""
        return self._scatter(y).wait()

    def leave_backward(self, dy: Tensor) -> Tensor:
        """This rank's positions -> all positions."""
        return self._gather(dy).wait()

    def keep(self, x: Tensor, entered: Tensor) -> Tensor:
        """What to save of a region's input: x, or what it became."""
        return x if self.regather else entered

    def kept(self, saved: Tensor) -> Work:
        """Begins to fetch all positions of what `keep` saved."""
        return self._gather(saved, async_op=True) if self.regather else finished(saved)

    def check(self, seq: int) -> None:
        """ValueError unless `seq` positions divide over the ranks."""
        t = self.group.world_size
        if seq % t:
            raise ValueError(
                f"a sequence of {seq} tokens does not divide over {t} sequence-parallel ranks: pad it to "
                f"{-(-seq // t) * t} or leave sequence parallelism off."
            )

    def _gather(self, x: Tensor, async_op: bool = False) -> Work:
        if self.group.world_size == 1:
            return finished(x)
        rows = x.contiguous()[None]  # [1, ..., seq / t, hidden] -> [t, ..., seq / t, hidden]
        gathered = self.group.all_gather(rows, async_op=async_op)
        return then(gathered if async_op else finished(gathered), _sequence)

    def _scatter(self, x: Tensor, async_op: bool = False) -> Work:
        if self.group.world_size == 1:
            return finished(x)
        self.check(x.shape[-2])
        rows = x.unflatten(-2, (self.group.world_size, -1)).movedim(-3, 0).contiguous()
        summed = self.group.reduce_scatter(rows, async_op=async_op)
        return then(summed if async_op else finished(summed), lambda part: part[0])


def _sequence(rows: Tensor) -> Tensor:
    """[t, ..., seq / t, hidden], one of each rank -> [..., seq, hidden]."""
    return rows.movedim(0, -3).flatten(-3, -2)


def finished(value: Tensor) -> Work:
    """A handle whose `wait` returns `value` at once."""
    return Work(lambda: value, lambda: True, ())


def then(handle: Work, function) -> Work:
    """A handle whose `wait` returns function(what `handle` returns)."""
    return Work(lambda: function(handle.wait()), handle.done, ())
