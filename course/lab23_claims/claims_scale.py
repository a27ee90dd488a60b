"""Statements about long context, experts, several axes at once and long runs, and what decides them."""

import random

import torch
from torch.nn import functional as F

from course.kit.receipts import Row, formula, row
from course.shared.statement import claim, computed
from minillm.equivalence import CONTEXT_CASES, ParallelConfig, compare
from minillm.predict import faults
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import cluster
from minillm.predict.planner.layout import Layout, axis_path, gradient_path
from minillm.predict.training import context, moe

RING = "Liu, Zaharia and Abbeel 2023: https://arxiv.org/abs/2310.01889"
LLAMA = "Llama Team 2024: https://arxiv.org/abs/2407.21783"
SWITCH = "Fedus et al. 2021: https://arxiv.org/abs/2101.03961"
ULYSSES = "Jacobs et al. 2023: https://arxiv.org/abs/2309.14509"


@claim(
    "long context",
    "Ring attention computes the same attention as one rank over the whole sequence, and does not approximate it.",
    "true",
    "Every query meets every key before it; partial results are merged exactly, by their log-sum-exp.",
    "windows and sparse patterns are approximations, on one rank too",
    RING,
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
    LLAMA,
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
    ULYSSES,
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
    "Jiang et al. 2024: https://arxiv.org/abs/2401.04088",
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
    "many tokens per expert, or a larger factor",
    SWITCH,
)
def capacity_one_drops_nothing() -> list[Row]:
    draw, tokens, experts, trials = random.Random(0), 64, 8, 2000
    limit, dropped = moe.capacity(tokens, 1, experts, 1.0), 0.0
    for _ in range(trials):
        loads = [0] * experts
        for _ in range(tokens):
            loads[draw.randrange(experts)] += 1
        dropped += moe.dropped_share(loads, limit) / trials
    expected = moe.expected_dropped_share(tokens, 1, experts, 1.0)
    return [
        row("share dropped, 64 tokens to 8 experts at random", expected, dropped, tolerance=0.05, kind="simulated"),
        computed("nothing is dropped", False, expected < 1e-3),
        formula("with a factor of 1.25", moe.expected_dropped_share(tokens, 1, experts, 1.25)),
    ]


@claim(
    "experts",
    "Expert parallelism of 8 inside data parallelism of 8 takes 8 GPUs.",
    "true",
    "Experts are cut over ranks that are replicas already: each has own data and an eighth of the experts.",
    "if expert ranks are kept for experts alone, it takes 64",
    "Lepikhin et al. 2020: https://arxiv.org/abs/2006.16668",
)
def experts_share_the_replicas() -> list[Row]:
    return [computed("ranks of dp 8 with ep 8", 8, Layout(dp=8, ep=8).world_size)]


@claim(
    "several axes",
    "The order of the axes in the mesh does not matter, as all ranks talk to all others sooner or later.",
    "false",
    "The innermost axis stays inside a node. Tensor parallelism across nodes has a ninth of the bandwidth.",
    "one node, or a network as fast as the links inside a node",
    "Narayanan et al. 2021: https://arxiv.org/abs/2104.04473",
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
    "if cp is 1 as well",
    LLAMA,
)
def one_replica_reduces_nothing() -> list[Row]:
    machine = cluster("h100", 8)
    return [
        computed("ranks that share a gradient: dp 1, cp 8", 8, gradient_path(machine, Layout(cp=8)).size),
        computed("dp 1, tp 8", 1, gradient_path(machine, Layout(tp=8)).size),
    ]


@claim(
    "faults",
    "A run that restores weights and optimizer continues as if nothing had happened.",
    "false",
    "Dropout, the order of samples and the schedule go on from another state: it is another run.",
    "if random generators, sampler and scheduler are restored too; then it is bit-identical",
    "torch.get_rng_state: https://docs.pytorch.org/docs/stable/generated/torch.get_rng_state.html",
)
def weights_are_enough() -> list[Row]:
    def run(restore: bool) -> torch.Tensor:
        """Two steps with a restart between them, in which the generator's state is kept or not."""
        torch.manual_seed(0)
        weight = torch.ones(64)
        weight = weight - 0.1 * F.dropout(weight, 0.5)
        state = torch.get_rng_state()
        torch.manual_seed(1)  # as a new process starts
        if restore:
            torch.set_rng_state(state)
        return weight - 0.1 * F.dropout(weight, 0.5)

    torch.manual_seed(0)
    whole = torch.ones(64)
    for _ in range(2):
        whole = whole - 0.1 * F.dropout(whole, 0.5)
    return [
        row("equal to the run without a restart, weights alone", False, torch.equal(run(False), whole)),
        row("with the generator's state", True, torch.equal(run(True), whole)),
    ]


@claim(
    "faults",
    "One GPU of 1,024 that takes 20 % longer for its part costs the job a sixth of its throughput.",
    "true",
    "A synchronous step ends with its slowest rank: 1 - 1/1.2 is lost everywhere.",
    "asynchronous training, or a rank that can hand its work to others",
    LLAMA,
)
def one_slow_gpu_costs_a_sixth() -> list[Row]:
    draw = random.Random(0)
    healthy = slow = 0.0
    for _ in range(200):
        times = [draw.gauss(1.0, 0.005) for _ in range(1024)]
        healthy += max(times)
        times[17] *= 1.2
        slow += max(times)
    return [row("throughput lost", 1 - 1 / 1.2, 1 - healthy / slow, tolerance=0.1, kind="simulated")]


@claim(
    "faults",
    "Eight times the GPUs give eight times the useful work, if scaling is perfect.",
    "false",
    "Failures come eight times as often, and each costs a restart and half an interval of work.",
    "when restarts and saves become as much faster as failures more frequent",
    LLAMA,
)
def goodput_scales() -> list[Row]:
    def useful(gpus: int) -> float:
        return faults.best_goodput(30, 600, faults.job_mtbf(faults.LLAMA3_GPU_MTBF_S, gpus))

    return [
        formula("useful share on 16,384 GPUs (saves of 30 s, restarts of 10 minutes)", useful(16384)),
        formula("    on 131,072", useful(131072)),
        computed("eight times the GPUs do eight times the work", False, useful(131072) / useful(16384) > 0.95),
    ]
