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
    dps = random.choice((4, 8)), *random.sample((16, 32, 64), 3)
    tps, pps = random.sample((2, 4, 8, 16), 4), random.sample((2, 3, 4, 5), 4)
    for zero, dp, tp, pp in ((3, 1, 1, 1), *zip(range(4), dps, tps, pps, strict=True)):
        parameters = tp * pp * dp * random.randint(10**6, 10**8)
        expected = ADAM_MIXED_FP32_GRADIENTS.per_rank(parameters // (tp * pp), dp, zero)
        answered = expect_number(learner(parameters, dp, tp, pp, zero), "one number, bytes")
        name = f"{parameters / 1e9:.2g} billion, dp {dp}, tp {tp}, pp {pp}, stage {zero}"
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
    for devices, saves, restarts in (
        (1, (300, 900), (600, 7200)),  # the best interval is days,
        (65536, (0.5, 2), (5, 30)),  # or a minute or two
        (64, (1, 3), (3600, 7200)),  # nearly half of the waste is restarts, and first order is exact to 1 %
        (random.randint(100, 3000), (5, 60), (60, 900)),
        (random.choice((4096, 8192, 16384)), (5, 60), (60, 300)),
    ):
        save, restart = random.uniform(*saves), random.uniform(*restarts)
        device = random.uniform(3, 8) * 365 * 86400
        mtbf = device / devices
        interval, factor = 1.0, 1e7
        while factor > 1.0002:  # ever finer grids around the best interval so far
            grid = [interval * factor ** (power / 50) for power in range(-50, 51)]
            interval = min(grid, key=lambda each: faults.wasted_share(each, save, restart, mtbf))
            factor **= 0.04
        best = faults.wasted_share(interval, save, restart, mtbf)
        asked = "two numbers, (interval, wasted share)"
        pair = learner(save, restart, device, devices)
        answered = expect_list(pair.tolist() if hasattr(pair, "tolist") else pair, asked, count=2)
        given, share = (expect_number(each, asked) for each in answered)
        name = f"{devices:,} device{'s' * (devices > 1)}, a save of {save:.3g} s, a restart of {restart:.0f} s"
        wasted = faults.wasted_share(given, save, restart, mtbf) if given > 0 else math.inf
        if wasted > 1.002 * best:  # the curve is flat: so Daly's next order, some per cent shorter, is as good
            said = f"{name}: every {given:.4g} s wastes {wasted:.4g}; of all intervals, {interval:.4g} s is the best."
            raise CheckFailed(said, rows, evidence=answered)
        exact = 1 - faults.goodput(given, save, 0, mtbf) * mtbf / (mtbf + restart)  # if no failure strikes a restart
        half_save = save / 2 / mtbf  # first order may count it with the half interval that a failure throws away
        if not 0.998 * (exact - half_save) <= share <= 1.002 * (best + half_save):
            said = f"{name}: your wasted share is {share:.4g}; saving every {interval:.4g} s it is {best:.4g} to first "
            said += f"order, and {exact:.4g} exactly."
            raise CheckFailed(said, rows, evidence=answered)
        rows.append(row(f"{name}: wasted", best, wasted, "", 0.002))
        rows.append(row("    as returned", best, share, "", 0.003 + (best + half_save - exact) / best))
    return rows
