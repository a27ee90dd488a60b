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

The all-gather of a node adds up what the one across nodes has told, so both are known before any row has left, and the
host reads both at once: it waits for the device once per layer, as in one level.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.comm import Group
from minillm.model.moe import sort_by_expert
from minillm.model.moe.permute import count_by_expert
from minillm.parallel.expert_parallel.dispatch import ExpertDispatch, Experts, Table, check_experts
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
        nodes, num_nodes = torch.arange(across.world_size, device=x.device), across.world_size
        there = chosen.div(each, rounding_mode="floor")[:, None] == nodes[:, None]  # [tokens, nodes, choices]
        local = torch.where(there, chosen[:, None] - each * nodes[:, None], -1)
        on_nodes = torch.where(there.any(-1), nodes, -1)
        own = torch.cat([count_by_expert(on_nodes, num_nodes), count_by_expert(chosen, num_nodes * each)])
        gathered = across.all_gather(own[None])  # from; rows to each node, then pairs for each expert
        to_experts = gathered[:, num_nodes:].view(num_nodes, num_nodes, each)[:, across.rank].sum(0)
        table = Table.of(to_experts, self.inside.group)  # rows that go on from here, for which none has to arrive yet
        sizes = torch.cat([gathered[across.rank, :num_nodes], gathered[:, across.rank], table.sizes])
        sizes = sizes.tolist()  # the host waits
        sent, received, inside = sizes[:num_nodes], sizes[num_nodes : 2 * num_nodes], sizes[2 * num_nodes :]
        exchange, route = Exchange(across, sent, received), table.route(inside)
        routes = sort_by_expert(on_nodes, num_nodes, rows=sum(exchange.send_counts))  # a node for an expert
        handle = exchange.start(routes.to_experts(torch.cat([x, weights.to(x.dtype)], dim=1)))
        splits = {"input_splits": exchange.send_counts, "output_splits": exchange.recv_counts}
        numbers = across.all_to_all(local.flatten(0, 1)[routes.order], async_op=True, **splits)

        def answer() -> Tensor:
            rows, row_weights = exchange.finish(handle).split([x.shape[1], weights.shape[1]], dim=1)
            done = self.inside(experts, rows, numbers.wait(), row_weights, route=route)()
            home = exchange.back()
            return routes.added(home.finish(home.start(done)))

        return answer
