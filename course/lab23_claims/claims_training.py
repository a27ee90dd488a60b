"""Statements about memory, data parallelism and ZeRO, and what decides them."""

import torch

from course.kit.receipts import Row, formula, row
from course.lab23_claims.programs import bytes_of_a_step, traffic_of_stage_1
from course.shared.statement import claim, computed
from minillm.comm import launch
from minillm.model import ModelConfig
from minillm.predict import comms
from minillm.predict.model import ADAM_FP32, ADAM_MIXED, ADAM_MIXED_FP32_GRADIENTS, training_flops
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import cluster
from minillm.predict.planner.layout import Layout
from minillm.predict.planner.memory import memory
from minillm.predict.training import sharding

ZERO = "Rajbhandari et al. 2020: https://arxiv.org/abs/1910.02054"
MEGATRON = "Narayanan et al. 2021: https://arxiv.org/abs/2104.04473"
RING = "Patarasuk and Yuan 2009: https://doi.org/10.1016/j.jpdc.2008.09.002"


@claim(
    "memory",
    "A 7B model takes 14 GB, so it can be trained on one card of 24 GB.",
    "false",
    "Training holds gradients, a master copy and two moments besides the 16-bit weights.",
    "with frozen weights and small adapters it can",
    ZERO,
)
def seven_billion_in_fourteen() -> list[Row]:
    held = ADAM_MIXED.total * 7e9
    return [formula("weights in 16 bits", 14e9, "B"), computed("states fit into 24 GB", False, held <= 24e9)]


@claim(
    "memory",
    "Mixed precision halves the memory of the model's states.",
    "false",
    "2 + 2 + 4 + 8 bytes are as many as 4 + 4 + 8.",
    "it does save activations and time; pure 16-bit states are smaller, and need stochastic rounding to go on learning",
    "Micikevicius et al. 2018: https://arxiv.org/abs/1710.03740",
)
def mixed_precision_halves_states() -> list[Row]:
    return [computed("bytes per parameter, mixed against 32 bits", ADAM_FP32.total, ADAM_MIXED.total, "B")]


@claim(
    "memory",
    "Adam in 32 bits costs 8 bytes per parameter on top of 16-bit weights.",
    "false",
    "The 8 are the moments; the 32-bit master copy belongs to the optimizer too.",
    "true for 32-bit weights, which are their own master copy",
    ZERO,
)
def adam_costs_eight() -> list[Row]:
    beside = ADAM_MIXED.master + ADAM_MIXED.moments
    total = ADAM_MIXED.total * 70e9
    return [
        computed("bytes per parameter beside weights and gradients", 12, beside, "B"),
        formula("70B, all states", total, "B"),
    ]


@claim(
    "memory",
    "bf16 weights need no master copy, because bf16 has the range of fp32.",
    "false",
    "Range is not precision: an update below 0.4 % of a weight is rounded away.",
    "with stochastic rounding, or updates that are large against the weights",
    "Kalamkar et al. 2019: https://arxiv.org/abs/1905.12322",
)
def bf16_needs_no_master() -> list[Row]:
    narrow, wide = torch.ones((), dtype=torch.bfloat16), torch.ones(())
    for _ in range(1000):
        narrow, wide = narrow + 1e-3, wide + 1e-3
    return [
        row("1 + 1,000 updates of 0.001 in 32 bits", 2.0, wide.item(), tolerance=1e-3),
        row("the same in bf16 has moved", False, narrow.item() != 1.0),
    ]


@claim(
    "memory",
    "fp16 training needs loss scaling.",
    "depends",
    "Gradients below 3e-8 become zero; scaling by 2^16 lifts them. Where gradients are larger nothing is lost: "
    "some networks of the paper itself trained without.",
    "small gradients, as large language models have; bf16 needs none (section 3.2 of the paper)",
    "Micikevicius et al. 2018: https://arxiv.org/abs/1710.03740",
)
def fp16_needs_scaling() -> list[Row]:
    def lost(smallest: int, dtype: torch.dtype, scale: float = 1.0) -> float:
        """Share of gradients from 10^smallest to 0.01 that become zero."""
        gradients = 10 ** torch.linspace(smallest, -2, 1000)
        return ((gradients * scale).to(dtype) == 0).float().mean().item()

    return [
        row("gradients from 1e-12: some vanish in fp16", True, lost(-12, torch.half) > 0.3),
        row("    share that vanishes", None, lost(-12, torch.half)),
        row("    scaled by 2^16", 0.0, lost(-12, torch.half, 2**16)),
        row("    in bf16", 0.0, lost(-12, torch.bfloat16)),
        row("gradients from 1e-6: share that vanishes in fp16", 0.0, lost(-6, torch.half)),
    ]


@claim(
    "memory",
    "Recomputing all activations costs a third more FLOPs.",
    "true",
    "One forward pass more on top of a forward and a backward of twice its size.",
    "selective recomputation costs far less; torch stops early when the last needed tensor is back",
    "Chen et al. 2016: https://arxiv.org/abs/1604.06174",
)
def recomputation_costs_a_third() -> list[Row]:
    shape = ModelConfig(8, 512, 2048, 8, 8)
    plain, again = (training_flops(shape, 1, recompute=each).total for each in (False, True))
    return [computed("FLOPs with full recomputation / without", 4 / 3, again / plain, tolerance=0.01)]


@claim(
    "memory",
    "Pipeline parallelism divides the activation memory of every rank by the number of stages.",
    "false",
    "The first stage has 1/n of the layers and n microbatches in flight.",
    "the last stage holds one microbatch only",
    MEGATRON,
)
def pipeline_divides_activations() -> list[Row]:
    model = architecture("llama-3-70b")
    alone = memory(model, Layout(), 8192).activations
    first = memory(model, Layout(pp=8, microbatches=64), 8192).activations
    return [computed("activations of stage 0 of 8 / of one device", 1.0, first / alone, tolerance=0.01)]


@claim(
    "data parallel",
    "Data parallelism helps when the model does not fit on one GPU.",
    "false",
    "Every rank holds a whole copy; only the batch is divided.",
    "sharded data parallelism (ZeRO, FSDP) does help",
    "Li et al. 2020: https://arxiv.org/abs/2006.15704",
)
def data_parallel_when_it_does_not_fit() -> list[Row]:
    one, eight = (ADAM_MIXED.per_rank(10**9, ranks, 0) for ranks in (1, 8))
    return [computed("bytes of states per rank on 8 ranks / on 1", 1.0, eight / one)]


@claim(
    "data parallel",
    "In a ring all-reduce each rank sends less than twice the tensor, however many ranks there are.",
    "true",
    "2P(N-1)/N tends to 2P; only the number of rounds grows, and with it the latency.",
    "counted over all links together, where it grows with N",
    RING,
)
def bytes_stay_below_twice() -> list[Row]:
    sent = {n: comms.ring_all_reduce(1024 * n, 4, n).sent_per_rank[0] / (4096 * n) for n in (2, 8, 1024)}
    return [computed(f"bytes sent per rank on {n} ranks / P", 2 * (n - 1) / n, share) for n, share in sent.items()]


@claim(
    "data parallel",
    "In data parallelism the bytes that a rank sends per step do not depend on the batch size.",
    "true",
    "Gradients are as large as the weights, whatever was averaged.",
    "tensor, context and expert parallelism send activations, which grow with the batch",
    RING,
)
def bytes_do_not_depend_on_batch() -> list[Row]:
    whole = 4 * 16 * 16
    sent = {batch: launch(bytes_of_a_step, 2, batch)[0] for batch in (1, 8)}
    return [
        row(f"bytes that one of 2 real ranks sends, batch of {batch}", whole, each, "B") for batch, each in sent.items()
    ]


@claim(
    "data parallel",
    "The mean of the ranks' mean losses is the loss of the whole batch.",
    "depends",
    "Only if all ranks have equally many tokens; otherwise short shards count too much.",
    "equal shards",
    "Ott et al. 2018 divide by all tokens: https://arxiv.org/abs/1806.00187",
)
def mean_of_means() -> list[Row]:
    losses = torch.tensor([2.0, 4.0])
    even, uneven = torch.tensor([8.0, 8.0]), torch.tensor([12.0, 4.0])
    rows = []
    for name, tokens in (("equal shards", even), ("12 and 4 tokens", uneven)):
        whole = (losses * tokens).sum() / tokens.sum()
        same = abs(whole.item() - losses.mean().item()) < 1e-6
        rows.append(computed(f"{name}: mean of means is right", name == "equal shards", same))
    return rows


@claim(
    "data parallel",
    "Averaging over 4 ranks gives other gradients than one process with the whole batch, because of staleness.",
    "false",
    "Synchronous averaging has no staleness; the difference is rounding.",
    "asynchronous parameter servers do have it",
    "Li et al. 2020: https://arxiv.org/abs/2006.15704",
)
def averaging_is_stale() -> list[Row]:
    error = max(launch(_average_of_shards, 2))
    return [row("worst difference on 2 real ranks, float64, below 1e-12", True, error < 1e-12)]


def _average_of_shards(group) -> float:
    torch.manual_seed(0)
    weight, x = torch.randn(8, 8, dtype=torch.float64, requires_grad=True), torch.randn(6, 8, dtype=torch.float64)
    whole = torch.autograd.grad((x @ weight).pow(2).mean(), weight)[0]
    own = x.chunk(group.world_size)[group.rank]
    mine = torch.autograd.grad((own @ weight).pow(2).mean(), weight)[0]
    return (group.all_reduce(mine) / group.world_size - whole).abs().max().item()


@claim(
    "ZeRO",
    "ZeRO trades memory for communication.",
    "depends",
    "Stages 1 and 2 send as much as data parallelism; only stage 3 sends half as much again.",
    "stage 3, or accumulation with stage 2 and 3",
    ZERO,
)
def zero_trades_communication() -> list[Row]:
    n, size = 8, 8 * 1000
    reduce = comms.ring_reduce_scatter(size, 4, n).sent_per_rank[0]
    gather = comms.ring_all_gather(size, 4, n).sent_per_rank[0]
    plain = comms.ring_all_reduce(size, 4, n).sent_per_rank[0]
    return [
        computed("stages 1 and 2 against data parallelism, bytes", plain, reduce + gather, "B"),
        computed("stage 3 against data parallelism", 1.5, (reduce + 2 * gather) / plain),
    ]


@claim(
    "ZeRO",
    "In ZeRO-1 no optimizer state travels during training.",
    "true",
    "Gradients are reduced and updated weights gathered; a state stays where it is.",
    "when a checkpoint is gathered into one file",
    ZERO,
)
def optimizer_states_stay() -> list[Row]:
    sent, elements = launch(traffic_of_stage_1, 2)[0]
    return [
        row("bytes of a step on 2 real ranks: gradients, P(N-1)/N", 4 * elements // 2, sent["reduce_scatter"], "B"),
        row("    updated weights, P(N-1)/N", 4 * elements // 2, sent["all_gather"], "B"),
        row("    anything else", 0, sent["all_reduce"], "B"),
    ]


@claim(
    "ZeRO",
    "ZeRO-1, 2 and 3 cut the states by 4, 8 and N times.",
    "depends",
    "4 and 8 are limits for many ranks; on 8 ranks the factors are smaller.",
    "N towards infinity",
    ZERO,
)
def zero_cuts_four_eight_n() -> list[Row]:
    count = 8 * 10**6
    whole = ADAM_MIXED.total * count
    return [
        computed(f"stage {stage} on 8 ranks", factor, whole / ADAM_MIXED.per_rank(count, 8, stage), tolerance=0.005)
        for stage, factor in ((1, 2.91), (2, 4.27), (3, 8.0))
    ]


@claim(
    "ZeRO",
    "The largest part of the states of mixed-precision Adam is divided in stage 1 of ZeRO already.",
    "true",
    "12 of 16 bytes are master copy and moments; the 16-bit parameters of stage 3 are 2.",
    "with optimizers that keep less, such as plain SGD or 8-bit moments",
    ZERO,
)
def stage_one_divides_most() -> list[Row]:
    return [
        computed("share of the parameters", 2 / 16, ADAM_MIXED.parameter / ADAM_MIXED.total),
        computed(
            "share of master copy and moments", 12 / 16, (ADAM_MIXED.master + ADAM_MIXED.moments) / ADAM_MIXED.total
        ),
    ]


@claim(
    "ZeRO",
    "Stage 3 scales linearly, since every rank holds less.",
    "depends",
    "What a rank sends per microbatch does not fall with N. It hides as long as each rank has enough tokens to "
    "compute on.",
    "a batch that grows with the ranks (weak scaling); at a fixed batch the gathers stick out sooner or later",
    ZERO,
)
def stage_three_scales_linearly() -> list[Row]:
    def hidden(tokens: int) -> bool:
        """8B on H100: whether two gathers and a reduce-scatter take less than the products of a rank's tokens."""
        moved = 3 * 2 * 8e9 * 511 / 512
        return moved / 50e9 < 6 * 8e9 * tokens / 400e12

    shares = [comms.ring_all_gather(1024 * n, 4, n).sent_per_rank[0] / (4096 * n) for n in (8, 512)]
    return [
        computed("bytes of one gather on 512 ranks / on 8", 511 / 512 / (7 / 8), shares[1] / shares[0], tolerance=1e-6),
        computed("16,384 tokens per rank hide them at 400 TFLOP/s and 50 GB/s", True, hidden(16384)),
        computed("    1,024 tokens", False, hidden(1024)),
    ]


@claim(
    "ZeRO",
    "Gradient accumulation saves communication.",
    "depends",
    "With no_sync and stages 0 and 1: once per step. Stage 3 gathers and reduces for every microbatch.",
    "stage 2 and 3",
    ZERO,
)
def accumulation_saves() -> list[Row]:
    blocks, rest, ranks = [8000] * 4, 8000, 8
    p = 5 * 8000 * 4 * (ranks - 1) / ranks
    sharded = sharding.fully_shard_traffic(blocks, rest, ranks, microbatches=4).bytes
    once = 5 * comms.ring_all_reduce(8000, 4, ranks).sent_per_rank[0]
    return [
        computed("data parallelism with no_sync, 4 microbatches, in P(N-1)/N", 2.0, once / p),
        computed("stage 3, 4 microbatches", 12.0, sharded / p),
    ]


@claim(
    "ZeRO",
    "A barrier after loading on rank 0 brings the weights to the other ranks.",
    "false",
    "A barrier moves no data; a broadcast does.",
    "never",
    "torch.distributed: https://docs.pytorch.org/docs/stable/distributed.html",
)
def barrier_moves_weights() -> list[Row]:
    weights = launch(_after_a_barrier, 2)
    return [row("rank 1's weight after a barrier", 0.0, weights[1][0]), row("after a broadcast", 7.0, weights[1][1])]


def _after_a_barrier(group) -> tuple[float, float]:
    weight = torch.tensor([7.0 if group.rank == 0 else 0.0])
    group.barrier()
    before = weight.item()
    return before, group.broadcast(weight, root=0).item()


@claim(
    "ZeRO",
    "Saving optimizer.state_dict() on rank 0 saves the optimizer.",
    "depends",
    "Under ZeRO or FSDP rank 0 holds 1/N of the states.",
    "plain data parallelism, where every rank has all",
    ZERO,
)
def rank_zero_saves_all() -> list[Row]:
    whole, own = ADAM_MIXED.per_rank(800, 1, 1), ADAM_MIXED.per_rank(800, 8, 1)
    states = ADAM_MIXED.master + ADAM_MIXED.moments
    return [
        computed("share of the states on rank 0 of 8", 1 / 8, (own - 4 * 800) / (whole - 4 * 800)),
        formula("bytes per parameter", states, "B"),
    ]


@claim(
    "ZeRO",
    "Clipping by the norm of a rank's own shard is the same as clipping by the global norm.",
    "false",
    "The local norm is about √N too small, so less is clipped, and ranks disagree.",
    "one rank",
    "Pascanu et al. 2013: https://arxiv.org/abs/1211.5063",
)
def local_clipping() -> list[Row]:
    torch.manual_seed(0)
    gradient = torch.randn(64 * 1000)
    local = gradient.view(64, -1).norm(dim=1).mean()
    return [row("global norm / local norm on 64 ranks", 8.0, (gradient.norm() / local).item(), tolerance=0.01)]


@claim(
    "memory",
    "70B can be trained on 64 cards of 80 GB with ZeRO-3 alone.",
    "true",
    "States take 20 GB per card, and full recomputation leaves room for one sequence of 8,192 tokens.",
    "long sequences, slow networks, or batches smaller than the number of ranks",
    ZERO,
)
def seventy_fits_with_zero_alone() -> list[Row]:
    machine = cluster("h100", 64)
    held = memory(architecture("llama-3-70b"), Layout(dp=64, zero=3, recompute="full"), 8192)
    states = ADAM_MIXED_FP32_GRADIENTS.total * architecture("llama-3-70b").parameters / 64
    return [
        computed("fits with ZeRO-3 alone", True, held.total <= machine.usable),
        formula("states per GPU", states, "B"),
    ]
