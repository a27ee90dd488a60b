"""Mixture of experts: what its tokens send, what the fullest rank costs, what a capacity drops.

    all-to-all     T·k·h·b·(N-1)/N bytes per rank: 2 in forward (to the experts, and back) and 2 in backward
    time           every rank waits for the fullest one, so a layer lasts as long as max(load), not mean(load)
    capacity       C = min(S, ceil(c · S·k / E)) rows per expert of a sequence of S tokens; what is beyond it is dropped

    memory         experts lie on 1/ep of the ranks each, and ZeRO cuts them over the ranks that have the same

E experts, k of them per token, h hidden size, T tokens per rank, b bytes per element, N ranks. Parameters and FLOPs, of
which a token uses the active part, are in `predict/model.py`. Lepikhin et al. 2020, "GShard", §2.2 (capacity); Fedus et
al. 2021, "Switch Transformers", §2.2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minillm.predict.comms import Cost
from minillm.predict.model import ADAM_FP32, StateBytes

ALL_TO_ALLS = {"forward": 2, "backward": 2}  # per layer: rows go to their experts and come back


def all_to_all_bytes(tokens: int, top_k: int, hidden: int, itemsize: int, world_size: int) -> float:
    """Bytes that a rank of `tokens` tokens sends in one all-to-all if all experts are chosen equally often:
    T·k·h·b·(N-1)/N."""
    return tokens * top_k * hidden * itemsize * (world_size - 1) / world_size


def all_to_all(rows: Sequence[Sequence[int]], row_bytes: int) -> Cost:
    """rows[i][j]: rows that rank i sends to rank j. Pairwise: in round s, rank i sends to rank i + s (mod N)."""
    n = len(rows)
    if any(len(row) != n for row in rows):
        raise ValueError(f"rows must be a square of {n} by {n}: what each rank sends to each.")
    sent = tuple(row_bytes * (sum(row) - row[rank]) for rank, row in enumerate(rows))
    critical = sum(max(rows[rank][(rank + shift) % n] for rank in range(n)) for shift in range(1, n))
    return Cost(n - 1, row_bytes * critical, sent)


def rank_loads(expert_loads: Sequence[float], world_size: int) -> list[float]:
    """Rows for each rank, where every rank holds equally many neighbouring experts."""
    check_divides(len(expert_loads), world_size)
    each = len(expert_loads) // world_size
    return [sum(expert_loads[start : start + each]) for start in range(0, len(expert_loads), each)]


def check_divides(num_experts: int, ranks: int) -> None:
    """ValueError unless every rank gets equally many experts."""
    if ranks < 1 or num_experts % ranks:
        raise ValueError(f"{num_experts} experts do not divide over {ranks} ranks: use a divisor of them.")


def imbalance(loads: Sequence[float]) -> float:
    """max / mean: how many times longer a layer lasts than it would with equal loads. 1.0 if there is no load."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def layer_seconds(loads: Sequence[float], seconds_per_row: float, all_to_all_s: float = 0.0) -> float:
    """loads: rows of each rank. One forward pass: to the experts, the fullest rank's rows, and back."""
    return 2 * all_to_all_s + max(loads) * seconds_per_row


@dataclass(frozen=True)
class RankState:
    """Bytes on one rank between backward and optimizer step, without the padding of ZeRO's shards."""

    parameter: float
    gradient: float
    optimizer: float


def rank_state(
    dense: float, experts: float, ranks: int, ep: int = 1, zero: int = 0, of: StateBytes = ADAM_FP32
) -> RankState:
    """dense, experts: numbers of a rank before ZeRO cuts them (`tensor.parameters`). ranks: dp · cp, which share
    gradients, of which ranks / ep have the same experts. So ZeRO cuts everything down to 1 / ranks, experts too."""
    if zero not in range(4) or ep < 1 or ranks % ep:
        raise ValueError(f"zero {zero} and ep {ep} of {ranks} ranks: use stage 0 to 3 and a divisor of the ranks.")
    whole, cut = dense + experts, dense / ranks + experts / (ranks // ep)
    parameter, gradient = (cut if zero == 3 else whole), (cut if zero >= 2 else whole)
    return RankState(
        of.parameter * parameter, of.gradient * gradient, (of.master + of.moments) * (cut if zero else whole)
    )


# Capacity.


def capacity(tokens: int, top_k: int, experts: int, factor: float) -> int:
    """Rows that one expert accepts of a sequence of `tokens`: ceil(factor · tokens · k / experts), at most all."""
    if not factor > 0:
        raise ValueError(f"the capacity factor {factor} must be above 0, for example 1.25; None drops nothing.")
    return min(tokens, math.ceil(factor * tokens * top_k / experts))


def dropped_share(expert_loads: Sequence[int], limit: int) -> float:
    """The share of all (token, expert) pairs that is dropped when every expert accepts `limit` rows."""
    total = sum(expert_loads)
    return sum(max(0, load - limit) for load in expert_loads) / total if total else 0.0


def expected_dropped_share(tokens: int, top_k: int, experts: int, factor: float) -> float:
    """The same for a router that chooses at random: even perfect balance on average drops some of a finite batch.

    An expert's load is then binomial: each of `tokens` tokens has it among its k with probability k / E. Exact sum.
    """
    limit, p = capacity(tokens, top_k, experts, factor), top_k / experts
    if p == 1:
        return max(0, tokens - limit) / tokens
    beyond = 0.0
    for load in range(limit + 1, tokens + 1):
        logarithm = math.lgamma(tokens + 1) - math.lgamma(load + 1) - math.lgamma(tokens - load + 1)
        beyond += (load - limit) * math.exp(logarithm + load * math.log(p) + (tokens - load) * math.log1p(-p))
    return beyond / (tokens * p)


# Two levels: a token crosses to a node once, however many of its experts are there.


def nodes_reached(experts: int, top_k: int, nodes: int) -> float:
    """Nodes over which a token's k experts are spread, on average, if they are drawn at random from all E."""
    if nodes < 1 or experts % nodes:
        raise ValueError(f"{experts} experts do not divide over {nodes} nodes: use a divisor of them.")
    elsewhere = experts - experts // nodes
    missed = math.comb(elsewhere, top_k) / math.comb(experts, top_k)
    return nodes * (1 - missed)


def crossing_rows(experts: int, top_k: int, nodes: int) -> tuple[float, float]:
    """Rows per token that leave its node: (flat, a row per expert; two-level, a row per node), routing at random."""
    elsewhere = (nodes - 1) / nodes
    return top_k * elsewhere, nodes_reached(experts, top_k, nodes) * elsewhere
