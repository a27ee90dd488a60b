"""Two levels: a token crosses to a node once, however many of its experts are there, and goes on inside it.

    flat        rank 0 of node 0 ── a row per expert ──▶ every rank of node 1        k rows cross
    two-level   rank 0 of node 0 ── a row per node ────▶ rank 0 of node 1 ──▶ the ranks of its node that it needs
                                                         ◀── their weighted sum goes back as one row

The slow links between nodes carry fewer rows (`predict.training.moe.crossing_rows`) in fewer messages, the fast
ones inside a node more. It is `ExpertDispatch` inside an exchange over nodes: the rank that a row reaches first acts
for its token there. With a router that chooses experts of at most M nodes, at most M rows cross (DeepSeek-AI 2024,
"DeepSeek-V3", §3.2.2).

A layer's collectives (an all-gather tells how many rows come; numbers of experts have no gradient):

                     forward                                                              backward
    across nodes     all-gather, 3 all-to-alls: rows + weights, their experts, rows back  2 all-to-alls
    inside a node    all-gather, 2 all-to-alls: rows, rows back                           2 all-to-alls
"""

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.comm import Group
from minillm.model.moe import sort_by_expert
from minillm.parallel.expert_parallel.dispatch import ExpertDispatch, Experts, check_experts
from minillm.parallel.expert_parallel.exchange import Exchange


class NodeDispatch:
    """`ExpertDispatch`, for experts that lie over `across.world_size` nodes of `node.world_size` ranks, node by node.

    node: the ranks of this one's node; across: those with its place in the other nodes. Shared experts overlap with
    the way to the nodes. ValueError for experts that do not divide over the ranks.
    """

    def __init__(self, node: Group, across: Group, num_experts: int) -> None:
        check_experts(num_experts, node.world_size * across.world_size)
        self.across, self.experts_per_node = across, num_experts // across.world_size
        self.inside = ExpertDispatch(node, self.experts_per_node)

    def __call__(
        self, experts: Experts, x: Tensor, chosen: Tensor, weights: Tensor, dropless: bool = False
    ) -> Callable[[], Tensor]:
        """See `MoE.dispatch`. Every rank of all nodes makes both calls, with as few as no tokens."""
        across, each = self.across, self.experts_per_node
        nodes = torch.arange(across.world_size, device=x.device)
        there = chosen.div(each, rounding_mode="floor")[:, None] == nodes[:, None]  # [tokens, nodes, choices]
        local = torch.where(there, chosen[:, None] - each * nodes[:, None], -1)
        routes = sort_by_expert(torch.where(there.any(-1), nodes, -1), across.world_size)  # a node for an expert
        table = across.all_gather(routes.counts[None])  # from, to
        exchange = Exchange(across, table[across.rank].tolist(), table[:, across.rank].tolist())  # the host waits
        handle = exchange.start(routes.to_experts(torch.cat([x, weights.to(x.dtype)], dim=1)))
        splits = {"input_splits": exchange.send_counts, "output_splits": exchange.recv_counts}
        numbers = across.all_to_all(local.flatten(0, 1)[routes.order], async_op=True, **splits)

        def answer() -> Tensor:
            rows, row_weights = exchange.finish(handle).split([x.shape[1], weights.shape[1]], dim=1)
            done = self.inside(experts, rows, numbers.wait(), row_weights)()
            home = exchange.back()
            return routes.added(home.finish(home.start(done)))

        return answer
