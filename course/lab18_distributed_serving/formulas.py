"""Lab 18's arithmetic: hand-overs of Llama 3, cards divided for its traffic, 405B on two nodes."""

from dataclasses import dataclass, replace
from functools import cache

from minillm.model import ModelConfig
from minillm.predict.planner.architectures import Architecture, architecture
from minillm.predict.planner.clusters import Cluster, cluster
from minillm.predict.planner.pools import Pools, rank_pools
from minillm.predict.planner.serving import Replica
from minillm.predict.serving import handover

NAMES = {"8B": "llama-3-8b", "70B": "llama-3-70b", "405B": "llama-3-405b"}
LINKS = {"NVLink": 360e9, "a network card": 40e9, "10 GbE": 1.25e9}  # bytes/s of one rank; the first two at 80 %
PROMPTS, OUTPUT, CARDS = (250, 500, 1000, 2000, 4000, 8000), 250, 16


def shape_of(model: str) -> ModelConfig:
    """A published dense model, as the formulas of training read one."""
    found = architecture(NAMES[model])
    sizes = (found.vocab_size, found.hidden_size, found.intermediate_size, found.num_layers)
    return ModelConfig(*sizes, found.num_heads, found.num_kv_heads, head_dim=found.head_dim)


def handed_seconds(model: str, tokens: int, hit: float, tp: int, rate: float) -> float:
    """Of a hand-over that nothing hides, over tp links. hit: share of the prompt that the other side has cached."""
    return handover.handed_bytes(shape_of(model), tokens, cached=int(hit * tokens)) / (tp * rate)


def recompute_seconds(model: str, tokens: int, hit: float, tp: int) -> float:
    """Of the prompt without what is cached, on tp H100."""
    new = max(1, tokens - int(hit * tokens))
    found = architecture(NAMES[model])
    replica = Replica(found, cluster("h100", 8), tp, 1, new, 1)
    behind = found.num_layers * found.attention_flops(tokens - new) * new  # scores of new tokens with cached ones
    return replica.time_to_first() + behind / (tp * replica.cluster.device.flops * replica.cluster.device.attention)


def by_prompt(ttft_ms: float, tpot_ms: float) -> dict[int, dict[bool, Pools]]:
    """By the prompt's length, the best division and the best without one (by whether it is one)."""
    return {prompt: best_pools(prompt, ttft_ms / 1e3, tpot_ms / 1e3) for prompt in PROMPTS}


@cache
def best_pools(prompt: int, ttft: float | None, tpot: float | None) -> dict[bool, Pools]:
    """For 70B within limits in seconds, or without: the best division and the best without one."""
    try:
        plans = rank_pools(
            architecture(NAMES["70B"]), cluster("h100", CARDS), prompt, OUTPUT, ttft=ttft, tpot=tpot, keep=1
        )
    except ValueError:
        plans = []
    return {plan.split: plan for plan in plans}


def layout_of(plan: Pools) -> str:
    """Replicas × (tp, pp), those that prefill first."""
    pools = ((plan.prefill, plan.prefill_tp, plan.prefill_pp), (plan.decode, plan.decode_tp, plan.decode_pp))
    return " + ".join(f"{count} × ({tp}, {pp})" for count, tp, pp in pools if count)


def decoding(plan: Pools) -> int:
    """Sequences in a decode batch (Little): a replica has as many batches as stages, which take turns."""
    return round(plan.rate * OUTPUT * plan.tpot / (plan.decode * plan.decode_pp))


# 405B on two nodes.


@dataclass(frozen=True)
class TwoNodes:
    """A layout over 16 H100. weights: bytes on a card; tokens: that its cache holds; tpot: seconds of one sequence;
    crossing: bytes that cross the network for a token."""

    layout: str
    weights: float
    tokens: int
    tpot: float
    crossing: float


def two_nodes() -> list[TwoNodes]:
    """Layouts of 405B on two nodes: tp 16 twice, summed by a flat ring and in two levels."""
    model, machine = architecture(NAMES["405B"]), cluster("h100", 16)
    wide, *others = (_layout(model, machine, tp, pp) for tp, pp in ((16, 1), (8, 2), (4, 4)))
    return [wide, _in_two_levels(wide, model, machine), *others]


def _layout(model: Architecture, machine: Cluster, tp: int, pp: int) -> TwoNodes:
    replica = Replica(model, machine, tp, pp, 1000, 0)
    hidden = 2 * model.hidden_size
    if tp > machine.per_node:  # the ring's two links between the nodes carry 2 (t - 1) / t of every tensor each
        crossing = model.num_layers * 2 * 2 * 2 * (tp - 1) / tp * hidden
    else:
        crossing = tp * hidden  # one boundary lies between the nodes
    name = f"tp {tp}, pp {pp}" if pp > 1 else f"tp {tp}, a flat ring"
    return TwoNodes(name, replica.weights, int(replica.room / replica.per_token), replica.step(1) * pp, crossing)


def _in_two_levels(wide: TwoNodes, model: Architecture, machine: Cluster) -> TwoNodes:
    """tp 16 where each sum is an exchange of eighths in a node, a message across, and an exchange in the node again."""
    hidden, sums, inside = 2 * model.hidden_size, 2 * model.num_layers, machine.per_node
    ring, node = (Replica(model, machine, tp, 16 // tp, 1000, 0) for tp in (16, inside))
    seconds = 2 * node.way.message(hidden * (inside - 1) / inside) + node.between.message(hidden / inside)
    tpot = wide.tpot + sums * (seconds - ring.way.all_reduce(hidden))
    return replace(wide, layout="tp 16, sums in two levels", tpot=tpot, crossing=sums * 2 * hidden)


def fits_a_node(bits: int) -> tuple[float, float]:
    """GB of 405B's weights in so many bits on each of 8 cards, and what is usable there."""
    model, machine = architecture(NAMES["405B"]), cluster("h100", 8)
    return model.parameters * bits / 8 / 8 / 1e9, machine.usable / 1e9
