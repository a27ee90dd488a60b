"""Rows that travel between ranks inside the graph: an all-to-all of unequal parts, whose gradient takes the way back.

                leave                                       arrive
    forward     launch: rows by rank they go to    ....     wait: rows by rank they come from
    backward    wait                               ....     launch: gradients return to where the rows came from

What a layer computes between `leave` and `arrive` overlaps with the journey. Autograd runs what was recorded later
first, so the backward of that work overlaps with the gradients' journey as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from minillm.comm import Group
from minillm.comm.operation import Work


class Exchange:
    """One all-to-all and its gradient. to[j]: rows for rank j of the group; come[i]: rows from rank i.

    `arrive(leave(rows))`; what lies between the two is a ticket without elements, which carries the gradient's order.
    """

    def __init__(self, group: Group, to: Sequence[int], come: Sequence[int]) -> None:
        self.group, self.to, self.come = group, list(to), list(come)
        self._under_way: Work | None = None

    def leave(self, rows: Tensor) -> Tensor:
        """rows: [sum(to), ...], those for rank 0 first. Returns the ticket."""
        return _Leave.apply(rows, self)

    def arrive(self, ticket: Tensor) -> Tensor:
        """[sum(come), ...], those of rank 0 first."""
        return _Arrive.apply(ticket, self)

    def back(self) -> Exchange:
        """The way back of these rows."""
        return Exchange(self.group, self.come, self.to)

    def launch(self, rows: Tensor, to: Sequence[int], come: Sequence[int]) -> None:
        self._under_way = self.group.all_to_all(rows, async_op=True, output_splits=come, input_splits=to)

    def wait(self) -> Tensor:
        work, self._under_way = self._under_way, None
        return work.wait()


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.launch(rows, exchange.to, exchange.come)
        return rows.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ticket: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.wait(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        exchange.launch(gradient.contiguous(), exchange.come, exchange.to)
        return gradient.new_empty(0), None
