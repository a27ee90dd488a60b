"""Lab 03, what to communicate: a count, so that tokens and not ranks weigh alike."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab03_data_parallel.rank_programs import CLOSE
from course.shared.trials import run
from minillm import measure
from minillm.comm import Group


@exercise(
    "token-weighted-loss",
    minutes=10,
    difficulty=3,
    hints=(
        "The mean over all tokens is one sum divided by one count. Which of the two can a rank not know by itself?",
        "Divide your own sum by the number of tokens of *all* ranks: one all-reduce of one number. Then remember that "
        "the gradients will be averaged over ranks, when they should be added.",
    ),
)
def check_weighted(learner: Callable) -> Receipt:
    counts = (*random.sample(range(3, 12), 2), 0)
    case = _Tokens(random.randrange(2**31), counts, tuple(random.sample(range(12, 40), 3)))
    ranks = run(_weighted, 3, learner, case)
    right, gradient = case.alone()
    for rank, found in enumerate(ranks):
        if not isinstance(found["value"], float):
            raise CheckFailed(
                f"rank {rank} returned {found['value']}; the exercise asks for a loss, one number in a tensor"
            )
        if found["value"] != found["value"]:
            what = "which has no token that counts" if not case.counts[rank] else "whose tokens are fine"
            raise CheckFailed(f"rank {rank}, {what}, returned nan: divide by the tokens of all ranks, never by its own")
        if not found["linked"]:
            raise CheckFailed(
                f"rank {rank} returned a loss whose backward does not reach the model: keep nll in it, also on a rank "
                "without tokens. Hooks that never run there would leave the other ranks waiting in their all-reduces"
            )
        if found["changed"]:
            raise CheckFailed(f"rank {rank} changed its counts: all_reduce works in place, so give it counts.sum()")
    averaged = ranks[0]["gradient"]
    if not any(found["calls"] for found in ranks):
        raise CheckFailed(
            f"{_say_weighted(averaged, gradient, case)}; no rank asked how many tokens the others have "
            f"(here {list(case.counts)})"
        )
    error = relative(averaged, gradient)
    if not error <= CLOSE:
        raise CheckFailed(_say_weighted(averaged, gradient, case))
    # A rank without any token, and one with so many that 8 or 16 bits do not hold the total (no multiple of 4) exactly.
    many = 4 * random.randint(1100, 1200) + random.randint(1, 3) - sum(counts)
    four = _Tokens(case.seed, (*counts, many), (*case.lengths[:2], 0, many + random.randint(1, 9)))
    averaged, expected = run(_weighted, 4, learner, four)[0]["gradient"], four.alone()[1]
    if averaged is None or not relative(averaged, expected) <= CLOSE:
        raise CheckFailed(f"right on 3 ranks, but on 4 {_say_weighted(averaged, expected, four)}")
    numbers = max(found["largest"] for found in ranks)
    if numbers > 8:
        raise CheckFailed(f"a tensor of {numbers} numbers was communicated where one is enough: the count of tokens")
    return receipt(
        f"mean over tokens, {list(case.counts)} on 3 ranks",
        [
            row(f"gradient within {CLOSE:g} of one process's", True, error <= CLOSE),
            row("mean of the ranks' losses", right, sum(found["value"] for found in ranks) / 3, tolerance=CLOSE),
            row("collectives", 1, max(sum(found["calls"].values()) for found in ranks)),
            row("    error of the mean of means", None, relative(case.mean_of_means(), gradient)),
        ],
    )


@dataclass(frozen=True)
class _Tokens:
    """A linear classifier and, on each rank, `lengths[rank]` tokens of which `counts[rank]` count, one with loss 0."""

    seed: int
    counts: tuple[int, ...]
    lengths: tuple[int, ...]

    def model(self) -> nn.Linear:
        draw = torch.Generator().manual_seed(self.seed)
        model = nn.Linear(6, 5, bias=False, dtype=torch.float64)
        model.weight.data = torch.randn(5, 6, generator=draw, dtype=torch.float64)
        return model

    def tokens(self, model: nn.Linear, rank: int) -> tuple[Tensor, Tensor]:
        """(nll, counts) of a rank: [lengths[rank]] each."""
        draw, n = torch.Generator().manual_seed(self.seed + 1 + rank), self.lengths[rank]
        x, targets = torch.randn(n, 6, generator=draw, dtype=torch.float64), torch.randint(5, (n,), generator=draw)
        counts = torch.zeros(n, dtype=torch.float64)
        counts[torch.randperm(n, generator=draw)[: self.counts[rank]]] = 1
        for sure in counts.nonzero()[:1, 0]:  # scaled until the model is certain, to the last bit
            logits = model(x[sure]).detach()
            targets[sure], (first, second) = logits.argmax(), logits.topk(2).values
            x[sure] *= 100 / (first - second)
        return nn.functional.cross_entropy(model(x), targets, reduction="none"), counts

    def alone(self) -> tuple[float, Tensor]:
        """Loss and gradient of one process that has all tokens."""
        model = self.model()
        nll, counts = (
            torch.cat(parts) for parts in zip(*(self.tokens(model, r) for r in range(len(self.counts))), strict=True)
        )
        loss = (nll * counts).sum() / counts.sum()
        return loss.item(), torch.autograd.grad(loss, model.weight)[0]

    def mean_of_means(self) -> Tensor:
        """The gradient when every rank that has tokens divides by its own."""
        model = self.model()
        parts = [self.tokens(model, rank) for rank in range(len(self.counts))]
        loss = sum((nll * counts).sum() / counts.sum().clamp(min=1) for nll, counts in parts) / len(parts)
        return torch.autograd.grad(loss, model.weight)[0]

    def by_lengths(self) -> Tensor:
        """The gradient when every rank divides by its own number of tokens, whether they count or not."""
        model = self.model()
        parts = [self.tokens(model, rank) for rank in range(len(self.counts)) if self.lengths[rank]]
        loss = sum((nll * counts).mean() for nll, counts in parts) / sum(counts.mean() for _, counts in parts)
        return torch.autograd.grad(loss, model.weight)[0]


def _weighted(group: Group, learner: Callable, case: _Tokens) -> dict:
    model = case.model()
    nll, counts = case.tokens(model, group.rank)
    before = counts.clone()
    learner(*replace(case, seed=case.seed + 1).tokens(model, group.rank), group)  # of the step before
    with measure.ledger() as led:
        loss = learner(nll, counts, group)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return {"value": f"{loss!r}"[:60], "gradient": None, "calls": led.calls, "largest": 0}
    if loss.requires_grad:
        loss.backward()
    linked = model.weight.grad is not None
    gradient = model.weight.grad if linked else torch.zeros_like(model.weight)
    group.all_reduce(gradient, op="avg")
    largest = max((torch.Size(event.shape).numel() for event in led.events), default=0)
    found = {"value": loss.item(), "gradient": gradient, "calls": led.calls, "largest": largest}
    return found | {"linked": linked, "changed": not torch.equal(counts, before)}


def _say_weighted(found: Tensor, right: Tensor, case: _Tokens) -> str:
    n, mean_of_means = len(case.counts), case.mean_of_means()
    if not far(found, mean_of_means):
        error = relative(mean_of_means, right)
        return (
            f"the averaged gradient is the mean of the ranks' means, {error:.0%} off: a short rank's tokens weigh more"
        )
    if not found.count_nonzero():
        return "the averaged gradient is zero: the loss you return hangs on no graph (was nll detached or reduced?)"
    for factor, said in (
        (1 / n, f"1/{n} of the right one: gradients are averaged over ranks but have to be added, so multiply by {n}"),
        (n, f"{n} times the right one"),
    ):
        if not far(found, factor * right):
            return f"the averaged gradient is {said}"
    if not far(found, case.by_lengths()):
        return (
            "each rank divides by the length of its own nll, but ranks have nll of different lengths: divide sums only"
        )
    ratio = (found * right).sum() / right.square().sum()
    if not far(found, ratio * right):
        return (
            f"the averaged gradient is {ratio:.6g} times the right one: is the number of tokens, {sum(case.counts):,}, "
            "exact? 8 or 16 bits may not hold it, and a token whose loss is 0 counts, too"
        )
    return "the averaged gradient is wrong: does a token that does not count (counts is 0) take part?"


def relative(found: Tensor, right: Tensor) -> float:
    return ((found - right).norm() / right.norm()).item()


def far(found: Tensor, right: Tensor) -> bool:
    return not relative(found, right) <= (CLOSE if right.dtype == torch.float64 else 1e-5)
