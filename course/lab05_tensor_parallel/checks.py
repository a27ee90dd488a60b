"""Lab 05, tensor parallelism: the conjugate operators, and the pair of layers between them.

    lab_05.py              f and g, the MLP
    lab_05_attention.py    attention by heads; an input gradient that travels while the weights' is computed
    lab_05_vocabulary.py   embedding and loss, cut along the vocabulary
    lab_05_sequence.py     sequence parallelism

Every verifier runs the learner's piece on real ranks and compares output and gradients with one process in float64, and
then the collectives of either direction: a layer that gathers what it need not has right values, and fails.
"""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, Row, row
from course.lab05_tensor_parallel import rank_programs
from course.lab05_tensor_parallel.rank_programs import Layer, Operators, Passed, close, shown
from course.shared.diagnose import say_rounded
from minillm.predict import comms

# What they are held to.


@exercise(
    "conjugate-operators",
    minutes=15,
    difficulty=2,
    hints=(
        "Ask of each direction: does a rank have the whole value, or only its share of a sum? Only a share needs a "
        "collective.",
        "Enter: forward hands x on; backward all-reduces, since each rank computed the gradient through its own part "
        "of the weights. Leave: forward all-reduces; backward hands the gradient on, since every rank has it whole.",
        "Enter.forward: ctx.group = group; return x.view_as(x). Enter.backward: return "
        "ctx.group.all_reduce(gradient.clone()), None. Leave.forward: return group.all_reduce(share.clone()). "
        "Leave.backward: return gradient, None. all_reduce works in place, hence the clones.",
    ),
)
def check_operators(learner: Any) -> Receipt:
    if not isinstance(learner, tuple) or len(learner) != 2:
        raise CheckFailed("the exercise asks for both classes: (Enter, Leave)")
    cases = rank_programs.draw_cases(_draw_operators)
    rows: list[Row] = []
    for case, found in zip(cases, rank_programs.try_cases(rank_programs.run_operators, learner, cases), strict=True):
        n = case.world_size
        for rank, passed in enumerate(found):
            _judge_enter(case, rank, passed["enter"])
            _judge_leave(case, rank, passed["leave"])
        cost = comms.ring_all_reduce(case.x.numel(), case.x.element_size(), n).sent_per_rank[0]
        enter, leave = found[0]["enter"], found[0]["leave"]
        of_both = [
            row(f"f forward, {n} ranks", 0, enter.forward.bytes, "B"),
            row(f"f backward, {n} ranks", cost, enter.backward.bytes, "B"),
            row(f"g forward, {n} ranks", cost, leave.forward.bytes, "B"),
            row(f"g backward, {n} ranks", 0, leave.backward.bytes, "B"),
        ]
        rows += shown(case, of_both)
    return Receipt("bytes sent by rank 0", tuple(rows))


def _draw_operators(world: int) -> Operators:
    shape = (random.randint(3, 6), random.randint(4, 7))
    partials, gradients = ([rank_programs.randn(*shape) for _ in range(world)] for _ in range(2))
    return Operators(rank_programs.randn(*shape), partials, gradients)


def _judge_enter(case: Operators, rank: int, passed: Passed) -> None:
    n, who = case.world_size, f"Enter, rank {rank} of {case.world_size}"
    if passed.forward.calls or not close(passed.results["output"], case.x):
        raise CheckFailed(f"{who}: forward called {passed.forward}. Every rank has x already: it is handed on as it is")
    total, found = torch.stack(case.gradients).sum(0), passed.results["dx"]
    if not close(found, total):
        said = "the exercise asks for the sum of the ranks' gradients"
        if close(found, case.gradients[rank]):
            said = "it is what this rank computed through its own part of the weights; the other parts' shares are lost"
        elif close(found, total / n):
            said = "it is the average: the ranks hold different weights and not different batches, so their shares add"
        raise CheckFailed(f"{who}: the gradient of x is wrong: {said}")
    if not close(passed.results["handed"], case.gradients[rank]):
        raise CheckFailed(
            f"{who}: backward changed the gradient it was handed. all_reduce works in place, and a residual "
            "connection holds the same tensor: reduce a clone"
        )
    if not close(passed.results["crossed"], total):
        raise CheckFailed(f"{who}: {ANOTHER_GROUP}: keep the group in ctx")


def _judge_leave(case: Operators, rank: int, passed: Passed) -> None:
    n, who = case.world_size, f"Leave, rank {rank} of {case.world_size}"
    total, found = torch.stack(case.partials).sum(0), passed.results["output"]
    if not close(found, total):
        said = "the exercise asks for the sum of the ranks' shares"
        if close(found, total / n):
            said = "it is the average: these are parts of one sum, nothing is to be divided"
        elif close(found, case.partials[rank]):
            said = "it is this rank's share alone"
        raise CheckFailed(f"{who}: the output is wrong: {said}")
    if not close(passed.results["handed"], case.partials[rank]):
        raise CheckFailed(f"{who}: forward changed its input, which autograd may have saved: reduce a clone")
    gradient, found = case.gradients[0], passed.results["dx"]
    if not close(found, gradient):
        said = "the gradient of a share of a sum is the sum's own gradient"
        if close(found, n * gradient):
            said = f"it is {n} times too large: every rank has the whole gradient already, so nothing is summed again"
        raise CheckFailed(f"{who}: the gradient of the share is wrong: {said}")
    if passed.backward.calls:
        raise CheckFailed(
            f"{who}: right values, but backward called {passed.backward}: every rank has that gradient already"
        )


@exercise(
    "parallel-mlp",
    minutes=15,
    difficulty=3,
    hints=(
        "silu(gate x) · up x looks at each of the f inner numbers alone. If a rank has whole inner numbers, it can go "
        "on without asking anybody. Which cut gives it whole ones?",
        "Rows of gate and up (whole inner numbers on a rank), columns of down (what those numbers contribute to the "
        "output). One Enter before, one Leave behind, nothing between.",
    ),
)
def check_mlp(learner: Any) -> Receipt:
    if not isinstance(learner, tuple) or len(learner) != 2:
        raise CheckFailed("the exercise asks for both functions: (cut_mlp, mlp)")
    cases = rank_programs.draw_cases(rank_programs.draw_mlp)
    found = rank_programs.try_cases(rank_programs.run_mlp, learner, cases)
    rows: list[Row] = []
    for case, ranks in zip(cases, found, strict=True):
        n, alone = case.world_size, case.alone(rank_programs.whole_mlp)
        for rank, passed in enumerate(ranks):
            who = f"rank {rank} of {n}"
            judge_output(passed, alone, who, n)
            cut = learner[0](*(alone[f"d{i}"] for i in range(3)), rank, n)  # whichever inner numbers these are
            for i, (name, wanted) in enumerate(zip(("gate", "up", "down"), cut, strict=True)):
                if not close(passed.results[f"d{i}"], wanted):
                    raise CheckFailed(
                        f"{who}: output and dX are right, but the gradient of its part of {name} is "
                        f"{say_gradient(passed.results[f'd{i}'], wanted, n)}"
                    )
        whole = sum(w.nbytes for w in case.weights)
        held = row(f"bytes of weights per rank, {n} ranks: 1/{n} of {whole:,}", whole // n, ranks[0].held, "B")
        of_both = [held, *direction_rows(case, ranks[0])]
        refuse_extra([*rows, *of_both], case, ranks)
        rows += shown(case, of_both)
    return Receipt("one all-reduce in either direction", tuple(rows))


# Shared by the verifiers of this lab.

ANOTHER_GROUP = (
    "right alone, but wrong where another group comes between forward and backward, as with tensor and expert "
    "parallelism in one model"
)


def judge_output(passed: Passed, alone: dict[str, Tensor], who: str, n: int) -> None:
    """CheckFailed unless output and input gradient of a layer are those of one process."""
    found = passed.results["output"]
    if not close(found, alone["output"]):
        said = say_rounded(found, alone["output"]) or "it is not the whole layer's"
        if close(found, alone["output"] / n):
            said = "it is an average; shares of a sum are added"
        raise CheckFailed(f"{who}: the output is wrong: {said}. Are whole inner numbers on one rank, and all summed?")
    if not close(passed.results["dx"], alone["dx"]):
        said = "is Enter in front of every use of x?"
        if close(passed.results["dx"], n * alone["dx"]):
            said = f"it is {n} times too large"
        raise CheckFailed(f"{who}: the output is right, the gradient of x is wrong: {said}")


def say_gradient(found: Any, wanted: Tensor, n: int) -> str:
    if not isinstance(found, Tensor):
        return "None: it takes no part in the output"
    if found.shape != wanted.shape:
        return f"of shape {list(found.shape)}, not {list(wanted.shape)}"
    return f"{n} times too large" if close(found, n * wanted) else "wrong"


def direction_rows(case: Layer, passed: Passed) -> list[Row]:
    """The bytes of either direction beside one all-reduce of the activations."""
    cost = comms.ring_all_reduce(case.x.numel(), case.x.element_size(), case.world_size).sent_per_rank[0]
    return [
        row(f"    forward, bytes sent: {passed.forward}", cost, passed.forward.bytes, "B"),
        row(f"    backward, bytes sent: {passed.backward}", cost, passed.backward.bytes, "B"),
    ]


def refuse_extra(rows: Sequence[Row], case: Layer, ranks: Sequence[Passed]) -> None:
    """CheckFailed if right values took more than one all-reduce in either direction."""
    cost = comms.ring_all_reduce(case.x.numel(), case.x.element_size(), case.world_size).sent_per_rank
    for rank, passed in enumerate(ranks):
        for name, traffic in (("forward", passed.forward), ("backward", passed.backward)):
            if traffic.calls.total() > 1 or traffic.bytes > cost[rank]:
                raise CheckFailed(
                    f"right values, but {name} called {traffic} and rank {rank} sent {traffic.bytes:,} bytes, where "
                    f"one all-reduce of {cost[rank]:,} is enough: {_where(name)}",
                    rows,
                )


def _where(direction: str) -> str:
    if direction == "forward":
        return "between the two layers a rank needs nothing from the others"
    return "all uses of x share one Enter, and Leave needs nothing"
