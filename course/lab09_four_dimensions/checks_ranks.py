"""Lab 09, on four ranks: a colleague's hybrid step, mended. Every gradient in six meshes against one process."""

import math
import random
from collections.abc import Callable, Sequence

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab09_four_dimensions import rank_programs
from course.lab09_four_dimensions.rank_programs import Outcome
from course.shared.trials import run

EXACT = 1e-10


@exercise(
    "hybrid-step",
    minutes=20,
    difficulty=3,
    hints=(
        "In which of the four meshes is it wrong, and what do those have in common? Which ranks have other gradients "
        "there than their neighbours?",
        "cp ranks hold the same weights and saw other tokens, whether there are several dp ranks or one. What decides "
        "whether there is something to reduce is the size of the group over which you reduce.",
    ),
)
def check_step(learner: Callable) -> Receipt:
    seed = random.randrange(2**31)
    meshes = list(zip(*run(rank_programs.run_steps, rank_programs.WORLD, learner, seed, True), strict=True))
    errors = [rank_programs.worst(found).errors for found in meshes]
    wrong = [{name for name, error in each.items() if not error < EXACT} for each in errors]
    evidence = [[list(outcome.errors.values()) for outcome in found] for found in meshes]
    if any(wrong):
        raise CheckFailed(_say(meshes, wrong), evidence=evidence)
    rows = []
    for found in meshes:
        rows += _rows(found)
    return receipt("meshes of four ranks, beside one process in float64", rows)


def _say(meshes: Sequence[Sequence[Outcome]], wrong: Sequence[set[str]]) -> str:
    """Which gradients are off, and, where the pattern shows it, why."""
    first = next(place for place, names in enumerate(wrong) if names)
    worst = rank_programs.worst(meshes[first])
    how = "is None or not finite" if math.isinf(worst.worst) else f"is off by {worst.worst:.2g}"
    told = f"{worst.mesh}: the gradient of {worst.parameter} {how}"
    *found, whole = map(bool, wrong)
    if whole and not any(found):
        return (
            f"{told}. Wrong is this case alone: without sequence parallelism each tp rank's norms see all tokens and "
            "have the whole gradient. Sum over tp those that `shares` names, whatever they are called"
        )
    meshes = *rank_programs.MESHES, *rank_programs.ALONE
    if [axes["dp"] == 1 and axes["cp"] > 1 for axes in meshes] == found:
        return f"{told}. Wrong are the meshes with cp and dp 1, and no others: something asks how many ranks dp has"
    if [axes["tp"] > 1 for axes in meshes] == found:
        norms = all("norm" in name for names in wrong for name in names)
        kind = "norms, which saw a part of the sequence on each tp rank"
        kind = kind if norms else "slices that tp ranks do not share"
        return f"{told}. Wrong are the meshes with tp, and of their weights {kind}"
    return told


def _rows(found: Sequence[Outcome]) -> list:
    worst, wrong = rank_programs.worst(found), sum(not outcome.loss < EXACT for outcome in found)
    if wrong:
        raise CheckFailed(
            f"{worst.mesh}: the gradients are right, but the loss that you return is not, "
            f"on {wrong} of {len(found)} ranks",
            evidence=[outcome.loss for outcome in found],
        )
    return [
        row(f"{worst.mesh}: largest relative error of a gradient below 1e-10", True, worst.worst < EXACT),
        row("    bytes sent over dp and cp: at most twice the gradients", True, worst.sent <= 2.01 * worst.gradients),
    ]
