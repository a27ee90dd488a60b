"""Lab 20: the two estimates that every design of a training run starts with."""

import math
import random
from typing import Any

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Row, row
from course.shared.diagnose import expect_list, expect_number
from minillm.predict import faults
from minillm.predict.model import ADAM_MIXED_FP32_GRADIENTS


@exercise(
    "state-bytes",
    minutes=10,
    difficulty=2,
    hints=(
        "How many parameters does one rank have before ZeRO divides anything? Then: which of 2, 4 and 12 bytes does "
        "each stage divide?",
        "Tensor and pipeline ranks share the parameters: parameters / (tp · pp). Stage 1 divides the 12 bytes of "
        "master copy and moments by dp, stage 2 the 4 of the gradient too, stage 3 the 2 of the weight too.",
    ),
)
def check_state_bytes(learner: Any) -> list[Row]:
    rows = []
    for zero in range(4):
        tp, pp, dp = random.choice((2, 4, 8)), random.choice((2, 3, 4)), random.choice((4, 8, 16))
        parameters = tp * pp * dp * random.randint(10**6, 10**8)
        expected = ADAM_MIXED_FP32_GRADIENTS.per_rank(parameters // (tp * pp), dp, zero)
        answered = expect_number(learner(parameters, dp, tp, pp, zero), "one number, bytes")
        name = f"{parameters / 1e9:.1f} billion, dp {dp}, tp {tp}, pp {pp}, stage {zero}"
        rows.append(row(name, expected, float(answered), "B", 1e-6))
        if rows[-1].verdict == "off":
            said = f"For {name} you returned {answered:,}; one rank holds {expected:,} bytes of states."
            raise CheckFailed(said, rows, evidence=answered)
    return rows


@exercise(
    "save-interval",
    minutes=10,
    difficulty=2,
    hints=(
        "How often does the *job* fail, if any of its devices stops it? And what does a failure cost on average, "
        "if you save every t seconds?",
        "The wasted share is save / t + (t / 2 + restart) / mtbf, with mtbf = device_mtbf / devices. Where is its "
        "slope 0?",
    ),
)
def check_save_interval(learner: Any) -> list[Row]:
    rows = []
    for devices in (8, random.randint(100, 3000), random.choice((4096, 8192, 16384))):
        save, restart = random.uniform(5, 60), random.uniform(60, 900)
        device = random.uniform(3, 8) * 365 * 86400
        mtbf = device / devices
        interval, factor = 1.0, 1e7
        while factor > 1.0002:  # ever finer grids around the best interval so far
            grid = [interval * factor ** (power / 50) for power in range(-50, 51)]
            interval = min(grid, key=lambda each: faults.wasted_share(each, save, restart, mtbf))
            factor **= 0.04
        best = faults.wasted_share(interval, save, restart, mtbf)
        asked = "two numbers, (interval, wasted share)"
        answered = expect_list(learner(save, restart, device, devices), asked, count=2)
        given, share = (expect_number(each, asked) for each in answered)
        name = f"{devices:,} devices, a save of {save:.0f} s, a restart of {restart:.0f} s"
        wasted = faults.wasted_share(given, save, restart, mtbf) if given > 0 else math.inf
        if wasted > 1.002 * best:  # the curve is flat: so Daly's next order, some per cent shorter, is as good
            said = f"{name}: every {given:.4g} s wastes {wasted:.4g}; of all intervals, {interval:.4g} s is the best."
            raise CheckFailed(said, rows, evidence=answered)
        if abs(share - best) > 0.002 * best:
            said = f"{name}: your wasted share is {share:.4g}; saving every {interval:.4g} s it is {best:.4g}."
            raise CheckFailed(said, rows, evidence=answered)
        rows.append(row(f"{name}: wasted", best, wasted, "", 0.002))
        rows.append(row("    as returned", best, share, "", 0.002))
    return rows
