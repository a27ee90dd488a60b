"""Two levels: a token crosses to a node once, however many of its experts are there, and goes on inside it.

    flat        rank 0 of node 0 ── a row per expert ──▶ every rank of node 1        k rows cross
    two-level   rank 0 of node 0 ── a row per node ────▶ rank 0 of node 1 ──▶ the ranks of its node that it needs
                                                         ◀── their weighted sum goes back as one row

The slow links between nodes carry fewer rows (`predict.moe.crossing_rows`) in fewer messages, the fast ones inside a
node more. It is `dispatch` inside an exchange over nodes: the rank that a row reaches first acts for its token there.
With a router that chooses experts of at most M nodes, at most M rows cross (DeepSeek-AI 2024, "DeepSeek-V3", §3.2.2).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.comm import Group
from minillm.parallel.expert_parallel.balance import check_experts
from minillm.parallel.expert_parallel.dispatch import Experts, dispatch
from minillm.parallel.expert_parallel.exchange import Exchange


def dispatch_over_nodes(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: Experts,
    num_experts: int,
    node: Group,
    across: Group,
    beside: Callable[[], Tensor] | None = None,
) -> Tensor:
    """`dispatch`, for experts that lie over `across.world_size` nodes of `node.world_size` ranks, node by node.

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

    rows = torch.cat([x[token], torch.where(mine, weights[token], 0).to(x.dtype)], dim=1)
    ticket = exchange.leave(rows)
    shared = beside() if beside else None
    arrived = exchange.arrive(ticket)
    local = across.all_to_all(local, output_splits=exchange.come, input_splits=exchange.to)
    here, here_weights = arrived.split([x.shape[1], chosen.shape[1]], dim=1)
    done = dispatch(here, local, here_weights, experts, each, node)
    home = exchange.back()
    out = torch.zeros_like(x).index_add(0, token, home.arrive(home.leave(done)))
    return out if shared is None else out + shared
