"""Lab 17's rank programs: an adapter beside a layer that is cut over ranks, whose gradients a learner finishes.

column   W, B: rows of this rank      A: whole on every rank      x whole, y this rank's outputs
row      W, A: columns of this rank   B: whole on every rank      x this rank's inputs, y a share of the sum
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from course.kit.exercises import CheckFailed
from course.shared.groups import on_groups
from course.shared.sharding import by_case, list_calls
from course.shared.trials import run
from minillm import measure
from minillm.comm import Group, RankError

COLUMN, ROW = KINDS = ("column", "row")


@dataclass(frozen=True)
class CutAdapter:
    """x: [tokens, in], dy: [tokens, out], a: [rank, in], b: [out, rank], of the whole layer, in float64."""

    kind: str
    world_size: int
    x: Tensor
    dy: Tensor
    a: Tensor
    b: Tensor

    @classmethod
    def draw(cls, kind: str, world_size: int) -> "CutAdapter":
        inputs, outputs = (world_size * times for times in random.sample(range(2, 6), 2))
        tokens, rank = random.randint(3, 6), random.randint(2, 4)
        shapes = ((tokens, inputs), (tokens, outputs), (rank, inputs), (outputs, rank))
        return cls(kind, world_size, *(torch.randn(*shape, dtype=torch.float64) for shape in shapes))

    @property
    def shared(self) -> str:
        """The matrix that every rank has whole."""
        return "A" if self.kind == COLUMN else "B"

    def parts(self, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, dy, A and B as this rank has them."""
        n = self.world_size
        if self.kind == COLUMN:
            return self.x, self.dy.chunk(n, 1)[rank], self.a, self.b.chunk(n)[rank]
        return self.x.chunk(n, 1)[rank], self.dy, self.a.chunk(n, 1)[rank], self.b

    @cached_property
    def gradients(self) -> dict[str, Tensor]:
        """Of the whole A and B, in one process."""
        return _gradients(self.x, self.dy, self.a, self.b)

    def share(self, which: str, rank: int) -> Tensor:
        """What this rank's own backward pass gives."""
        return _gradients(*self.parts(rank))[which]

    def wanted(self, which: str, rank: int) -> Tensor:
        whole = self.gradients[which]
        if which == self.shared:
            return whole
        return whole.chunk(self.world_size, 0 if which == "B" else 1)[rank]


def _gradients(x: Tensor, dy: Tensor, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    a, b = (each.detach().clone().requires_grad_() for each in (a, b))
    ((x @ a.T) @ b.T).backward(dy)
    return {"A": a.grad, "B": b.grad}


@dataclass(frozen=True)
class Finished:
    """results: what the learner returned; bytes that this rank sent, in which calls."""

    results: Any
    bytes: int
    calls: str


def finish_on_ranks(group: Group, learner: Callable, cases: Sequence[CutAdapter]) -> list[Finished | None]:
    def run_case(case: CutAdapter, part: Group) -> Finished:
        shares = _gradients(*case.parts(part.rank))
        with measure.ledger() as led:
            results = learner(case.kind, shares["A"], shares["B"], part)
        return Finished(results, led.bytes(), list_calls(led.calls))

    return on_groups(group, cases, run_case)


def try_cases(learner: Callable, cases: Sequence[CutAdapter]) -> list[list[Finished]]:
    """By case and rank; what a rank said about the answer is said to the learner."""
    try:
        return by_case(run(finish_on_ranks, 4, learner, cases), cases)
    except RankError as error:
        if said := re.search(r"raised CheckFailed: (.+)", str(error)):
            raise CheckFailed(said[1]) from None
        raise


# A whole training run, for the bug that Adam hides.

STEPS, LR = 8, 0.02


def train_twice(group: Group, finish: Callable) -> dict[str, dict[str, list[float]]]:
    """A column layer's adapter learns a random target with AdamW, its gradients finished once, and then twice.

    By name: the losses, and the norm of A's gradient, of every step."""
    return {name: _train(group, finish, times) for name, times in (("once", 1), ("twice", 2))}


def _train(group: Group, finish: Callable, times: int) -> dict[str, list[float]]:
    n, rank = group.world_size, group.rank
    draw = torch.Generator().manual_seed(0)
    x, target, a = (torch.randn(*s, generator=draw, dtype=torch.float64) for s in ((32, 16), (32, 8 * n), (4, 16)))
    target = target.chunk(n, 1)[rank]
    a, b = a.requires_grad_(), torch.zeros(8, 4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([a, b], lr=LR, weight_decay=0.0)
    losses, norms = [], []
    for _ in range(STEPS):
        loss = ((x @ a.T) @ b.T - target).square().sum() / (32 * 8 * n)
        optimizer.zero_grad()
        loss.backward()
        for _ in range(times):
            a.grad, b.grad = finish(COLUMN, a.grad, b.grad, group)
        losses.append(group.all_reduce(loss.detach().clone()).item())
        norms.append(a.grad.norm().item())
        optimizer.step()
    return {"losses": losses, "norms": norms}
