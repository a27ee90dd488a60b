"""Lab 03, what to communicate: a count, so that tokens and not ranks weigh alike; and less than the whole gradient."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab03_data_parallel.rank_programs import CLOSE
from course.shared.diagnose import expect_like
from course.shared.trials import run
from minillm import measure
from minillm.comm import Group, launch
from minillm.predict import comms

LARGE_S = 60.0  # patience where 2**24 numbers are sorted, on a busy machine

# Tokens.


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
    tokens = random.randint(12, 40)
    case = _Tokens(random.randrange(2**31), (*random.sample(range(3, 12), 2), 0), tokens)
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
    error = _relative(averaged, gradient)
    if not error <= CLOSE:
        raise CheckFailed(_say_weighted(averaged, gradient, case))
    four = _Tokens(case.seed, (*case.counts, random.randint(3, 12)), tokens + random.randint(1, 9))
    averaged, expected = run(_weighted, 4, learner, four)[0]["gradient"], four.alone()[1]
    if averaged is None or not _relative(averaged, expected) <= CLOSE:
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
            row("    error of the mean of means", None, _relative(case.mean_of_means(), gradient)),
        ],
    )


@dataclass(frozen=True)
class _Tokens:
    """A linear classifier and, on each rank, a number of tokens of which `counts[rank]` count."""

    seed: int
    counts: tuple[int, ...]
    tokens_per_rank: int

    def model(self) -> nn.Linear:
        draw = torch.Generator().manual_seed(self.seed)
        model = nn.Linear(6, 5, bias=False, dtype=torch.float64)
        model.weight.data = torch.randn(5, 6, generator=draw, dtype=torch.float64)
        return model

    def tokens(self, model: nn.Linear, rank: int) -> tuple[Tensor, Tensor]:
        """(nll, counts) of a rank: [tokens_per_rank] each."""
        draw, n = torch.Generator().manual_seed(self.seed + 1 + rank), self.tokens_per_rank
        x, targets = torch.randn(n, 6, generator=draw, dtype=torch.float64), torch.randint(5, (n,), generator=draw)
        counts = torch.zeros(n, dtype=torch.float64)
        counts[torch.randperm(n, generator=draw)[: self.counts[rank]]] = 1
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
    if not _far(found, mean_of_means):
        error = _relative(mean_of_means, right)
        return (
            f"the averaged gradient is the mean of the ranks' means, {error:.0%} off: a short rank's tokens weigh more"
        )
    if not found.count_nonzero():
        return "the averaged gradient is zero: the loss you return hangs on no graph (was nll detached or reduced?)"
    for factor, said in (
        (1 / n, f"1/{n} of the right one: gradients are averaged over ranks but have to be added, so multiply by {n}"),
        (n, f"{n} times the right one"),
    ):
        if not _far(found, factor * right):
            return f"the averaged gradient is {said}"
    return "the averaged gradient is wrong: does a token that does not count (counts is 0) take part?"


def _relative(found: Tensor, right: Tensor) -> float:
    return ((found - right).norm() / right.norm()).item()


def _far(found: Tensor, right: Tensor) -> bool:
    return not _relative(found, right) <= (CLOSE if right.dtype == torch.float64 else 1e-5)


# Compression.


@exercise(
    "top-k-error-feedback",
    changes=("gradient", "residual"),
    minutes=20,
    difficulty=4,
    hints=(
        "What is not sent now is not gone: it is owed. Where does it stay until it is large enough to be sent?",
        "Add the residual to the gradient before you choose. Choose by absolute value. Afterwards the residual is what "
        "you had, with zeros where you sent. Two ranks may choose the same place: their values add up.",
    ),
)
def check_top_k(learner: Callable) -> Receipt:
    world, n, ks = 3, random.randint(30, 60), random.sample(range(3, 9), 4)  # another k in every step
    given, ranks = _judge_top_k(learner, world, n, ks)
    _judge_top_k(learner, 4, n + random.randint(1, 9), [random.randint(9, 12), 1])
    _exact_places(learner)
    most, dense = max(found["bytes"] for found in ranks), comms.ring_all_reduce(n, 4, world).sent_per_rank[0]
    applied = sum(found for found in ranks[0]["gradients"])
    owed = torch.stack([found["residuals"][-1] for found in ranks]).mean(0)
    error = _relative(applied + owed, given.mean(1).sum(0))  # nothing may be lost
    return receipt(
        f"the k largest of {n} entries, {world} ranks, k = {', '.join(map(str, ks))}",
        [
            row(f"bytes sent per rank in {len(ks)} steps of 8k(N-1)", _top_k_bytes(world, *ks), most, "B"),
            row("    dense ring all-reduces", None, len(ks) * dense, "B"),
            row("applied + still owed = all gradients, to 1e-5", True, error <= 1e-5),
        ],
    )


def _top_k_bytes(world: int, *ks: int) -> int:
    """Bytes that a rank sends in steps of these k: k values of 4 bytes and k indices of 4 bytes to all others."""
    return sum(comms.ring_all_gather(world * k, 8, world).sent_per_rank[0] for k in ks)


def _judge_top_k(learner: Callable, world: int, n: int, ks: Sequence[int]) -> tuple[Tensor, list[dict]]:
    """Gradients that were handed in, and what each rank did; CheckFailed unless values and bytes are right."""
    given = _distinct(torch.Generator().manual_seed(random.randrange(2**31)), len(ks), world, n)
    ranks = run(_top_k, world, learner, given, ks)
    expected = _simulate(given, ks)
    for step in range(len(ks)):
        for rank, found in enumerate(ranks):
            who = f"step {step + 1}, rank {rank}:"
            expect_like(f"{who} gradient", found["gradients"][step], expected[step][0], "gradient itself, [n]")
            if _far(found["gradients"][step], expected[step][0]):
                raise CheckFailed(f"{who} {_say_top_k(found['gradients'][step], given, step, ks, expected)}")
            if _far(found["residuals"][step], expected[step][1][rank]):
                owed = given[step, rank] + (expected[step - 1][1][rank] if step else 0)
                said = _say_residual(found["residuals"][step], owed, given[step, rank], expected[step][1][rank])
                raise CheckFailed(f"{who} {said}")
    enough, most = _top_k_bytes(world, *ks), max(found["bytes"] for found in ranks)
    if most > enough:
        raise CheckFailed(
            f"right values, but a rank sent {most:,} bytes in {len(ks)} steps where {enough:,} are enough: k values of "
            f"4 bytes and k indices of 4 bytes (int32) go to {world - 1} ranks"
        )
    return given, ranks


def _exact_places(learner: Callable) -> None:
    """CheckFailed if an index beyond 2**24 arrives rounded, as one that travels as a float32 does."""
    places = [2**24 + 1, 2**24 + 7]
    if any(found != places for found in launch(_large, 2, learner, places, timeout=LARGE_S, device="cpu")):
        raise CheckFailed(
            "right for short gradients, but with 2**24 entries and more values arrive in other places: an index that "
            "travels as a float32 is rounded there. Send int32"
        )


def _large(group: Group, learner: Callable, places: list[int]) -> list[int]:
    """Where a gradient that is zero but for one place of each rank is not zero afterwards."""
    gradient, residual = torch.zeros(2, 2**24 + 16)
    gradient[places[group.rank]] = 1.0
    learner(gradient, residual, 1, group)
    return gradient.nonzero().flatten().tolist()


def _distinct(draw: torch.Generator, steps: int, world: int, n: int) -> Tensor:
    """[steps, world, n] in thirds of whole numbers, signs mixed; some places are large on all ranks and collide."""
    large = torch.randperm(n, generator=draw)[:3]
    given = torch.randint(1, 400, (steps, world, n), generator=draw).float()
    given[:, :, large] += 1000
    return given * (2 * torch.randint(0, 2, given.shape, generator=draw) - 1) * 3 + torch.arange(n) / 64


def _simulate(
    given: Tensor, ks: Sequence[int], feedback: bool = True, magnitude: bool = True
) -> list[tuple[Tensor, Tensor]]:
    """(averaged, residuals [world, n]) after each step, in one process."""
    residual, found = torch.zeros_like(given[0]), []
    for gradients, k in zip(given, ks, strict=True):
        owed = gradients + residual if feedback else gradients.clone()
        chosen = (owed.abs() if magnitude else owed).topk(k, dim=1).indices
        sent = torch.zeros_like(owed).scatter(1, chosen, owed.gather(1, chosen))
        residual = owed - sent
        found.append((sent.mean(0), residual))
    return found


def _top_k(group: Group, learner: Callable, given: Tensor, ks: Sequence[int]) -> dict:
    residual, found = torch.zeros_like(given[0, 0]), {"gradients": [], "residuals": []}
    with measure.ledger() as led:
        for ranks, k in zip(given, ks, strict=True):
            gradient = ranks[group.rank].clone()
            learner(gradient, residual, k, group)
            found["gradients"].append(gradient)
            found["residuals"].append(residual.clone())
    return found | {"bytes": led.bytes()}


def _say_top_k(
    found: Tensor, given: Tensor, step: int, ks: Sequence[int], expected: list[tuple[Tensor, Tensor]]
) -> str:
    right, world = expected[step][0], given.shape[1]
    if not _far(found, world * right):
        return f"gradient holds the sum over the ranks, {world} times the mean: divide by world_size"
    if any(not _far(found, own) for own in given[step]):
        return "gradient is as it was: write the result into it (copy_, zero_ and index_add_ do)"
    if not _far(found, given[step].mean(0)):
        return "gradient holds the mean of whole gradients: send only k entries of each rank"
    if not _far(found, _simulate(given, ks, magnitude=False)[step][0]):
        return "the k largest are chosen with their sign: large negative entries count as much, choose by abs()"
    if step and not _far(found, _simulate(given, ks, feedback=False)[step][0]):
        return "the residual is not added before choosing: what was left out earlier is lost for good"
    places = (found - right).abs().gt(1e-3).nonzero().flatten().tolist()
    owed = given[step] + (expected[step - 1][1] if step else 0)
    chosen = owed.abs().topk(ks[step], dim=1).indices.flatten().bincount(minlength=len(right))
    if all(chosen[place] > 1 for place in places):
        return f"place {places[0]} was chosen by several ranks and one value replaced the others: they add up"
    return f"gradient is wrong in {len(places)} of {len(right)} places"


def _say_residual(found: Tensor, owed: Tensor, own: Tensor, right: Tensor) -> str:
    if not _far(found, owed):
        return "the residual still holds what was sent: it would be sent again; set those places to 0"
    if not found.count_nonzero():
        return "the residual is zero: what was not sent is lost for good"
    if not _far(found, torch.where(right == 0, 0, own)):
        return "the residual holds this step's rest only: what earlier steps left over is lost"
    if not _far(found, own):
        return "the residual is the gradient before anything was added or sent"
    return "the residual is not (gradient + residual) without what this rank sent; it has nothing to do with the mean"
