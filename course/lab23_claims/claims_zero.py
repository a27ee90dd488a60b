"""Statements about ZeRO and FSDP: what is sharded, sent, saved and clipped."""

import torch

from course.kit.receipts import Row, formula, row
from course.lab23_claims.programs import traffic_of_stage_1
from course.shared.statement import at, claim, computed
from minillm.comm import launch
from minillm.predict import comms
from minillm.predict.model import ADAM_MIXED
from minillm.predict.training import sharding

FSDP = "Zhao et al. 2023: https://arxiv.org/abs/2304.11277"
ZERO = "Rajbhandari et al. 2020: https://arxiv.org/abs/1910.02054"


@claim(
    "ZeRO",
    "FSDP issues about three collectives per layer and microbatch.",
    "true",
    "Two gathers of the weights and a reduce-scatter of the gradients, and two or three for what is in no block.",
    "without resharding after forward it is two per layer",
    FSDP,
)
def three_collectives_per_layer() -> list[Row]:
    found = sharding.fully_shard_traffic([1000] * 96, 1000, 8)
    return [
        computed(
            "collectives of 96 blocks and the rest, per microbatch", 3 * 97, found.all_gathers + found.reduce_scatters
        )
    ]


@claim(
    "ZeRO",
    "In ZeRO-1 every rank contributes its shard of the gradient to an all-reduce.",
    "false",
    "It contributes the whole gradient to a reduce-scatter and keeps the sum of its own part.",
    "never",
    at(ZERO, "section 7"),
)
def shards_are_reduced() -> list[Row]:
    sent, whole = launch(traffic_of_stage_1, 2)[0]
    return [
        row(
            "bytes of the reduce-scatter on 2 real ranks / of the gradient", 1 / 2, sent["reduce_scatter"] / (4 * whole)
        ),
        row("all-reduces of gradients", 0, sent["all_reduce"]),
    ]


@claim(
    "ZeRO",
    "ZeRO trades memory for communication.",
    "depends",
    "Stages 1 and 2 send as much as data parallelism; only stage 3 sends half as much again.",
    "stage 3, or accumulation with stage 2 and 3",
    at(ZERO, "section 7"),
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
    at(ZERO, "section 7"),
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
    at(ZERO, "section 5"),
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
    at(ZERO, "section 5.1"),
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
    at(ZERO, "section 7"),
)
def stage_three_scales_linearly() -> list[Row]:
    def products(tokens: int) -> float:
        """Seconds of 8B's matrix products for a rank's tokens, at 400 TFLOP/s."""
        return 6 * 8e9 * tokens / 400e12

    moved = 3 * 2 * 8e9 * 511 / 512 / 50e9
    shares = [comms.ring_all_gather(1024 * n, 4, n).sent_per_rank[0] / (4096 * n) for n in (8, 512)]
    return [
        computed("bytes of one gather on 512 ranks / on 8", 511 / 512 / (7 / 8), shares[1] / shares[0], tolerance=1e-6),
        computed("two gathers and a reduce-scatter of 8B on 512 ranks, 50 GB/s", 0.958, moved, "s", tolerance=0.01),
        computed("    products of 16,384 tokens per rank, 400 TFLOP/s: longer", 1.97, products(16384), "s", 0.01),
        computed("    of 1,024 tokens: shorter", 0.123, products(1024), "s", 0.01),
    ]


@claim(
    "ZeRO",
    "Gradient accumulation saves communication.",
    "depends",
    "With no_sync and stages 0 and 1: once per step. Stage 3 gathers and reduces for every microbatch.",
    "stages 0 and 1",
    FSDP,
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
    at(ZERO, "section 5.1"),
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
    "The local norm is smaller by a factor of about √N, so less is clipped, and ranks disagree.",
    "one rank",
    "Pascanu et al. 2013, section 3.2: https://arxiv.org/abs/1211.5063",
)
def local_clipping() -> list[Row]:
    torch.manual_seed(0)
    gradient = torch.randn(64 * 1000)
    local = gradient.view(64, -1).norm(dim=1).mean()
    return [row("global norm / local norm on 64 ranks", 8.0, (gradient.norm() / local).item(), tolerance=0.01)]
