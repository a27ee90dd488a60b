"""Lab 00, the first ranks: a mean over some of them, and a ledger read as a receipt.

Programs of four kinds have right values; the ledger alone says which of them sent nothing, too often or too much.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, Row, receipt, row
from course.shared.diagnose import expect_like
from course.shared.trials import CollectiveCall, run, try_on_ranks
from minillm.comm import Group, Work
from minillm.measure import Ledger, ledger
from minillm.predict import comms

VERDICTS = ("fine", "silent", "chatty", "wasteful")


@exercise(
    "first-rank-program",
    minutes=5,
    difficulty=2,
    hints=(
        "Every rank runs the same lines on its own x. One collective gives all of them the sum; what is left to do?",
        "group.all_reduce works in place, so give it a copy, x.clone(). Then divide by group.world_size.",
    ),
)
def check_first_rank_program(learner: Callable) -> Receipt:
    size = 12 * random.randint(2, 20)  # divides by 3 and by 4: all bytes are exact
    cases = [CollectiveCall([torch.randint(-50, 50, (size,)).float() for _ in range(world)]) for world in (4, 3)]
    rows = []
    for case, trials in zip(cases, try_on_ranks(partial(_called, learner), cases), strict=True):
        world = case.world_size
        mean = torch.stack(list(case.inputs)).mean(0)
        for rank, trial in enumerate(trials):
            who = f"rank {rank} of {world}"
            expect_like(who, trial.result, mean, "the mean, as many numbers as in x")
            if not torch.allclose(trial.result.view_as(mean), mean, rtol=1e-5, atol=1e-5):
                raise CheckFailed(
                    f"{who} returned {_show(trial.result)}, and the mean over the ranks is {_show(mean)}.",
                    evidence=trial.result,
                )
            if not torch.equal(trial.after, case.inputs[rank]):
                raise CheckFailed(f"{who} changed its input x: all_reduce works in place, so give it x.clone()")
        sent = comms.ring_all_reduce(size, 4, world).sent_per_rank
        calls = tuple(trial.calls["all_reduce"] for trial in trials)
        rows += [
            row(f"all-reduces per rank, {world} ranks", (1,) * world, calls),
            row("    bytes sent per rank", sent, tuple(trial.bytes for trial in trials), "B"),
        ]
        if not trials[0].calls:
            raise CheckFailed(
                "right values, but the ledger recorded no operation of `group`: call one of its own", rows
            )
        if trials[0].calls != {"all_reduce": 1}:
            used = ", ".join(f"{count} × {name}" for name, count in trials[0].calls.items())
            raise CheckFailed(f"right values by {used}: one all_reduce of the whole tensor is enough", rows)
    return receipt(f"a mean of {size * 4} bytes over the ranks", rows)


class HandleWithoutWait:
    """Stands for the handle of an asynchronous call, which cannot leave its rank."""


def _called(learner: Callable, x: torch.Tensor, group: Group) -> Any:
    result = learner(group, x)
    return HandleWithoutWait() if isinstance(result, Work) else result


def _show(x: torch.Tensor) -> str:
    return f"({', '.join(f'{value:.2f}' for value in x.flatten()[:3].tolist())}, ...)"


@exercise(
    "read-a-receipt",
    minutes=5,
    difficulty=2,
    hints=(
        "All programs return right values. Look at how often each called (led.calls) and how many bytes it sent "
        "(led.bytes()), and compare with what one ring all-reduce takes.",
        "No call at all is silent. More than 2·P·(N−1)/N bytes is wasteful, however few the calls. As many bytes, but "
        "more than one call, is chatty. What is left is fine.",
    ),
)
def check_read_receipt(learner: Callable) -> list[Row]:
    # Each divides into 8 pieces for 5 or 3 ranks: all bytes are exact.
    elements_of = dict(zip((5, 3), (120 * pieces for pieces in random.sample(range(2, 21), 2)), strict=True))
    ledgers = run(_run_suspects, 5, elements_of)[0]
    rows = []
    for size, truth, led in random.sample(ledgers, len(ledgers)):
        elements = elements_of[size]
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


def _run_suspects(group: Group, elements_of: dict[int, int]) -> list[tuple[int, str, Ledger]]:
    """(ranks, what it is, ledger of this rank) of programs that all leave the sum over the ranks in x.

    elements_of: by number of ranks, how many x has."""
    wasteful = [("wasteful", program) for program in (_gathered, _padded, _padded_in_pieces)]
    programs = [("fine", _fine), ("silent", _silent), ("chatty", _chatty), *wasteful]
    found = []
    for size, elements in elements_of.items():
        part = group.subgroup(range(size), f"{size} ranks")
        if part.rank >= 0:
            for verdict, program in programs:
                with ledger() as led:
                    program(part, torch.full((elements,), float(part.rank)))
                found.append((size, verdict, led))
    return found


def _fine(group: Group, x: torch.Tensor) -> torch.Tensor:
    return group.all_reduce(x)


def _silent(group: Group, x: torch.Tensor) -> torch.Tensor:
    return x.fill_(sum(range(group.world_size)))  # it knew what the others had


def _chatty(group: Group, x: torch.Tensor) -> torch.Tensor:
    for piece in x.chunk(8 if group.world_size > 3 else 2):
        group.all_reduce(piece)
    return x


def _gathered(group: Group, x: torch.Tensor) -> torch.Tensor:
    return group.all_gather(x).view(group.world_size, -1).sum(0)


def _padded(group: Group, x: torch.Tensor) -> torch.Tensor:
    return group.all_reduce(_with_padding(x))[: x.numel()]


def _padded_in_pieces(group: Group, x: torch.Tensor) -> torch.Tensor:
    padded = _with_padding(x)
    for piece in padded.chunk(5):
        group.all_reduce(piece)
    return padded[: x.numel()]


def _with_padding(x: torch.Tensor) -> torch.Tensor:
    """A sixth more: on 3 ranks it sends less than 5 ranks need for x, so that no one limit serves both."""
    return torch.cat([x, x.new_zeros(x.numel() // 6)])
