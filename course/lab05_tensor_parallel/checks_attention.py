"""Lab 05, tensor parallelism: attention cut by heads, and an input gradient that travels while dW is computed."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from course.kit import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, Row, row
from course.lab05_tensor_parallel import rank_programs, rank_programs_order
from course.lab05_tensor_parallel.checks import (
    ANOTHER_GROUP,
    direction_rows,
    judge_output,
    refuse_extra,
    say_gradient,
)
from course.lab05_tensor_parallel.rank_programs import Layer, Passed, close, shown
from minillm.predict import comms

ANSWERS = answers_of("05_tensor_parallel")


# What they are held to.


@exercise(
    "parallel-attention",
    minutes=20,
    difficulty=3,
    hints=(
        "Heads are to attention what inner numbers are to the MLP: each works alone until o_proj adds them up. Which "
        "kv heads do this rank's query heads look at?",
        "Query heads rank·H/t up to (rank+1)·H/t. Query head j looks at kv head j // (H / H_kv). The kv heads of a "
        "rank run from that of its first query head to that of its last.",
    ),
)
def check_attention(learner: Any) -> Receipt:
    if not isinstance(learner, tuple) or len(learner) != 2:
        raise CheckFailed("the exercise asks for both functions: (local_heads, attention)")
    shapes = [(8, 4, 2), (8, 2, 4), (4, 4, 4), (6, 3, 3)]
    others = [(*rank_programs.draw_heads(world), world) for world in random.sample(range(2, 13), 4)]
    for heads, kv_heads, world in [*shapes, (32, 8, 8), (16, 1, 4), *others]:
        _judge_heads(learner[0], heads, kv_heads, world)
    cases = [rank_programs.draw_attention(*shape) for shape in shapes]
    larger = random.choice(rank_programs.LARGER)
    cases.append(rank_programs.in_float32(rank_programs.draw_attention(*rank_programs.draw_heads(larger), larger)))
    found = rank_programs.try_cases(rank_programs.run_attention, learner, cases)
    rows: list[Row] = []
    for case, ranks in zip(cases, found, strict=True):
        _judge_attention(case, ranks)
        (heads, kv_heads), n = case.heads, case.world_size
        kept = sum(len(keys) for _, keys in (ANSWERS.local_heads(heads, kv_heads, rank, n) for rank in range(n)))
        of_both = [
            row(f"{heads} heads, {kv_heads} kv heads, {n} ranks: kv heads held, copies included", None, kept),
            *direction_rows(case, ranks[0]),
        ]
        refuse_extra([*rows, *of_both], case, ranks)
        rows += shown(case, of_both)
    return Receipt("attention by heads", tuple(rows))


def _judge_heads(learner: Callable, heads: int, kv_heads: int, n: int) -> None:
    what, taken = f"{heads} query heads, {kv_heads} kv heads, {n} ranks", []
    for rank in range(n):
        try:
            queries, keys = (range(part.start, part.stop) for part in learner(heads, kv_heads, rank, n))
        except (TypeError, ValueError, AttributeError) as error:
            raise CheckFailed(f"the exercise asks for two ranges, (query heads, kv heads): {error}") from error
        needed = sorted({query // (heads // kv_heads) for query in queries})
        if len(queries) != heads // n:
            raise CheckFailed(f"{what}: rank {rank} has {len(queries)} query heads, a fair share is {heads // n}")
        if missing := [key for key in needed if key not in keys]:
            raise CheckFailed(
                f"{what}: query heads {list(queries)} of rank {rank} look at kv heads {needed}, and kv head "
                f"{missing[0]} is not on that rank: with fewer kv heads than ranks, ranks hold copies"
            )
        if len(keys) > len(needed):
            raise CheckFailed(
                f"{what}: rank {rank} holds kv heads {list(keys)}, but its query heads look at {needed} only: the rest "
                "is memory for nothing"
            )
        taken += queries
    if taken != list(range(heads)):
        raise CheckFailed(f"{what}: together the ranks have query heads {taken}; each should be there once, in order")


def _judge_attention(case: Layer, ranks: Sequence[Passed]) -> None:
    (heads, kv_heads), n, alone = case.heads, case.world_size, case.alone(rank_programs.whole_attention)
    sums = [torch.zeros_like(weight) for weight in case.weights]
    for rank, passed in enumerate(ranks):
        judge_output(passed, alone, f"{heads} heads, {kv_heads} kv heads, rank {rank} of {n}", n)
        places = rank_programs.cut_heads(sums, *ANSWERS.local_heads(heads, kv_heads, rank, n))
        for place, i in zip(places, range(4), strict=True):
            if (gradient := passed.results[f"d{i}"]) is None:
                raise CheckFailed(f"rank {rank} of {n}: the gradient of its {'qkvo'[i]} is None")
            place += gradient  # a view into the sum: copies of a kv head add up
    for i, name in enumerate("qkvo"):
        if not close(sums[i], alone[f"d{i}"]):
            raise CheckFailed(
                f"{heads} heads on {n} ranks: the gradient of {name}, put together from the ranks, is wrong"
            )


@exercise(
    "overlapped-input-gradient",
    minutes=15,
    difficulty=3,
    hints=(
        "Backward has two products, dX and dW, and only one of them is sent. Which has to come first?",
        "dX first; start its all-reduce with async_op=True, which returns a handle at once; compute dW; then "
        "handle.wait(), and return.",
    ),
)
def check_column(learner: Any) -> Receipt:
    cases = rank_programs.draw_cases(_draw_column)
    found = rank_programs.try_cases(rank_programs_order.run_column, learner, cases)
    rows: list[Row] = []
    for case, ranks in zip(cases, found, strict=True):
        n, weight = case.world_size, case.weights[0]
        alone = case.alone(lambda x, w: x @ w.T)
        for rank, passed in enumerate(ranks):
            who = f"rank {rank} of {n}"
            if passed.forward.calls or not close(passed.results["output"], alone["output"].chunk(n, dim=1)[rank]):
                raise CheckFailed(
                    f"{who}: forward called {passed.forward}; the exercise asks for x @ weight.T, this rank's "
                    "columns of the output, which stay here"
                )
            if not close(passed.results["dw"], alone["d0"].chunk(n)[rank]):
                said = say_gradient(passed.results["dw"], alone["d0"].chunk(n)[rank], n)
                raise CheckFailed(f"{who}: the gradient of the weight is {said}; it stays on this rank, unreduced")
            if not close(passed.results["dx"], alone["dx"]):
                share = case.output_gradient.chunk(n, dim=1)[rank] @ weight.chunk(n)[rank]
                said = "this rank's share alone" if close(passed.results["dx"], share) else "wrong"
                raise CheckFailed(f"{who}: the gradient of x is {said}; the exercise asks for the sum over the ranks")
            _judge_order(passed.results["log"], who)
            if not all(map(close, passed.results["crossed"], (alone["dx"], alone["d0"].chunk(n)[rank]))):
                raise CheckFailed(f"{who}: {ANOTHER_GROUP}: keep x, weight and group in ctx")
        cost = comms.ring_all_reduce(case.x.numel(), case.x.element_size(), n).sent_per_rank[0]
        log = ", ".join(ranks[0].results["log"])
        of_backward = [
            row(f"{n} ranks: bytes sent in backward", cost, ranks[0].backward.bytes, "B"),
            row(f"    the all-reduce under way while dW is computed: {log}", True, True),
        ]
        rows += shown(case, of_backward)
    return Receipt("dX travels while dW is computed", tuple(rows))


def _judge_order(log: list[str], who: str) -> None:
    order = ", ".join(log)
    if "all-reduce" in log:
        raise CheckFailed(f"{who}: {order}. The all-reduce blocks: async_op=True returns a handle at once")
    if "wait" not in log:
        raise CheckFailed(
            f"{who}: {order}. Nobody waits for the all-reduce: the gradient may be read before it is there"
        )
    if "dW" not in log:
        raise CheckFailed(
            f"{who}: {order}. No product of the weight's shape was seen in backward: where is dW computed?"
        )
    if log.count("dW") > 1:
        raise CheckFailed(f"{who}: {order}. The product is computed {log.count('dW')} times; keep what was computed")
    if log.index("start") > log.index("dW"):
        raise CheckFailed(f"{who}: {order}. When the all-reduce starts there is nothing left to compute beside it")
    if log.index("wait") < log.index("dW"):
        raise CheckFailed(f"{who}: {order}. It is waited for at once, so nothing is hidden: compute dW before the wait")


def _draw_column(world: int) -> Layer:
    tokens, hidden = random.sample(range(4, 8), 2)
    rows = 8 + random.randint(1, 9)  # of each rank; the three sizes differ, so that products can be told apart
    weight = rank_programs.randn(rows * world, hidden) / 2
    return Layer(rank_programs.randn(tokens, hidden), (weight,), rank_programs.randn(tokens, rows * world), world)
