"""Lab 16, the judge: which bug a program has, from the weights before and after it alone."""

import random
from collections.abc import Callable
from functools import partial

from torch import Tensor

from course.kit.answers import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab16_quantization import experiments_breaks as breaks

ANSWERS = answers_of("16_quantization")
MEAN = 0.06  # of weights: three times their spread, so nearly all have one sign


@exercise(
    "what-went-wrong",
    minutes=20,
    difficulty=3,
    hints=(
        "Look at rounded, not at the error: how many different values has the whole matrix, one row's group, one "
        "column's group? Four bits make 16.",
        "At most 16 in the whole matrix: one scale. More than 16 in some group of a row: wrong dimension. Else look at "
        "the errors of each group: a shift moves all of it one way, so its mean is larger than its spread.",
    ),
)
def check_verdict(learner: Callable) -> Receipt:
    rows = []
    for outputs, inputs, group, mean, off in (
        (64, 96, 32, 0.0, 1),
        (128, 64, 64, MEAN, -1),
        (40 * random.randint(2, 4), 40 * random.randint(2, 3), 40, -MEAN, random.choice((1, -1))),
    ):
        programs = breaks.PROGRAMS | {"E": partial(breaks.zero_off_by_one, off=off)}
        for name, program in programs.items():
            weight, rounded = _case(name, program, outputs, inputs, group, mean)
            said, right = learner(weight, rounded, group), breaks.BUGS[name]
            if said not in breaks.VERDICTS:
                told = ", ".join(map(repr, breaks.VERDICTS))
                raise CheckFailed(f"your verdict is {said!r:.60}: it must be one of {told}")
            case = f"program {name}, {outputs} x {inputs}, groups of {group}"
            if said != right:
                raise CheckFailed(f"{case}: you say {said!r}, it is {right!r}: {_say(weight, rounded, group)}", rows)
            rows.append(row(case, right, said))
    return receipt("verdicts", rows)


def _case(name: str, program: Callable, outputs: int, inputs: int, group: int, mean: float) -> tuple[Tensor, Tensor]:
    """Weights before and after. One scale for all of them makes use of all 16 values where the mean is 0, and of few
    elsewhere. Outliers are added to weights around 0 alone: else a group's errors have a mean, too."""
    while True:
        weight = breaks.weights_for(name, outputs, inputs) + (0 if name == "B" else mean)
        rounded = program(weight, group)
        if mean or breaks.BUGS[name] != breaks.TENSOR or len(rounded.unique()) == 16:
            return weight, rounded


def _say(weight: Tensor, rounded: Tensor, group: int) -> str:
    groups = rounded.unflatten(1, (-1, group))
    error = groups - weight.unflatten(1, (-1, group))
    most = max(len(values.unique()) for values in groups.flatten(0, 1))
    shift = float((error.mean(-1).abs() / error.std(-1)).median())
    return (
        f"{len(rounded.unique())} different values in the matrix, at most {most} in a group of inputs; the mean of a "
        f"group's errors is {shift:.2f} times their spread"
    )
