"""Statements about long contexts, experts and the order of several axes."""

import random

from course.kit.receipts import Row, formula, row
from course.shared.statement import at, claim, computed
from minillm.equivalence import CONTEXT_CASES, ParallelConfig, compare
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import cluster
from minillm.predict.planner.layout import Layout, axis_path, gradient_path, show_flattened
from minillm.predict.training import context, moe

LLAMA = "Llama Team 2024: https://arxiv.org/abs/2407.21783"
RING = "Liu, Zaharia and Abbeel 2023: https://arxiv.org/abs/2310.01889"
SWITCH = "Fedus et al. 2021: https://arxiv.org/abs/2101.03961"
ULYSSES = "Jacobs et al. 2023: https://arxiv.org/abs/2309.14509"


@claim(
    "long context",
    "Ring attention computes the same attention as one rank over the whole sequence, and does not approximate it.",
    "true",
    "Every query meets every key before it; partial results are merged exactly, by their log-sum-exp.",
    "never; windows and sparse patterns approximate, on one rank too",
    at(RING, "section 3"),
)
def ring_is_exact() -> list[Row]:
    (found,) = compare(ParallelConfig(cp=2), {"plain": next(iter(CONTEXT_CASES.values()))}, steps=1)
    return [row("worst gradient on 2 real ranks against one process, below 1e-10", True, found.worst_gradient < 1e-10)]


@claim(
    "long context",
    "Cutting a sequence into equal parts gives every rank equal work.",
    "depends",
    "Under a causal mask a late part has more keys before it: the last of 4 ranks does 7/16 of the work.",
    "attention without a causal mask; with one, the zigzag order",
    at(LLAMA, "section 3.3.2"),
)
def equal_parts_equal_work() -> list[Row]:
    shape = context.AttentionShape(1, 4096, 8, 8, 64)
    plain, cut = ([sum(steps) for steps in context.ring_flops(shape, 4, order)] for order in ("contiguous", "zigzag"))
    return [
        computed("share of the last of 4 ranks", 7 / 16, plain[-1] / sum(plain), tolerance=1e-3),
        computed("zigzag: most work / least work", 1.0, max(cut) / min(cut)),
    ]


@claim(
    "long context",
    "Ulysses sends fewer bytes than ring attention.",
    "depends",
    "Its all-to-alls carry queries and outputs too; a ring only keys and values, which grouped heads make small.",
    "multi-head attention, or many ranks: Ulysses' bytes per rank fall with N",
    at(ULYSSES, "section 3.2"),
)
def ulysses_sends_less() -> list[Row]:
    def sent(variant: str, kv_heads: int) -> int:
        return context.forward_traffic(variant, context.AttentionShape(1, 8192, 64, kv_heads, 128, 2), 8).bytes

    return [
        computed("64 kv heads on 8 ranks: Ulysses sends less", True, sent("ulysses", 64) < sent("ring", 64)),
        computed("8 kv heads: Ulysses sends less", False, sent("ulysses", 8) < sent("ring", 8)),
    ]


@claim(
    "experts",
    "A mixture of experts decodes as fast as a dense model of its active size.",
    "depends",
    "One token reads the experts it chose; a batch soon reads all of them.",
    "a batch of one",
    "Jiang et al. 2024, section 2: https://arxiv.org/abs/2401.04088",
)
def experts_decode_like_dense() -> list[Row]:
    draw, trials = random.Random(0), 2000

    def read(tokens: int) -> float:
        chosen = (len({e for _ in range(tokens) for e in draw.sample(range(8), 2)}) for _ in range(trials))
        return sum(chosen) / trials

    model = architecture("mixtral-8x7b")
    return [
        row("experts of 8 that a layer reads for 1 token, top 2", 2.0, read(1), kind="simulated"),
        row("    for 16 tokens", 8 * (1 - 0.75**16), read(16), tolerance=0.01, kind="simulated"),
        formula("all parameters / active ones of Mixtral 8x7B", model.parameters / model.active_parameters),
    ]


@claim(
    "experts",
    "With a capacity factor of 1 nothing is dropped, since experts are asked for equally on average.",
    "false",
    "Loads of a finite batch scatter around their mean; what is above it is dropped.",
    "never; the share falls with the square root of the tokens per expert, and a factor of 2 leaves 0.03 % here",
    at(SWITCH, "section 2.2"),
)
def capacity_one_drops_nothing() -> list[Row]:
    draw, tokens, experts, trials = random.Random(0), 64, 8, 2000
    limit, dropped = moe.capacity(tokens, 1, experts, 1.0), 0.0
    for _ in range(trials):
        loads = [0] * experts
        for _ in range(tokens):
            loads[draw.randrange(experts)] += 1
        dropped += moe.dropped_share(loads, limit) / trials

    def expected_share(tokens: int, factor: float) -> float:
        return moe.expected_dropped_share(tokens, 1, experts, factor)

    expected = expected_share(tokens, 1.0)
    return [
        row("share dropped, 64 tokens to 8 experts at random", expected, dropped, tolerance=0.05, kind="simulated"),
        computed("    1,024 times as many tokens", 0.0041, expected_share(65536, 1.0), tolerance=0.01),
        formula("64 tokens, with a factor of 1.25", expected_share(tokens, 1.25)),
        formula("    with a factor of 2", expected_share(tokens, 2.0)),
    ]


@claim(
    "experts",
    "Expert parallelism of 8 inside data parallelism of 8 takes 8 GPUs.",
    "true",
    "Experts are cut over ranks that are replicas already: each has own data and an eighth of the experts.",
    "if expert ranks are kept for experts alone, it takes 64",
    "Lepikhin et al. 2020: https://arxiv.org/abs/2006.16668",
)
def experts_inside_replicas() -> list[Row]:
    layout = Layout(dp=8, ep=8)
    groups = {found["axis"]: found for found in show_flattened(cluster("h100", 8), layout)}
    return [
        computed("ranks of dp 8 with ep 8", 8, layout.world_size),
        computed("ranks that share the experts", groups["dp_cp"]["first_group"], groups["ep"]["first_group"]),
        computed("ranks with the same experts", 1, groups["expert_replicas"]["size"]),
    ]


@claim(
    "several axes",
    "The order of the axes in the mesh does not matter, as all ranks talk to all others sooner or later.",
    "false",
    "The innermost axis stays inside a node. Tensor parallelism across nodes has a ninth of the bandwidth.",
    "one node, or a network as fast as the links inside a node",
    "Narayanan et al. 2021, section 3.2: https://arxiv.org/abs/2104.04473",
)
def order_does_not_matter() -> list[Row]:
    machine = cluster("h100", 64)
    inner, outer = (
        axis_path(machine, Layout(dp=8, tp=8, order=order), "tp").bandwidth
        for order in (("tp", "cp", "dp", "pp"), ("dp", "cp", "tp", "pp"))
    )
    return [computed("bandwidth of tp 8, innermost / outermost of 8 nodes", 9.0, inner / outer)]


@claim(
    "several axes",
    "With one replica (dp 1) no gradient has to be reduced.",
    "false",
    "Ranks of the context axis hold the same weights and see other tokens: their gradients must be added up.",
    "if cp is 1 as well, without sequence parallelism (which sums the norms' gradients over tp)",
    at(LLAMA, "section 3.3.2"),
)
def one_replica_reduces_nothing() -> list[Row]:
    machine = cluster("h100", 8)
    return [
        computed("ranks that share a gradient: dp 1, cp 8", 8, gradient_path(machine, Layout(cp=8)).size),
        computed("dp 1, tp 8", 1, gradient_path(machine, Layout(tp=8)).size),
    ]
