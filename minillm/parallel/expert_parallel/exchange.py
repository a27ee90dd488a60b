"""Rows that travel between ranks inside the graph: an all-to-all of unequal parts, whose gradient takes the way back.

                start                                       finish
    forward     launch: rows by rank they go to    ....     wait: rows by rank they come from
    backward    wait                               ....     launch: gradients return to where the rows came from

What a layer computes between `start` and `finish` overlaps with the journey. Autograd runs what was recorded later
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
    """One all-to-all and its gradient. send_counts[j]: rows for rank j of the group; recv_counts[i]: rows from rank i.

    `finish(start(rows))`; what lies between the two is a handle without elements, which carries the gradient's order.
    """

    def __init__(self, group: Group, send_counts: Sequence[int], recv_counts: Sequence[int]) -> None:
        self.group, self.send_counts, self.recv_counts = group, list(send_counts), list(recv_counts)
        self._under_way: Work | None = None

    def start(self, rows: Tensor) -> Tensor:
        """rows: [sum(send_counts), ...], those for rank 0 first. Returns the handle."""
        return _Start.apply(rows, self)

    def finish(self, handle: Tensor) -> Tensor:
        """Waits for the rows: [sum(recv_counts), ...], those of rank 0 first."""
        return _Finish.apply(handle, self)

    def back(self) -> Exchange:
        """The exchange that returns these rows to where they came from."""
        return Exchange(self.group, self.recv_counts, self.send_counts)

    def launch(self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> None:
        self._under_way = self.group.all_to_all(
            rows, async_op=True, output_splits=recv_counts, input_splits=send_counts
        )

    def wait(self) -> Tensor:
        work, self._under_way = self._under_way, None
        return work.wait()


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.launch(rows, exchange.send_counts, exchange.recv_counts)
        return rows.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, handle: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.wait(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        exchange.launch(gradient.contiguous(), exchange.recv_counts, exchange.send_counts)
        return gradient.new_empty(0), None
