"""Lab 16, the judge: which bug a program has, from the weights before and after it alone."""

import random
from collections.abc import Callable

import torch

from course.kit.answers import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab16_quantization import experiments_breaks as breaks

ANSWERS = answers_of("16_quantization")


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
    for outputs, inputs, group in (
        (64, 96, 32),
        (128, 64, 64),
        (40 * random.randint(2, 4), 40 * random.randint(2, 3), 40),
    ):
        for name, program in breaks.PROGRAMS.items():
            weight, rounded = _case(name, program, outputs, inputs, group)
            said, right = learner(weight, rounded, group), breaks.BUGS[name]
            if said not in breaks.VERDICTS:
                told = ", ".join(map(repr, breaks.VERDICTS))
                raise CheckFailed(f"your verdict is {said!r:.60}: it must be one of {told}")
            case = f"program {name}, {outputs} x {inputs}, groups of {group}"
            if said != right:
                raise CheckFailed(f"{case}: you say {said!r}, it is {right!r}: {_say(weight, rounded, group)}", rows)
            rows.append(row(case, right, said))
    return receipt("verdicts", rows)


def _case(name: str, program: Callable, outputs: int, inputs: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights before and after; one scale for all of them makes use of all 16 values, not of fewer."""
    while True:
        weight = breaks.weights_for(name, outputs, inputs)
        rounded = program(weight, group)
        if breaks.BUGS[name] != breaks.VERDICTS[1] or len(rounded.unique()) == 16:
            return weight, rounded


def _say(weight: torch.Tensor, rounded: torch.Tensor, group: int) -> str:
    groups = rounded.unflatten(1, (-1, group))
    error = groups - weight.unflatten(1, (-1, group))
    most = max(len(values.unique()) for values in groups.flatten(0, 1))
    shift = float((error.mean(-1).abs() / error.std(-1)).median())
    return (
        f"{len(rounded.unique())} different values in the matrix, at most {most} in a group of inputs; the mean of a "
        f"group's errors is {shift:.2f} times their spread"
    )
