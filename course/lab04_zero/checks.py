"""Lab 04, ZeRO: who holds which part, and the optimizer cut into N parts.

    checks.py          partition, stage 1
    checks_blocks.py   stage 2 (gradients freed in backward), stage 3 (blocks gathered, used, freed)
    checks_shards.py   what is done with shards afterwards: clip, save, offload

Every verifier runs the learner's piece on real ranks, on fresh numbers, and compares with one process: the values, the
bytes each rank sent, the kind and number of collectives, and the bytes it held. A "ZeRO" that shards nothing, or that
reduces everything and throws most of it away, has right values, and fails.
"""

import random
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, row
from course.shared import sharding
from course.shared.diagnose import expect, expect_list
from course.shared.sharding import RankRecord, Sizes, Steps
from course.shared.trials import run
from minillm.predict import comms

# What they are held to.


@exercise(
    "shard-partition",
    minutes=10,
    difficulty=2,
    hints=(
        "Lay all parameters end to end and cut the line into N equal pieces. Cuts fall where they fall, also in the "
        "middle of a parameter.",
        "length = the total divided by N, rounded up. Rank r holds the elements from r*length to (r+1)*length of the "
        "line. A parameter that begins at `start` of the line has its share of them, counted from its own start.",
        "For each size: low = min(max(r*length - start, 0), size), high = min(max((r+1)*length - start, 0), size), "
        "slices.append(slice(low, high)), start += size. -(-a // b) rounds up.",
    ),
)
def check_partition(learner: Callable) -> Receipt:
    cases = [_draw_sizes(world, divisible) for world, divisible in ((4, False), (3, False), (4, True), (1, True))]
    cases.append(Sizes([*cases[2].parameters, torch.randn(4)], 4))  # shards one longer: the other one is odd
    cases.append(Sizes(list(torch.randn(5).split((2, 1, 2))), 4))  # shards of 2: nothing is left for the last rank
    fewer = Sizes(list(torch.randn(3).split((1, 2))), random.randint(5, 9))  # than ranks
    for case in (*cases, fewer, _draw_sizes(random.randint(5, 9), False)):
        _judge_partition(learner, case)
    trials = sharding.by_case(run(sharding.gather_shards, 4, learner, cases), cases)
    rows = []
    for case, ranks in zip(cases[:2], trials, strict=False):
        whole = torch.cat([parameter.flatten() for parameter in case.parameters])
        right = all(torch.equal(did.results, whole) for did in ranks)
        length = -(-case.numel // case.world_size)
        sent = comms.ring_all_gather(length * case.world_size, 4, case.world_size).sent_per_rank[0]
        rows += [
            row(
                f"bytes held per rank, {case.numel} elements on {case.world_size}",
                4 * length,
                ranks[0].held["shard"],
                "B",
            ),
            row("    all-gathered, they are the parameters", True, right),
            row("    bytes sent per rank for it", sent, ranks[0].bytes[0], "B"),
        ]
    return Receipt("a flat buffer, cut into N", tuple(rows))


def _draw_sizes(world: int, divisible: bool) -> Sizes:
    sizes = [random.randint(40, 60), random.choice((3, 5, 7, 9)), 1, random.randint(10, 25), random.randint(3, 9)]
    sizes[-1] += -sum(sizes) % world + (0 if divisible or world == 1 else 1)
    return Sizes([torch.randn(size) for size in sizes], world)


def _judge_partition(learner: Callable, case: Sizes) -> None:
    """CheckFailed unless every element is held once, by the rank whose piece of the line it lies in."""
    sizes, n, total = [p.numel() for p in case.parameters], case.world_size, case.numel
    line = f"{total} elements {sizes} on {n} ranks"
    length, held = -(-total // n), []
    for rank in range(n):
        found, slices = expect_list(learner(sizes, n, rank), "a pair, (length, slices)", count=2)
        expect(isinstance(found, Integral), found, "the length of a shard, a whole number, in first place")
        slices = expect_list(slices, "a list of slices in second place")
        if odd := [piece for piece in slices if not _is_of_neighbours(piece)]:
            raise CheckFailed(
                f"{line}: {odd[0]!r} is no slice of neighbours; give slice(first, end), slice(0, 0) for nothing"
            )
        if found * n < total:
            raise CheckFailed(
                f"{line}: {n} shards of {found} hold only {found * n}; the last {total - found * n} are "
                "nobody's. Round up"
            )
        if found != length:
            raise CheckFailed(
                f"{line}: shards of {length} are enough, yours have {found}: pad the whole line once, by "
                f"less than {n} elements"
            )
        if len(slices) != len(sizes):
            raise CheckFailed(f"{line}: {len(slices)} slices for {len(sizes)} parameters; an empty one is slice(0, 0)")
        mine, start = [], 0
        for index, (size, piece) in enumerate(zip(sizes, slices, strict=True)):
            first, end = piece.start or 0, size if piece.stop is None else piece.stop
            if first < 0 or end < 0 or (end > size and end > first):
                raise CheckFailed(
                    f"{line}: rank {rank} holds {piece} of parameter {index}, which has {size} elements: "
                    "count from the parameter's own start, and give slice(0, 0) where the rank holds nothing of it"
                )
            mine += range(start + first, start + end)
            start += size
        if len(mine) > length:
            raise CheckFailed(
                f"{line}: rank {rank} holds {len(mine)}, more than a shard of {length}: cut through "
                "parameters, do not deal them out whole"
            )
        held.append(mine)
    owners = [[rank for rank in range(n) if element in held[rank]] for element in range(total)]
    wrong = next((i for i, ranks in enumerate(owners) if len(ranks) != 1), None)
    if wrong is not None:
        who = f"ranks {owners[wrong]} hold" if owners[wrong] else "no rank holds"
        raise CheckFailed(f"{line}: {who} element {wrong} of the line; exactly one should")
    for rank, mine in enumerate(held):
        wanted = list(range(rank * length, min((rank + 1) * length, total)))
        if mine != wanted:
            raise CheckFailed(f"{line}: rank {rank} holds {_span(mine)} of the line, but its piece is {_span(wanted)}")


def _is_of_neighbours(piece: Any) -> bool:
    bounds = (piece.start or 0, piece.stop or 0, piece.step or 1) if isinstance(piece, slice) else ()
    return bool(bounds) and all(isinstance(bound, Integral) for bound in bounds) and bounds[2] == 1


def _span(elements: Sequence[int]) -> str:
    return f"elements {elements[0]} to {elements[-1]}" if elements else "nothing"


@exercise(
    "zero-one-step",
    minutes=15,
    difficulty=3,
    hints=(
        "Each rank updates 1/N of the weights. Which part of the averaged gradient does it need for that, and what do "
        "the others need from it afterwards?",
        "At first: everybody takes rank 0's weights, and makes an optimizer over an nn.Parameter with its own 1/N. "
        "In each step: reduce-scatter the gradient (average), step, all-gather the updated parts.",
    ),
)
def check_zero_one(learner: Callable) -> Receipt:
    cases = [_draw_steps(4), _draw_steps(3), _draw_steps(2, torch.float64)]
    trials = sharding.by_case(run(sharding.run_zero_one, 4, learner, cases), cases)
    for case, ranks in zip(cases, trials, strict=True):
        _judge_weights(case, ranks)
    rows = []
    for case, ranks in zip(cases, trials, strict=True):
        n, weights = case.world_size, case.weights[0]
        shard = 2 * weights.nbytes // n + max(did.held["step counters"] for did in ranks)
        enough = comms.ring_all_reduce(weights.numel(), weights.itemsize, n).sent_per_rank[0]
        held, sent = max(did.held["optimizer"] for did in ranks), max(max(did.bytes) for did in ranks)
        rows += [
            row(f"optimizer bytes per rank, N={n}, P={weights.nbytes} B", shard, held, "B"),
            row("    bytes sent per rank and step: 2P(N-1)/N", enough, sent, "B"),
        ]
        if held > shard:
            raise CheckFailed(
                f"right values, but the optimizer of a rank holds {held:,} bytes where {shard:,} are enough (N={n}): "
                "this shards nothing. Give make only this rank's part of the weights",
                rows,
            )
        if sent > enough:
            whole = ", that is 3P: the all-reduce brings every rank the whole gradient, and it needs 1/N" * (
                ranks[0].calls["all_reduce"] > 0
            )
            raise CheckFailed(
                f"right values, but a rank sends {sent:,} bytes in a step where {enough:,} are enough (N={n}){whole}",
                rows,
            )
        _judge_objects(case, ranks, rows)
    calls = {name: count / len(cases[0].gradients) for name, count in trials[0][0].calls.items()}
    return Receipt("ZeRO-1 in one step", (*rows, row("    collectives in a step", None, sharding.list_calls(calls))))


def _judge_objects(case: Steps, ranks: Sequence[RankRecord], rows: list) -> None:
    """CheckFailed if weights differ at first, or an object changes what it was given, keeps the whole weights twice, or
    shares with another."""
    if not all(did.held["first weights"] for did in ranks):
        raise CheckFailed(
            "right after the first step, but before it `weights` are not rank 0's on every rank, so the first "
            "gradients come from different models: broadcast into `weights` themselves, in __init__",
            rows,
        )
    kept, size = max(did.held["copies"] for did in ranks), case.weights[0].nbytes
    if kept >= size and case.world_size > 3:  # on fewer ranks a shard and buffers of its length are as large
        raise CheckFailed(
            f"right values, but the object keeps {kept:,} bytes besides `weights`, which have {size:,}: a second copy "
            "of everything. Keep this rank's part only",
            rows,
        )
    if any(did.held["gradients changed"] for did in ranks):
        raise CheckFailed("right values, but step changes the gradient that it is given: work on what you reduce", rows)
    if any(did.held["disturbed"] for did in ranks):
        raise CheckFailed(
            "right values, but two objects of the class side by side disturb each other: keep what belongs to one in "
            "self, not in the class or a global",
            rows,
        )


def _draw_steps(world: int, dtype: torch.dtype = torch.float32) -> Steps:
    size = world * random.randint(20, 40)
    drawn = torch.randn(4, world, size, dtype=dtype)  # what each rank begins with, and the gradients of three steps
    return Steps(list(drawn[0]), [list(ranks) for ranks in drawn[1:]])


def _judge_weights(case: Steps, ranks: Sequence[RankRecord]) -> None:
    """CheckFailed unless all ranks hold, after every step, what one process gives with the averaged gradient."""
    n, start = case.world_size, case.weights[0]
    means = [torch.stack(gradients).mean(0) for gradients in case.gradients]
    wanted = sharding.adam_in_one_process(start, means)
    for rank, did in enumerate(ranks):
        if did.held["optimizers"] != 1:
            raise CheckFailed(
                f"make was called {did.held['optimizers']} times: call it once, at the beginning. The moments "
                "live in the optimizer that it gives"
            )
        for step, (found, right) in enumerate(zip(did.results, wanted, strict=True)):
            if torch.allclose(found, right, rtol=1e-4, atol=1e-5):
                continue
            head = f"rank {rank} of {n} has wrong weights after step {step + 1}"
            raise CheckFailed(f"{head}: {_say_weights(case, rank, step, found, wanted)}")


def _say_weights(case: Steps, rank: int, step: int, found: Tensor, wanted: list[Tensor]) -> str:
    """Which slip gives the weights that rank found."""
    n, gradients = case.world_size, case.gradients[: step + 1]
    owners = [sharding.adam_in_one_process(case.weights[0], [ranks[r] for ranks in gradients])[-1] for r in range(n)]
    local = torch.cat([own.chunk(n)[place] for place, own in enumerate(owners)])
    stale = case.weights[0].clone()
    stale.chunk(n)[rank].copy_(wanted[step].chunk(n)[rank])
    parts = [sharding.adam_in_one_process(w, [torch.stack(g).mean(0) for g in gradients])[-1] for w in case.weights]
    patchwork = torch.cat([part.chunk(n)[place] for place, part in enumerate(parts)])
    slips = {
        "its own part moved, the rest is as old as at the start: gather the updated parts": stale,
        "every part comes from another rank's first weights, a patchwork: begin with rank 0's everywhere": patchwork,
        "these follow from its own first weights: begin with rank 0's everywhere (broadcast)": parts[rank],
        "the gradients were added up, not averaged": sharding.adam_in_one_process(
            case.weights[0], [torch.stack(g).sum(0) for g in gradients]
        )[-1],
        "every part was moved by its owner's own gradient: reduce over the ranks": local,
        "only its own gradient counted: reduce over the ranks": owners[rank],
        "nothing moved": case.weights[0],
        "nothing moved, and the first weights were its own": case.weights[rank],
    }
    for said, weights in slips.items():
        if torch.allclose(found, weights, rtol=1e-4, atol=1e-5):
            return said
    right = [place for place in range(n) if torch.allclose(found.chunk(n)[place], wanted[step].chunk(n)[place], 1e-4)]
    if not right:
        return "every part is wrong: does the optimizer see the mean over the ranks, of this step alone?"
    return f"right are the parts of ranks {right} only: whose gradient, and whose weights, does each part use?"
