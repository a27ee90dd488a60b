"""Lab 05, tensor parallelism: sequence parallelism, the same bytes with norms and residuals cut along the sequence."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, Row, row
from course.lab05_tensor_parallel import rank_programs, rank_programs_order
from course.lab05_tensor_parallel.checks import ANOTHER_GROUP
from course.lab05_tensor_parallel.rank_programs import Layer, Passed, close, shown
from minillm.predict import comms

# What they are held to.


@exercise(
    "sequence-parallel",
    minutes=20,
    difficulty=4,
    hints=(
        "An all-reduce is a reduce-scatter and an all-gather. Put the first where shares leave the parallel region and "
        "the second where the next one begins: what lies between is cut along the sequence.",
        "GatherIn: all_gather forward, reduce_scatter backward. ScatterOut: reduce_scatter forward, all_gather "
        "backward. Norm weights are whole on every rank but met only its tokens: their gradients are shares of a sum.",
    ),
)
def check_sequence(learner: Any) -> Receipt:
    if not isinstance(learner, tuple) or len(learner) != 3:
        raise CheckFailed("the exercise asks for three: (GatherIn, ScatterOut, sum_norm_gradients)")
    cases = rank_programs.draw_cases(_draw_blocks)
    by_case = rank_programs.try_cases(rank_programs_order.run_sequence, learner, cases)
    rows: list[Row] = []
    for case, ranks in zip(cases, by_case, strict=True):
        n, alone = case.world_size, case.alone(rank_programs_order.whole_blocks)
        for rank, passed in enumerate(ranks):
            _judge_blocks(case, alone, rank, passed)
        for rank, passed in enumerate(ranks):
            _judge_norms(case, alone, rank, passed, [other.results["own"] for other in ranks])
        cost = 2 * comms.ring_all_reduce(case.x.numel(), case.x.element_size(), n).sent_per_rank[0]  # two blocks
        sums = ranks[0].results["sums"]
        found = [
            row(f"{n} ranks, forward: {ranks[0].forward}; bytes of 2 all-reduces", cost, ranks[0].forward.bytes, "B"),
            row(f"    backward: {ranks[0].backward}", cost, ranks[0].backward.bytes, "B"),
            row("    norm gradients: collectives", 1, sums.calls.total()),
        ]
        for name, traffic in (("forward", ranks[0].forward), ("backward", ranks[0].backward)):
            if traffic.bytes > cost:
                raise CheckFailed(
                    f"right values, but {name} called {traffic} and sent {traffic.bytes:,} bytes, where {cost:,} are "
                    "enough: where shares are summed, a rank needs its own rows of the sum only",
                    [*rows, *found],
                )
        if sums.calls.total() > 1:
            raise CheckFailed(
                f"right values, but the norms' gradients took {sums}: they are tiny, so latency is all they cost. Put "
                "them into one tensor",
                [*rows, *found],
            )
        if sums.calls["all_reduce"] != 1:
            raise CheckFailed(f"right values, but the norms' gradients took {sums}, where one all-reduce sends less")
        rows += shown(case, found)
    return Receipt("the bytes of tensor parallelism, the norms on 1/t of the tokens", tuple(rows))


def _draw_blocks(world: int) -> Layer:
    hidden, inner, tokens = random.randint(4, 9), world * random.randint(2, 3), world * random.randint(2, 4)
    weights = [1 + rank_programs.randn(hidden) / 4 for _ in range(2)]
    weights += [rank_programs.randn(*shape) / 2 for _ in range(2) for shape in ((inner, hidden), (hidden, inner))]
    return Layer(rank_programs.randn(tokens, hidden), tuple(weights), rank_programs.randn(tokens, hidden), world)


def _judge_blocks(case: Layer, alone: dict[str, Tensor], rank: int, passed: Passed) -> None:
    n, who = case.world_size, f"rank {rank} of {case.world_size}"
    if not close(passed.results["output"], alone["output"].chunk(n)[rank]):
        raise CheckFailed(f"{who}: the output is wrong: the exercise asks for this rank's rows of the whole output")
    inner = {i: alone[f"d{i}"].chunk(n, dim=i % 2)[rank] for i in range(2, 6)}
    if not all(close(passed.results[f"d{i}"], inner[i]) for i in (4, 5)):  # the last layer: only ScatterOut behind it
        raise CheckFailed(
            f"{who}: the output is right, but a weight inside the parallel region has a wrong gradient: ScatterOut's "
            "backward must bring the gradients of all rows to every rank"
        )
    right = close(passed.results["dx"], alone["dx"].chunk(n)[rank])
    if not right or not all(close(passed.results[f"d{i}"], inner[i]) for i in (2, 3)):
        raise CheckFailed(
            f"{who}: the gradient of x is wrong: GatherIn's backward has to sum the ranks' shares and keep its own rows"
        )


def _judge_norms(
    case: Layer, alone: dict[str, Tensor], rank: int, passed: Passed, own: Sequence[Sequence[Tensor]]
) -> None:
    n = case.world_size
    for i in range(2):
        found, wanted = passed.results[f"d{i}"], alone[f"d{i}"]
        if close(found, wanted):
            continue
        said = "the exercise asks for the sum over the ranks, in place"
        if close(found, own[rank][i]):
            said = "it is that of this rank's tokens alone: the replicas of this weight will drift apart"
        elif close(found, wanted / n):
            said = "it is the average; every rank saw other tokens of the same batch, so the shares add"
        raise CheckFailed(f"rank {rank} of {n}: the gradient of norm {i} is wrong: {said}")
    if passed.results["moved"]:
        raise CheckFailed(
            f"rank {rank} of {n}: right sums, but in new tensors: write them into the .grad that is there (copy_), "
            "which may be a view of a bucket"
        )
    unequal = passed.results["unequal"]
    if not torch.equal(unequal, n * torch.arange(len(unequal)).to(unequal) + n * (n - 1) / 2):
        raise CheckFailed(f"rank {rank} of {n}: wrong for three norms of several lengths: each has its own")
    x_gradient, share_gradient = n * case.output_gradient.chunk(n)[rank], case.output_gradient
    crossed = passed.results["crossed"]
    if crossed is None or not all(map(close, crossed, (x_gradient, share_gradient))):
        raise CheckFailed(f"rank {rank} of {n}: {ANOTHER_GROUP}: keep the group in ctx")
