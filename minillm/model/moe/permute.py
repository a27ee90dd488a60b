"""Rows of tokens sorted by expert, and back.

    pairs of (token, choice)   0a 0b 1a 1b 2a 2b            token t's choices stand at t·k … t·k + k - 1
    their experts               2  0  0  2  -  1            "-": dropped
    order                      1 2 | 5 | 0 3                pairs by expert, each expert's in the order of the tokens
    counts                     2, 1, 2

`place` is the inverse of `order`: order[place[i]] = i for every pair that was not dropped. Both directions are gathers,
and so are their gradients: no sum over rows depends on the order in which threads arrive.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Routes:
    """Where pairs of (token, choice) go. rows: pairs that are not dropped.

    order: [rows], the pair in each sorted row. place: [tokens, choices], the sorted row of each pair; -1 = dropped.
    counts: [num_experts], rows of each expert. all: no pair is dropped.
    """

    order: Tensor
    place: Tensor
    counts: Tensor
    all: bool

    @property
    def choices(self) -> int:
        return self.place.shape[1]

    def to_experts(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [rows, hidden], each token once for each of its experts."""
        return _Linear.apply(x, self._copied, self._added)

    def added(self, rows: Tensor) -> Tensor:
        """rows: [rows, hidden] -> Σ over a token's choices of row, which is what `to_experts` does to a gradient."""
        return _Linear.apply(rows, self._added, self._copied)

    def from_experts(self, rows: Tensor, weights: Tensor) -> Tensor:
        """rows: [rows, hidden]; weights: [tokens, choices] -> Σ over a token's choices of weight · row."""
        return _FromExperts.apply(rows, weights, self)

    def rows_of(self, rows: Tensor, choice: int) -> Tensor:
        """The rows of every token's choice number `choice`, [tokens, hidden]; zero where it was dropped."""
        place = self.place[:, choice]
        if self.all:
            return rows.index_select(0, place)
        if not len(rows):
            return rows.new_zeros(len(place), rows.shape[1])
        return rows.index_select(0, place.clamp(min=0)).masked_fill_((place < 0)[:, None], 0)

    def _copied(self, x: Tensor) -> Tensor:
        return x.index_select(0, self.order // self.choices)

    def _added(self, rows: Tensor) -> Tensor:
        total = self.rows_of(rows, 0)
        for choice in range(1, self.choices):
            total += self.rows_of(rows, choice)
        return total


def sort_by_expert(experts: Tensor, num_experts: int, dropless: bool = False, rows: int | None = None) -> Routes:
    """experts: [tokens, choices] of 0 .. num_experts - 1, or -1 = dropped.

    dropless: the caller knows that there is no -1; rows: how many are not dropped, as far as the caller knows.
    Otherwise the number is read from the device, for which the host waits.
    """
    flat, counts = experts.flatten(), count_by_expert(experts, num_experts)
    if dropless:
        order = flat.argsort(stable=True)
    else:
        rows = int(counts.sum()) if rows is None else rows
        order = torch.where(flat < 0, num_experts, flat).argsort(stable=True)[:rows]
    place = torch.full_like(flat, -1)
    place[order] = torch.arange(len(order), device=flat.device)
    return Routes(order, place.view_as(experts), counts, len(order) == len(flat))


def count_by_expert(experts: Tensor, num_experts: int) -> Tensor:
    """experts: as in `sort_by_expert` -> [num_experts], the pairs that go to each; those dropped are not counted."""
    after = experts.flatten() + 1  # -1, dropped, becomes the place before expert 0
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(0, after, torch.ones_like(after))[1:]


class _Linear(torch.autograd.Function):
    """A linear map of rows and, for its gradient, the transposed one."""

    @staticmethod
    def forward(ctx, rows, linear, transposed):
        ctx.transposed = transposed
        return linear(rows)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.transposed(gradient), None, None


class _FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weights, routes):
        ctx.save_for_backward(rows, weights)
        ctx.routes = routes
        total = routes.rows_of(rows, 0) * weights[:, :1]
        for choice in range(1, routes.choices):
            total.addcmul_(routes.rows_of(rows, choice), weights[:, choice, None])
        return total

    @staticmethod
    def backward(ctx, gradient):
        (rows, weights), routes = ctx.saved_tensors, ctx.routes
        sorted_gradient = routes._copied(gradient)
        of_weights = (sorted_gradient * rows).sum(-1)
        of_rows = sorted_gradient * weights.flatten().index_select(0, routes.order)[:, None]
        found = torch.zeros_like(weights).flatten()
        found[routes.order] = of_weights
        return of_rows, found.view_as(weights), None
