"""Lab 04, ZeRO: gradients sharded while backward runs (stage 2), blocks gathered, used and freed (stage 3)."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, row
from course.lab04_zero import rank_programs_blocks
from course.lab04_zero.rank_programs_blocks import Net, Stack
from course.shared import sharding
from course.shared.diagnose import expect_like
from course.shared.sharding import RankRecord
from course.shared.trials import run
from minillm.predict import comms

# What they are held to.


@exercise(
    "reduce-scatter-hooks",
    minutes=20,
    difficulty=4,
    hints=(
        "parameter.register_post_accumulate_grad_hook(f) calls f(parameter) once its gradient is complete. A bucket is "
        "full when the last of its parameters has called.",
        "Keep, per bucket, the set of parameters still missing. When it is empty: concatenate the gradients, set every "
        ".grad to None, pad to a multiple of N, reduce-scatter with op='avg', store the result, fill the set again "
        "for the next backward.",
        "def ready(p): missing.discard(p); if missing: return; flat = torch.cat([q.grad.flatten() for q in bucket]); "
        "for q in bucket: q.grad = None; shards[i] = group.reduce_scatter(F.pad(flat, (0, -len(flat) % N)), op='avg'); "
        "missing.update(bucket). Make one such function per bucket (a loop variable in a closure changes later).",
    ),
)
def check_hooks(learner: Callable) -> Receipt:
    cases = [_draw_net(4, 4), _draw_net(3, 5), _draw_net(2, 3, torch.float64)]
    trials = sharding.by_case(run(rank_programs_blocks.run_hooks, 4, learner, cases), cases)
    for case, ranks in zip(cases, trials, strict=True):
        _judge_shards(case, ranks)
    rows = []
    for case, ranks in zip(cases, trials, strict=True):
        sizes, n = [sum(p.numel() for p in bucket) for bucket in case.buckets(case.model())], case.world_size
        padded = [size + -size % n for size in sizes]
        each, sizes = case.dtype.itemsize, [case.dtype.itemsize * size for size in sizes]
        enough = sum(comms.ring_reduce_scatter(size, each, n).sent_per_rank[0] for size in padded)
        sent, peak = max(max(did.bytes) for did in ranks), max(did.held["gradient"] for did in ranks)
        kept, calls = max(did.held["kept"] for did in ranks), {k: v / case.steps for k, v in ranks[0].calls.items()}
        whole, waiting = (max(did.held[key] for did in ranks) for key in ("whole", "waiting"))
        rows += [
            row(f"bytes sent per rank, N={n}, {sum(sizes):,} B of gradients", enough, sent, "B"),
            row("    whole gradients at once, at most the largest bucket", True, peak <= max(sizes)),
            row(f"    their bytes, where the largest bucket has {max(sizes):,}", None, peak, "B"),
            row("    what was handed to collectives and is still there after backward", None, whole, "B"),
            row("    collectives in a backward pass: one per bucket", len(sizes), sum(calls.values())),
        ]
        if waiting > 1:
            raise CheckFailed(
                f"right values, but {waiting} buckets are full before one is reduced: reduce a bucket as soon as its "
                "last gradient is there",
                rows,
            )
        if whole > each * (max(padded) + 64):  # one buffer that is reused, rounded up
            raise CheckFailed(
                f"right values, but {whole:,} bytes of whole flat gradients are still there after backward, more than "
                "the largest bucket: keep shards only, none that is a view of a whole bucket, and no buffer per bucket",
                rows,
            )
        if kept or peak > max(sizes):
            raise CheckFailed(
                f"right values, but up to {peak:,} bytes of whole gradients lie there at once, where the largest "
                f"bucket has {max(sizes):,}: free a bucket's gradients (.grad = None) as soon as it is reduced",
                rows,
            )
        if sent > enough:
            raise CheckFailed(
                f"right values, but a rank sends {sent:,} bytes where {enough:,} are enough (N={n}; you called "
                f"{sharding.list_calls(calls)}): a reduce-scatter sends half of what an all-reduce does",
                rows,
            )
    return Receipt("gradients sharded while backward runs", tuple(rows))


def _draw_net(world: int, layers: int, dtype: torch.dtype = torch.float32) -> Net:
    """A bucket with 1 element too many, one with world - 1, and, with more than three layers, one that divides."""
    over = [*(random.randrange(world) for _ in range(layers - 2)), -1, -1, 1]
    widths = [world * random.randint(2 + 8 // world, 28 // world) + each for each in over]
    return Net(widths, random.randrange(2**31), world, dtype)


def _judge_shards(case: Net, ranks: Sequence[RankRecord]) -> None:
    n = case.world_size
    for step in range(case.steps):
        alone = rank_programs_blocks.gradients_in_one_process(case, step)
        for bucket in range(len(alone[0])):
            mean = torch.stack([own[bucket] for own in alone]).mean(0)
            padded = F.pad(mean, (0, -len(mean) % n))
            for rank, did in enumerate(ranks):
                found, wanted = did.results[step][bucket], padded.chunk(n)[rank]
                name = f"shard {bucket} on rank {rank} of {n} after backward pass {step + 1}"
                if found is None:
                    raise CheckFailed(f"{name} is None: was the bucket never full? Every parameter must count once")
                expect_like(name, found, wanted, "this rank's part of the bucket, [padded / N]")
                if not torch.allclose(found, wanted, rtol=1e-4, atol=1e-6):
                    raise CheckFailed(f"{name} is wrong: {_say_shard(found, case, step, bucket, rank, wanted)}")


def _say_shard(found: Tensor, case: Net, step: int, bucket: int, rank: int, wanted: Tensor) -> str:
    n = case.world_size
    own = F.pad(
        (flat := rank_programs_blocks.gradients_in_one_process(case, step)[rank][bucket]), (0, -len(flat) % n)
    ).chunk(n)
    if torch.allclose(found, n * wanted, rtol=1e-4, atol=1e-6):
        return f"it is the sum, {n} times the average (op='avg')"
    if torch.allclose(found, own[rank], rtol=1e-4, atol=1e-6):
        return "it is this rank's own gradient: nothing was reduced"
    real = max(0, len(flat) - rank * len(wanted))
    if torch.allclose(found[:real], wanted[:real], rtol=1e-4, atol=1e-6):
        return "the padding at the end is not zeros"
    if step:
        earlier = [rank_programs_blocks.gradients_in_one_process(case, past) for past in range(step)]
        means = [torch.stack([own[bucket] for own in alone]).mean(0) for alone in earlier]
        older = sum(F.pad(mean, (0, -len(mean) % n)).chunk(n)[rank] for mean in means)
        if torch.allclose(found, wanted + older, rtol=1e-4, atol=1e-6):
            return "the gradients of earlier passes are still in it: each backward gives a shard of its own"
        return "the first pass was right; was the bucket armed again for the second, and were gradients freed?"
    return "is it reduced before the last gradient of the bucket is there, or are elements in another order?"


@exercise(
    "gather-compute-free",
    minutes=20,
    difficulty=4,
    hints=(
        "Between forward and backward of a block, what must stay on this rank so that backward can run? Not the "
        "gathered weights: they can be gathered again.",
        "forward: gather the shard, compute, save x and the shard only. backward: gather again, compute again under "
        "torch.enable_grad() with x and the weights as leaves, torch.autograd.grad, reduce-scatter the weights' "
        "gradient (average).",
    ),
)
def check_gathered_block(learner: type) -> Receipt:
    cases = [_draw_stack(4, 5), replace(_draw_stack(3, 4), learned=False), _draw_stack(2, 3, torch.float64)]
    trials = sharding.by_case(run(rank_programs_blocks.run_blocks, 4, learner, cases), cases)
    for case, ranks in zip(cases, trials, strict=True):
        _judge_block_gradients(case, ranks)
    rows = []
    for case, ranks in zip(cases, trials, strict=True):
        n, size, depth = case.world_size, case.blocks[0].numel(), len(case.blocks)
        enough = depth * 3 * comms.ring_all_gather(size, case.blocks[0].itemsize, n).sent_per_rank[0]
        sent, computed = max(did.bytes[0] for did in ranks), max(did.held["computed"] for did in ranks)
        held, gradients, left = (max(did.held[key] for did in ranks) for key in ("blocks", "gradients", "left"))
        rows += [
            row(f"bytes sent per rank, N={n}: 3P(N-1)/N", enough, sent, "B"),
            row(f"    of {depth} blocks, gathered at once: at most 2", True, held <= 2),
            row("    of their whole gradients at once: at most 2", True, gradients <= 2),
            row("    times a block is computed: at most 2", True, computed <= 2 * depth),
            row("    collectives per rank", None, sharding.list_calls(dict(ranks[0].calls))),
        ]
        if held > 2:
            raise CheckFailed(
                f"right values, but {held} of {depth} blocks lie there whole at the same time: save the shard for "
                "backward, not the gathered weights, and gather again",
                rows,
            )
        if left:
            raise CheckFailed(
                f"right values, but {left} of the gathered blocks is still there when all have computed: something "
                "outside the function refers to it",
                rows,
            )
        if gradients > 2:
            raise CheckFailed(
                f"right values, but the whole gradients of {gradients} blocks lie there at once: keep what the "
                "reduce-scatter returns, not what goes into it",
                rows,
            )
        if computed > 2 * depth:
            raise CheckFailed(
                f"right values, but {depth} blocks are computed {computed} times: once in forward, once in backward "
                "(one torch.autograd.grad gives both gradients)",
                rows,
            )
        if sent > enough:
            raise CheckFailed(
                f"right values, but a rank sends {sent:,} bytes where {enough:,} are enough (N={n}): a block needs two "
                f"all-gathers and one reduce-scatter, and you called {sharding.list_calls(dict(ranks[0].calls))}",
                rows,
            )
        if sent < enough:
            raise CheckFailed(
                f"right values, but a rank sends {sent:,} bytes where blocks that are freed after forward take "
                f"{enough:,} (N={n}): their weights stay somewhere. Gather them again in backward",
                rows,
            )
    return Receipt("stage 3, block by block", tuple(rows))


def _draw_stack(world: int, depth: int, dtype: torch.dtype = torch.float32) -> Stack:
    hidden, inner = random.randint(5, 9), world * random.randint(2, 4)
    blocks = torch.randn(depth, 2 * hidden * inner, dtype=dtype) / 3
    return Stack(list(blocks), list(torch.randn(world, random.randint(2, 5), hidden, dtype=dtype)))


def _judge_block_gradients(case: Stack, ranks: Sequence[RankRecord]) -> None:
    n, alone = case.world_size, []
    for given in case.inputs:
        blocks = [block.clone().requires_grad_() for block in case.blocks]
        x = first = given.clone().requires_grad_()
        for block in blocks:
            x = rank_programs_blocks.compute(x, block)
        x.square().mean().backward()
        alone.append(([block.grad for block in blocks], first.grad, x.detach()))
    for rank, did in enumerate(ranks):
        name = f"rank {rank} of {n}"
        if not torch.allclose(did.results["output"], alone[rank][2], rtol=1e-4, atol=1e-6):
            raise CheckFailed(f"{name}: the output of the blocks is wrong: it is compute(x, all gathered weights)")
        found, wanted = did.results["input"], alone[rank][1]
        if case.learned and (found is None or not torch.allclose(found, wanted, 1e-3, 1e-6)):
            raise CheckFailed(f"{name}: the gradient of x is wrong: it is this rank's own, it takes no reduction")
        for index, found in enumerate(did.results["shards"]):
            gradients = [own[0][index] for own in alone]
            wanted = torch.stack(gradients).mean(0).chunk(n)[rank]
            if found is None or torch.allclose(found, wanted, rtol=1e-3, atol=1e-6):
                if found is None:
                    raise CheckFailed(f"{name}: shard {index} has no gradient: return it in second place")
                continue
            said = "whose is it, and was it reduced?"
            if torch.allclose(found, n * wanted, rtol=1e-3, atol=1e-6):
                said = f"it is the sum, {n} times the average (op='avg')"
            elif torch.allclose(found, gradients[rank].chunk(n)[rank], rtol=1e-3, atol=1e-6):
                said = "it is the slice of this rank's own gradient: nothing was reduced"
            raise CheckFailed(f"{name}: the gradient of shard {index} is wrong: {said}")
