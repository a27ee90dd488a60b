"""Two levels: a token crosses to a node once, however many of its experts are there, and goes on inside it.

    flat        rank 0 of node 0 ── a row per expert ──▶ every rank of node 1        k rows cross
    two-level   rank 0 of node 0 ── a row per node ────▶ rank 0 of node 1 ──▶ the ranks of its node that it needs
                                                         ◀── their weighted sum goes back as one row

The slow links between nodes carry fewer rows (`predict.moe.crossing_rows`) in fewer messages, the fast ones inside a
node more. It is `ExpertDispatch` inside an exchange over nodes: the rank that a row reaches first acts for its token
there. With a router that chooses experts of at most M nodes, at most M rows cross (DeepSeek-AI 2024, "DeepSeek-V3",
§3.2.2).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.comm import Group
from minillm.model.moe import sort_by_expert
from minillm.parallel.expert_parallel.balance import check_experts
from minillm.parallel.expert_parallel.dispatch import ExpertDispatch, Experts
from minillm.parallel.expert_parallel.exchange import Exchange


def route(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: Experts,
    num_experts: int,
    group: Group,
    beside: Callable[[], Tensor] | None = None,
) -> Tensor:
    """x: [tokens, hidden]; chosen, weights: [tokens, k] -> Σ over k of weight · expert(x), [tokens, hidden].

    chosen: numbers of experts, -1 where dropped; rank r of the group has the r-th part of them. experts: see `Experts`.
    beside: what is computed while rows travel to their experts, [tokens, hidden], and added: the shared experts.
    """
    routes = sort_by_expert(chosen, num_experts)
    answer = ExpertDispatch(group)(experts, routes.to_experts(x), routes.counts)
    shared = beside() if beside else None
    out = routes.from_experts(answer(), weights)
    return out if shared is None else out + shared


def route_over_nodes(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: Experts,
    num_experts: int,
    node: Group,
    across: Group,
    beside: Callable[[], Tensor] | None = None,
) -> Tensor:
    """`route`, for experts that lie over `across.world_size` nodes of `node.world_size` ranks, node by node.

    node: the ranks of this one's node; across: those with its place in the other nodes.
    """
    check_experts(num_experts, node.world_size * across.world_size)
    each = num_experts // across.world_size  # experts of a node
    homes = torch.arange(across.world_size, device=x.device)
    there = (chosen.div(each, rounding_mode="floor") == homes[:, None, None]) & (chosen >= 0)  # [nodes, tokens, k]
    to_node, token = there.any(-1).nonzero(as_tuple=True)  # by node, then by token
    mine = there[to_node, token]
    local = torch.where(mine, chosen[token] - each * to_node[:, None], -1)
    own = torch.bincount(to_node, minlength=across.world_size)
    table = across.all_gather(own[None])
    exchange = Exchange(across, table[across.rank].tolist(), table[:, across.rank].tolist())  # the host waits

    ticket = exchange.leave(torch.cat([x[token], torch.where(mine, weights[token], 0)], dim=1))
    shared = beside() if beside else None
    arrived = exchange.arrive(ticket)
    local = across.all_to_all(local, output_splits=exchange.come, input_splits=exchange.to)
    here, here_weights = arrived.split([x.shape[1], chosen.shape[1]], dim=1)
    done = route(here, local, here_weights, experts, each, node)
    home = exchange.back()
    out = torch.zeros_like(x).index_add(0, token, home.arrive(home.leave(done)))
    return out if shared is None else out + shared
