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
from course.shared.diagnose import expect_like, expect_tensor, say_rounded
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
    size = 12 * random.randint(2, 20)  # divides by 3 and by 4; 7 numbers of float64 do not divide by 2
    cases = [CollectiveCall([torch.randint(-50, 50, (size,)).float() for _ in range(world)]) for world in (4, 3)]
    cases.append(CollectiveCall([torch.randn(7, dtype=torch.float64) for _ in range(2)]))
    rows = []
    for case, trials in zip(cases, try_on_ranks(partial(_called, learner), cases), strict=True):
        world = case.world_size
        mean = torch.stack(list(case.inputs)).mean(0)
        for rank, trial in enumerate(trials):
            who = f"rank {rank} of {world}"
            if isinstance(trial.result, HandleWithoutWait):
                raise CheckFailed(
                    f"{who} starts an all-reduce with async_op=True and goes on before it is over: call wait() on the "
                    "handle that it returns, and use the tensor after that"
                )
            expect_like(who, trial.result, mean, "the mean, as many numbers as in x")
            expect_tensor(f"the result of {who}", trial.result, mean.shape)
            close = 1e-12 if mean.dtype == torch.float64 else 1e-5
            if not torch.allclose(trial.result, mean, rtol=close, atol=close):
                rounded = say_rounded(trial.result, mean)
                raise CheckFailed(
                    f"{who} returned {_show(trial.result)}, and the mean over the ranks is {_show(mean)}"
                    f"{rounded and ': '}{rounded}.",
                    evidence=trial.result,
                )
            if not torch.equal(trial.after, case.inputs[rank]):
                raise CheckFailed(f"{who} changed its input x: all_reduce works in place, so give it x.clone()")
        sent = comms.ring_all_reduce(mean.numel(), mean.element_size(), world).sent_per_rank
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
    return receipt("a mean over the ranks", rows, open_rows=2)


class HandleWithoutWait:
    """Stands for what is returned before a handle of all_reduce was waited for, or for the handle."""


def _called(learner: Callable, x: torch.Tensor, group: Group) -> Any:
    reduce, handles, waited = group.all_reduce, [], set()

    def all_reduce(*args: Any, **options: Any) -> Any:
        handle = reduce(*args, **options)
        if isinstance(handle, Work):
            handles.append(handle)
            wait = handle.wait
            handle.wait = lambda: waited.add(handle) or wait()
        return handle

    group.all_reduce = all_reduce
    try:
        result = learner(group, x)
    finally:
        del group.all_reduce  # the method shows through again
    missing = not waited.issuperset(handles) or isinstance(result, Work)
    for handle in handles:
        handle.wait()
    return HandleWithoutWait() if missing else result


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
def check_read_receipt(learner: Callable) -> Receipt:
    # Each divides into 8 pieces for 5 ranks, and into 2 for 3 and for 2: what is not padded has exact bytes.
    elements_of = dict(zip((5, 3, 2), (600 * pieces for pieces in random.sample(range(2, 13), 3)), strict=True))
    ledgers = run(_run_suspects, 5, elements_of, random.randint(2, 5))[0]
    rows: dict[int, Row] = {}
    for place in random.sample(range(len(ledgers)), len(ledgers)):
        size, truth, led = ledgers[place]
        elements = elements_of[size]
        found = learner(led, elements * 4, size)
        evidence = ", ".join(f"{count} × {name}" for name, count in led.calls.items()) or "no calls"
        rows[place] = row(f"{size} ranks: {evidence}, {led.bytes():,} B", truth, found)
        if found == truth:
            continue
        if found not in VERDICTS:
            raise CheckFailed(f"you returned {found!r}; the answer is one of {', '.join(VERDICTS)}", rows.values())
        predicted = 2 * elements * 4 * (size - 1) // size
        raise CheckFailed(
            f"you call it {found!r}, but it is {truth!r}: {size} ranks, P = {elements * 4:,} B, the ledger has "
            f"{evidence} and {led.bytes():,} B sent in {led.messages} messages; one ring all-reduce is 1 call and "
            f"{predicted:,} B",
            rows.values(),
        )
    return receipt("programs and their ledgers", (rows[place] for place in sorted(rows)), open_rows=len(VERDICTS))


def _run_suspects(group: Group, elements_of: dict[int, int], percent: int) -> list[tuple[int, str, Ledger]]:
    """(ranks, what it is, ledger of this rank) of programs that all leave the sum over the ranks in x: one of each kind
    first.

    elements_of: by number of ranks, how many x has. percent: of them, padding; so little that on 3 ranks a padded x
    takes fewer bytes than x on 5, and no one limit serves both."""
    padded, in_pieces = partial(_padded, percent=percent), partial(_padded, percent=percent, pieces=5)
    wasteful = [("wasteful", program) for program in (_gathered, padded, in_pieces)]
    programs = [("fine", _fine), ("silent", _silent), ("chatty", _chatty), *wasteful]
    found = []
    for size, elements in elements_of.items():
        part = group.subgroup(range(size), f"{size} ranks")
        if part.rank >= 0:
            for verdict, program in programs:
                if size == 2 and program is _gathered:
                    continue  # sends as little as an all-reduce
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


def _padded(group: Group, x: torch.Tensor, percent: int, pieces: int = 1) -> torch.Tensor:
    padded = torch.cat([x, x.new_zeros(x.numel() * percent // 100)])
    for piece in padded.chunk(pieces):
        group.all_reduce(piece)
    return padded[: x.numel()]
