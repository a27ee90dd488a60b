"""Lab 00, the first ranks: a mean over four of them, and a ledger read as a receipt.

Four programs have right values; the ledger alone says which of them sent nothing, too often or too much.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from course.shared.trials import run
from minillm.comm import Group
from minillm.labkit.exercises import CheckFailed, exercise
from minillm.labkit.receipts import Receipt, Row, receipt, row
from minillm.measure import Ledger, ledger
from minillm.predict import comms

VERDICTS = ("fine", "silent", "chatty", "wasteful")
ENTER_ALL = "Every rank of a group must enter every collective of it, in the same order."


# What they are held to.


@exercise(
    "first-rank-program",
    minutes=5,
    difficulty=2,
    hints=(
        "Every rank runs the same lines on its own x. One collective gives all of them the sum; what is left to do?",
        "group.all_reduce works in place, so give it a copy, x.clone(). Then divide by group.world_size.",
        "mean = x.clone(); group.all_reduce(mean); return mean / group.world_size",
    ),
)
def check_first_rank_program(learner: Callable) -> Receipt:
    world = 4
    inputs = [torch.randint(-50, 50, (8 * random.randint(2, 20),)).float() for _ in range(world)]
    size = min(x.numel() for x in inputs)
    inputs = [x[:size] for x in inputs]
    trials = run(_try_average, world, learner, inputs, advice=ENTER_ALL)
    total = torch.stack(inputs).sum(0)
    for rank, (result, after, _) in enumerate(trials):
        _say_average(f"rank {rank} of {world}", result, inputs[rank], total, world)
        if not torch.equal(after, inputs[rank]):
            raise CheckFailed(f"rank {rank} changed its input x: all_reduce works in place, so give it x.clone()")
    cost = comms.ring_all_reduce(size, 4, world)
    ledgers = [led for _, _, led in trials]
    rows = [
        row("all-reduces per rank", (1,) * world, tuple(led.calls["all_reduce"] for led in ledgers)),
        row("bytes sent per rank", cost.sent_per_rank, tuple(led.bytes() for led in ledgers), "B"),
    ]
    if len(ledgers[0].calls) == 0:
        raise CheckFailed("right values, but the ledger saw nothing sent: each rank has only its own x", rows)
    if ledgers[0].calls != {"all_reduce": 1}:
        used = ", ".join(f"{count} × {name}" for name, count in ledgers[0].calls.items())
        raise CheckFailed(f"right values by {used}: one all_reduce of the whole tensor is enough", rows)
    return receipt(f"a mean over {world} ranks, {size * 4} bytes each", rows)


@exercise(
    "read-a-receipt",
    minutes=5,
    difficulty=2,
    hints=(
        "All four programs return right values. Look at how often each called (led.calls) and how many bytes it sent "
        "(led.bytes()), and compare with what one ring all-reduce takes.",
        "No call at all is silent. More than 2·P·(N−1)/N bytes is wasteful, however few the calls. As many bytes, but "
        "more than one call, is chatty. What is left is fine.",
        'if not led.calls: return "silent"; if led.bytes() > 2 * num_bytes * (world_size - 1) / world_size: '
        'return "wasteful"; return "chatty" if led.calls.total() > 1 else "fine"',
    ),
)
def check_read_receipt(learner: Callable) -> list[Row]:
    world, elements = 4, 96 * random.randint(2, 20)  # divides into 8 pieces for 3 or 4 ranks: all bytes are exact
    ledgers = run(_run_suspects, world, elements)[0]
    rows = []
    for size, truth, led in random.sample(ledgers, len(ledgers)):
        found = learner(led, elements * 4, size)
        evidence = ", ".join(f"{count} × {name}" for name, count in led.calls.items()) or "no calls"
        rows.append(row(f"{size} ranks: {evidence}, {led.bytes():,} B", truth, found))
        if found == truth:
            continue
        if found not in VERDICTS:
            raise CheckFailed(f"you returned {found!r}; the answer is one of {', '.join(VERDICTS)}", rows)
        predicted = 2 * elements * 4 * (size - 1) // size
        raise CheckFailed(
            f"you call it {found!r}, but it is {truth!r}: {size} ranks, P = {elements * 4:,} B, the ledger has "
            f"{evidence} and {led.bytes():,} B sent in {led.messages} messages; one ring all-reduce is 1 call and "
            f"{predicted:,} B",
            rows,
        )
    return rows


# On the ranks.


def _try_average(group: Group, learner: Callable, inputs: Sequence[torch.Tensor]) -> tuple[Any, torch.Tensor, Ledger]:
    x = inputs[group.rank].clone()
    with ledger() as led:
        result = learner(group, x)
    return result, x, led


def _run_suspects(group: Group, elements: int) -> list[tuple[int, str, Ledger]]:
    """(ranks, what it is, ledger of this rank) of four programs that all leave the sum over the ranks in x."""
    found = []
    for size in (group.world_size, group.world_size - 1):
        part = group.subgroup(range(size), f"{size} ranks")
        for verdict, program in (("fine", _fine), ("silent", _silent), ("chatty", _chatty), ("wasteful", _wasteful)):
            if part.rank >= 0:
                with ledger() as led:
                    program(part, torch.full((elements,), float(part.rank)))
                found.append((size, verdict, led))
    return found


def _fine(group: Group, x: torch.Tensor) -> torch.Tensor:
    return group.all_reduce(x)


def _silent(group: Group, x: torch.Tensor) -> torch.Tensor:
    return x.fill_(sum(range(group.world_size)))  # it knew what the others had


def _chatty(group: Group, x: torch.Tensor) -> torch.Tensor:
    for piece in x.chunk(8):
        group.all_reduce(piece)
    return x


def _wasteful(group: Group, x: torch.Tensor) -> torch.Tensor:
    return group.all_gather(x).view(group.world_size, -1).sum(0)


# What is wrong, in words.


def _say_average(who: str, result: Any, own: torch.Tensor, total: torch.Tensor, world: int) -> None:
    if not isinstance(result, torch.Tensor):
        raise CheckFailed(f"{who} returned {type(result).__name__}, not a tensor: return the mean")
    if result.shape != total.shape:
        raise CheckFailed(f"{who} returned a tensor of shape {list(result.shape)}, but x has shape {list(total.shape)}")
    known = {
        "x as it was: nothing came from the other ranks": own,
        f"the sum, {world} times the mean: divide by group.world_size": total,
        f"the mean divided by {world} once more: divide only once": total / world**2,
        "its own x divided by the number of ranks: the other ranks' x are missing": own / world,
    }
    result = result.to(total.dtype)
    if torch.allclose(result, total / world, rtol=1e-5, atol=1e-5):
        return
    for said, wrong in known.items():
        if torch.allclose(result, wrong, rtol=1e-5, atol=1e-5):
            raise CheckFailed(f"{who} returned {said}")
    raise CheckFailed(f"{who} returned neither the mean nor the sum of the ranks' x")
