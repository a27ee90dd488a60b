"""Tokens to the ranks that hold their experts, and what the experts make of them back, weighted and summed.

    this rank's tokens   t0 t1 t2       k = 2 experts each, N = 2 ranks with experts 0 1 | 2 3
    chosen               0 3   1 0   3 2
    rows by expert       t0 t1 | t1 || t2 | t0 t2          a row per token and expert: the permutation
      ── all-to-all ──▶  this rank's part, and the other's
    rows by expert       t0 t1 u0 | t1 u2                  sorted once more: by own expert, then by source rank
      experts            one matrix product per expert
      ◀── all-to-all ──  and both permutations back
    Σ over k             weight · row

Every rank learns first how many rows come, by an all-gather of 8 · E bytes per rank, for which its host waits; the two
all-to-alls then carry only rows that are there: T·k·h·b·(N-1)/N bytes each if experts are asked for equally. Dropped
pairs (`chosen` < 0) do not travel. Lepikhin et al. 2020, "GShard", §3; Rajbhandari et al. 2022, "DeepSpeed-MoE", §5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.comm import Group
from minillm.parallel.expert_parallel.balance import check_experts
from minillm.parallel.expert_parallel.exchange import Exchange

Experts = Callable[[Tensor, Tensor], Tensor]
"""(rows: [n, hidden] sorted by expert, counts: [experts of this rank]) -> [n, hidden]"""


@dataclass(frozen=True)
class Route:
    """Where this rank's rows go and which it gets.

    order: [rows sent], the (token, choice) pairs by expert, as places in `chosen.flatten()`; regroup: [rows received],
    what sorts rows by source into rows by own expert; counts: [experts / N], rows of each of these.
    """

    order: Tensor
    regroup: Tensor
    counts: Tensor
    exchange: Exchange

    @staticmethod
    def of(chosen: Tensor, num_experts: int, group: Group) -> Route:
        """chosen: [tokens, k] of expert numbers, below 0 where dropped. Every rank of the group calls it."""
        check_experts(num_experts, group.world_size)
        flat = chosen.flatten()
        order = permutation(flat)
        own = torch.bincount(flat[order], minlength=num_experts)
        table = group.all_gather(own[None]).view(group.world_size, group.world_size, -1)  # from, to, expert there
        to, come = table[group.rank].sum(-1).tolist(), table[:, group.rank].sum(-1).tolist()  # the host waits
        received = table[:, group.rank]
        expert = torch.arange(received.shape[1], device=chosen.device).expand_as(received)
        by_source = expert.flatten().repeat_interleave(received.flatten())
        regroup = by_source.argsort(stable=True)
        return Route(order, regroup, received.sum(0), Exchange(group, to, come))


def permutation(flat: Tensor) -> Tensor:
    """flat: [pairs] of expert numbers -> places of those that are not dropped, by expert, in order of tokens."""
    order = flat.argsort(stable=True)
    return order[(flat < 0).sum() :]


def inverse(order: Tensor) -> Tensor:
    """Of a permutation of 0 .. n - 1."""
    return torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))


def dispatch(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: Experts,
    num_experts: int,
    group: Group,
    beside: Callable[[], Tensor] | None = None,
) -> Tensor:
    """x: [tokens, hidden]; chosen, weights: [tokens, k] -> Σ over k of weight · expert(x), [tokens, hidden].

    Rank r of the group has the r-th part of the experts. experts: see `Experts`; it is called without rows, too.
    beside: what is computed while rows travel to their experts, [tokens, hidden], and added: the shared experts.
    """
    route = Route.of(chosen, num_experts, group)
    rows = x.index_select(0, route.order.div(chosen.shape[1], rounding_mode="floor"))
    ticket = route.exchange.leave(rows)
    shared = beside() if beside else None
    arrived = route.exchange.arrive(ticket).index_select(0, route.regroup)
    done = experts(arrived, route.counts).index_select(0, inverse(route.regroup))
    home = route.exchange.back()
    returned = home.arrive(home.leave(done))
    pairs = returned.new_zeros(chosen.numel(), x.shape[1]).index_copy(0, route.order, returned)
    out = (pairs.view(*chosen.shape, x.shape[1]) * weights[..., None]).sum(1).to(x.dtype)
    return out if shared is None else out + shared
