"""Lab 03, sending less than the whole gradient: the k largest entries, and what was left out later."""

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab03_data_parallel.checks_weights import far, relative
from course.shared.diagnose import expect_like
from course.shared.trials import run
from minillm import measure
from minillm.comm import Group, launch
from minillm.predict import comms

LARGE_S = 60.0  # patience where 2**24 numbers are sorted, on a busy machine


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
    _judge_ties(learner)
    _exact_places(learner)
    most, dense = max(found["bytes"] for found in ranks), comms.ring_all_reduce(n, 4, world).sent_per_rank[0]
    applied = sum(found for found in ranks[0]["gradients"])
    owed = torch.stack([found["residuals"][-1] for found in ranks]).mean(0)
    error = relative(applied + owed, given.mean(1).sum(0))  # nothing may be lost
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
            if far(found["gradients"][step], expected[step][0]):
                raise CheckFailed(f"{who} {_say_top_k(found['gradients'][step], given, step, ks, expected)}")
            if far(found["residuals"][step], expected[step][1][rank]):
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


def _judge_ties(learner: Callable) -> None:
    """CheckFailed unless k entries travel and nothing is lost, where all are equal and where fewer than k are not 0."""
    world, n, k = 2, random.randint(20, 40), random.randint(4, 9)
    equal, few = torch.full((2, world, n), 3.0), torch.zeros(2, world, n)
    few[0, :, random.randrange(n)] = 5.0
    ranks = run(_afresh, world, learner, (equal, few), (k, k))
    for index, (given, what) in enumerate(((equal, "all entries are equal"), (few, "most entries are 0"))):
        found = [rank[index] for rank in ranks]
        owed = torch.stack([each["residuals"][-1] for each in found]).mean(0)
        if far(sum(found[0]["gradients"]) + owed, given.mean(1).sum(0)):
            raise CheckFailed(
                f"where {what}, averaged gradients and residuals together are not the gradients handed in: of equal "
                "entries only those that were sent leave the residual, and all that a rank owes is in the residual "
                "handed in, with nothing kept from an earlier call"
            )
        if (most := max(each["bytes"] for each in found)) > (enough := _top_k_bytes(world, k, k)):
            raise CheckFailed(
                f"where {what}, a rank sent {most:,} bytes in 2 steps where {enough:,} are enough: choose k = {k} "
                "indices, not all entries above a threshold"
            )


def _afresh(group: Group, learner: Callable, several: Sequence[Tensor], ks: Sequence[int]) -> list[dict]:
    return [_top_k(group, learner, given, ks) for given in several]


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
    if not far(found, world * right):
        return f"gradient holds the sum over the ranks, {world} times the mean: divide by world_size"
    if any(not far(found, own) for own in given[step]):
        return "gradient is as it was: write the result into it (copy_, zero_ and index_add_ do)"
    if not far(found, given[step].mean(0)):
        return "gradient holds the mean of whole gradients: send only k entries of each rank"
    if not far(found, _simulate(given, ks, magnitude=False)[step][0]):
        return "the k largest are chosen with their sign: large negative entries count as much, choose by abs()"
    if step and not far(found, _simulate(given, ks, feedback=False)[step][0]):
        return "the residual is not added before choosing: what was left out earlier is lost for good"
    places = (found - right).abs().gt(1e-3).nonzero().flatten().tolist()
    owed = given[step] + (expected[step - 1][1] if step else 0)
    chosen = owed.abs().topk(ks[step], dim=1).indices.flatten().bincount(minlength=len(right))
    if all(chosen[place] > 1 for place in places):
        return f"place {places[0]} was chosen by several ranks and one value replaced the others: they add up"
    return f"gradient is wrong in {len(places)} of {len(right)} places"


def _say_residual(found: Tensor, owed: Tensor, own: Tensor, right: Tensor) -> str:
    if not far(found, owed):
        return "the residual still holds what was sent: it would be sent again; set those places to 0"
    if not found.count_nonzero():
        return "the residual is zero: what was not sent is lost for good"
    if not far(found, torch.where(right == 0, 0, own)):
        return "the residual holds this step's rest only: what earlier steps left over is lost"
    if not far(found, own):
        return "the residual is the gradient before anything was added or sent"
    return "the residual is not (gradient + residual) without what this rank sent; it has nothing to do with the mean"
