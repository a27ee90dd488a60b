"""Lab 17, the judge: which bug a program has, from what it logged."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab17_adapters import experiments_breaks as breaks
from course.lab17_adapters.experiments_breaks import Seen


@exercise(
    "which-bug",
    minutes=20,
    difficulty=3,
    hints=(
        "Each bug shows in one part of the log. What do rounding and sharing explain, and what not? A hit is right if "
        "an earlier request with the same adapter began with the same tokens.",
        "far(x, y): norm(x - y) > 20 eps · norm(y), with eps of the dtype. first against base; merged against adapted; "
        "for each request (adapter, tokens[:hit]) among the beginnings of earlier ones; the two norms of A, and of B, "
        "within a percent.",
    ),
)
def check_verdict(learner: Callable) -> Receipt:
    rows = []
    for dtype, world_size in ((torch.float32, 4), (torch.bfloat16, 2), (torch.float16, random.choice((3, 5, 8)))):
        programs = [(bug, _run(bug, dtype, world_size)) for bug in (*breaks.VERDICTS, breaks.RIGHT)]
        programs += [(breaks.HASH, replace(programs[-1][1], requests=log)) for log in _foreign_hits()]
        for bug, seen in programs:
            said = learner(seen)
            if said not in breaks.VERDICTS:
                told = ", ".join(map(repr, breaks.VERDICTS))
                raise CheckFailed(f"your verdict is {said!r:.60}: it must be one of {told}")
            case = f"{str(dtype).removeprefix('torch.')}, {world_size} ranks"
            if said != bug:
                raise CheckFailed(f"a program ({case}): you say {said!r}, it is {bug!r}: {_say(seen)}", rows)
            rows.append(row(f"{case}: a program", bug, said))
    return receipt("verdicts", rows)


def _run(bug: str, dtype: torch.dtype, world_size: int) -> Seen:
    seen = breaks.run(bug, dtype, world_size)
    while bug == breaks.MERGE and _distance(seen.merged, seen.adapted) < 0.05:
        seen = breaks.run(bug, dtype, world_size)  # a small update hides it
    return seen


def _foreign_hits() -> Iterator[tuple[tuple[str | None, tuple[int, ...], int], ...]]:
    """Logs in which one request continues on another adapter's block: prompts differ in the last token of a block; the
    base has an adapter's block, and the other way round; an adapter computes the block itself, but later."""
    *same, one, other = random.sample(range(1000), breaks.BLOCK + 1)
    block, size = (*same, one), breaks.BLOCK
    longer = (*block, *random.choices(range(1000), k=size))
    yield ("red", block, 0), ("blue", (*same, other), 0), ("blue", longer, size)
    yield ("red", block, 0), (None, longer, size)
    yield (None, block, 0), ("red", longer, size)
    yield ("red", block, 0), ("blue", longer, size), ("blue", block, 0)


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def _say(seen: Seen) -> str:
    """The log in numbers."""
    eps = torch.finfo(seen.dtype).eps
    foreign = len(seen.requests) - sum(map(_is_own, range(len(seen.requests)), [seen.requests] * len(seen.requests)))
    ratios = ", ".join(f"{which} {ranks / alone:.3g}" for which, (alone, ranks) in seen.norms.items())
    return (
        f"first against base {_distance(seen.first, seen.base) / eps:.3g} eps, merged against adapted "
        f"{_distance(seen.merged, seen.adapted) / eps:.3g} eps, {foreign} of {len(seen.requests)} requests continued "
        f"on blocks of another adapter, norms on ranks over those of one process: {ratios}"
    )


def _is_own(index: int, requests: tuple) -> bool:
    adapter, tokens, hit = requests[index]
    return hit == 0 or any(a == adapter and t[:hit] == tokens[:hit] for a, t, _ in requests[:index])
