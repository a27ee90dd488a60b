"""Tokens to the ranks that hold their experts, and what these make of them back: `MoE.dispatch` for several ranks.

    rows by expert        a a b | c d d          of this rank's tokens; experts a b live here, c d on rank 1
      ── all-to-all ──▶   a a b   a b b          this rank's part of both ranks' rows, by source
    rows by own expert    a a a | b b b          sorted once more, so that an expert's rows lie together
      experts             one product per expert
      ◀── all-to-all ──   a a b | c d d          both permutations back

Every rank learns first how many rows come, by an all-gather of 8 · E bytes per rank, which its host reads: the one time
in a layer that it waits for the device, since messages need their sizes, and experts that are computed one after the
other need theirs. (A fixed capacity per expert would need no sizes, and drops rows or pads.) The two all-to-alls then
carry existing rows only: T·k·h·b·(N-1)/N bytes each if all experts are chosen equally often. Dropped rows do not
travel, and an expert without rows still has a gradient, of zeros. An expert's rows are those of one process that has
all tokens, in the same order. Lepikhin et al. 2020, "GShard", §3; Rajbhandari et al. 2022, "DeepSpeed-MoE".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from minillm.comm import Group
from minillm.model.moe import sort_by_expert
from minillm.model.moe.permute import count_by_expert
from minillm.parallel.expert_parallel.exchange import Exchange

Experts = Callable[[Tensor, Tensor, list[int]], Tensor]
"""(rows: [n, hidden] sorted by expert, counts: [experts of this rank], the same on the host) -> [n, hidden]"""


def check_experts(num_experts: int, ranks: int) -> None:
    """Raises ValueError unless every rank gets equally many experts."""
    if ranks < 1 or num_experts % ranks:
        raise ValueError(
            f"{num_experts} experts do not divide over {ranks} expert-parallel ranks: use a number of ranks that "
            "divides them."
        )


class ExpertDispatch:
    """The dispatch of a layer whose experts lie over the ranks of a group: rank r has the r-th part of them.

    What is computed between the two calls of `MoE.forward`, its shared experts, overlaps with the rows' way to their
    experts, and in backward with their gradients' way back. ValueError for experts that do not divide over the ranks.
    """

    def __init__(self, group: Group, num_experts: int) -> None:
        check_experts(num_experts, group.world_size)
        self.group, self.num_experts = group, num_experts

    def __call__(
        self,
        experts: Experts,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        dropless: bool = False,
        route: Route | None = None,
    ) -> Callable[[], Tensor]:
        """See `MoE.dispatch`. Every rank of the group makes both calls, with as few as no tokens. route: if the ranks
        know it already."""
        if route is None:
            table = Table.of(count_by_expert(chosen, self.num_experts), self.group)
            route = table.route(table.sizes.tolist())  # the host waits
        routes = sort_by_expert(chosen, self.num_experts, dropless, sum(route.exchange.send_counts))
        handle = route.exchange.start(routes.to_experts(x))

        def answer() -> Tensor:
            arrived = _Reorder.apply(route.exchange.finish(handle), route.regroup, route.undo)
            done = _Reorder.apply(experts(arrived, route.counts, route.known), route.undo, route.regroup)
            home = route.exchange.back()
            rows = home.finish(home.start(done))
            return routes.from_experts(rows, weights.to(rows.dtype))

        return answer


@dataclass(frozen=True, eq=False)
class Route:
    """Which rows a rank receives.

    counts: [experts / N], rows of each expert of this rank; known: the same on the host. regroup: [rows received], the
    place among rows by source of each row by own expert; undo: its inverse.
    """

    counts: Tensor
    known: list[int]
    regroup: Tensor
    undo: Tensor
    exchange: Exchange


@dataclass(frozen=True, eq=False)
class Table:
    """How many rows go where, on the device. received: [N, experts / N], this rank's, by source and own expert; sizes:
    [2 · N + experts / N], rows that it sends to each rank, that it gets from each, and of each own expert."""

    group: Group
    received: Tensor
    sizes: Tensor

    @staticmethod
    def of(counts: Tensor, group: Group) -> Table:
        """counts: [num_experts], this rank's rows for each. Every rank of the group calls it."""
        table = group.all_gather(counts[None]).view(group.world_size, group.world_size, -1)  # from, to, expert there
        received = table[:, group.rank]
        return Table(group, received, torch.cat([table[group.rank].sum(-1), received.sum(-1), received.sum(0)]))

    def route(self, sizes: list[int]) -> Route:
        """sizes: those of the table, as the host knows them."""
        received, n = self.received, self.group.world_size
        sent, got, known = sizes[:n], sizes[n : 2 * n], sizes[2 * n :]
        expert = torch.arange(received.shape[1], device=received.device).expand_as(received)
        by_source = expert.flatten().repeat_interleave(received.flatten(), output_size=sum(got))
        regroup = by_source.argsort(stable=True)
        return Route(self.sizes[2 * n :], known, regroup, inverse(regroup), Exchange(self.group, sent, got))


def inverse(order: Tensor) -> Tensor:
    """The inverse of a permutation of 0 .. n - 1."""
    return torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))


class _Reorder(torch.autograd.Function):
    """rows[order]; the gradient is a gather as well, so that nothing is added up in an order of chance."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, undo: Tensor) -> Tensor:
        ctx.undo = undo
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, ctx.undo), None, None
