"""Lab 20: the two estimates that every design of a training run starts with."""

import random
from typing import Any

from course.kit.answers import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Row, row
from minillm.predict import faults
from minillm.predict.model import ADAM_MIXED_FP32_GRADIENTS

ANSWERS = answers_of("20_design_training")


@exercise(
    "state-bytes",
    minutes=10,
    difficulty=2,
    hints=(
        "How many parameters does one rank have before ZeRO divides anything? Then: which of 2, 4 and 12 bytes does "
        "each "
        "stage divide?",
        "Tensor and pipeline ranks share the parameters: parameters / (tp · pp). Stage 1 divides the 12 bytes of "
        "master "
        "copy and moments by dp, stage 2 the 4 of the gradient too, stage 3 the 2 of the weight too.",
        "count = parameters / (tp * pp); kinds = (12, 4, 2); sum(b / dp if i < zero else b for i, b in "
        "enumerate(kinds)) "
        "* count",
    ),
)
def check_state_bytes(learner: Any) -> list[Row]:
    rows = []
    for zero in range(4):
        tp, pp, dp = random.choice((2, 4, 8)), random.choice((2, 3, 4)), random.choice((4, 8, 16))
        parameters = tp * pp * dp * random.randint(10**6, 10**8)
        expected = ADAM_MIXED_FP32_GRADIENTS.per_rank(parameters // (tp * pp), dp, zero)
        found = learner(parameters, dp, tp, pp, zero)
        name = f"{parameters / 1e9:.1f} billion, dp {dp}, tp {tp}, pp {pp}, stage {zero}"
        if not isinstance(found, int | float) or abs(found - expected) > 1e-6 * expected:
            raise CheckFailed(
                f"For {name} you returned {found!r}; one rank holds {expected:,} bytes of states.", rows, evidence=found
            )
        rows.append(row(name, expected, float(found), "B", 1e-6))
    return rows


@exercise(
    "save-interval",
    minutes=10,
    difficulty=2,
    hints=(
        "How often does the *job* fail, if any of its devices stops it? And what does a failure cost in the mean, "
        "if you "
        "save every t seconds?",
        "The wasted share is save / t + (t / 2 + restart) / mtbf, with mtbf = device_mtbf / devices. Where is its "
        "slope "
        "0?",
        "mtbf = device_mtbf_s / devices; t = (2 * save_s * mtbf) ** 0.5; return t, save_s / t + (t / 2 + restart_s) "
        "/ mtbf",
    ),
)
def check_save_interval(learner: Any) -> list[Row]:
    rows = []
    for devices in (8, 1024, 16384):
        save, restart = random.uniform(5, 60), random.uniform(60, 900)
        device = random.uniform(3, 8) * 365 * 86400
        mtbf = device / devices
        grid = [10 ** (power / 400) for power in range(0, 2800)]
        interval = min(grid, key=lambda each: faults.wasted_share(each, save, restart, mtbf))
        waste = faults.wasted_share(interval, save, restart, mtbf)
        found = learner(save, restart, device, devices)
        name = f"{devices:,} devices, a save of {save:.0f} s, a restart of {restart:.0f} s"
        if not isinstance(found, tuple) or len(found) != 2:
            raise CheckFailed(
                f"You returned {found!r}; the exercise asks for two numbers, (interval, wasted share).", rows
            )
        for what, ours, theirs in (("interval", interval, found[0]), ("wasted share", waste, found[1])):
            if abs(theirs - ours) > 0.01 * ours:
                raise CheckFailed(
                    f"{name}: your {what} is {theirs:.4g}; trying all intervals, the best is {ours:.4g}.",
                    rows,
                    evidence=found,
                )
        rows.append(row(f"{name}: interval", interval, found[0], "s", 0.01))
        rows.append(row("    wasted share", waste, found[1], "", 0.01))
    return rows
