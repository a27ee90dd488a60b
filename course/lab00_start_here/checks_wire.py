"""Lab 00, a wire: latency and bandwidth, the two numbers that say how long a message takes."""

import random
from collections.abc import Callable

from course.lab00_start_here.checks import explain, two_numbers
from minillm.labkit.exercises import exercise
from minillm.labkit.receipts import Row, row

TOLERANCE = 1e-4  # the smallest message takes at least 7e-4 longer than the latency, so its time is not taken for it


# What it is held to.


@exercise(
    "alpha-beta",
    minutes=5,
    difficulty=2,
    hints=(
        "t = latency + bytes / bandwidth is a straight line in bytes. Which of the two is its height at zero, and what "
        "is its slope?",
        "The slope is seconds per byte, so the bandwidth is one over it. The latency is what is left of a time after "
        "bytes × slope. The largest and the smallest message give both.",
        "i, j = sizes.index(min(sizes)), sizes.index(max(sizes)); slope = (seconds[j] - seconds[i]) / (sizes[j] - "
        "sizes[i]); return seconds[i] - slope * sizes[i], 1 / slope",
    ),
)
def check_alpha_beta(learner: Callable) -> list[Row]:
    rows = []
    for name, scale in (("a wire inside a node", 1.0), ("a slow network", 30.0)):
        latency, bandwidth = random.uniform(1e-5, 9e-5) * scale, random.uniform(1e9, 9e9) / scale
        sizes = [int(4**power * random.uniform(0.6, 1.4)) for power in range(5, 12)]
        seconds = [latency + size / bandwidth for size in sizes]
        found = two_numbers(learner(list(sizes), list(seconds)), "two numbers, latency and bandwidth")
        rows += [
            row(f"latency of {name}", latency, found[0], "s", tolerance=TOLERANCE),
            row(f"bandwidth of {name}", bandwidth, found[1], "B/s", tolerance=TOLERANCE),
        ]
        largest, smallest = sizes.index(max(sizes)), sizes.index(min(sizes))
        through_zero = sum(s * s for s in sizes) / sum(s * t for s, t in zip(sizes, seconds, strict=True))
        bandwidths = {
            1 / bandwidth: "that is the slope, seconds per byte: the bandwidth is one over it",
            sizes[largest] / seconds[largest]: "bytes by seconds of one message: take the latency off its time first",
            through_zero: "that line runs through zero: a message of no bytes still takes the latency",
            latency: "that is the latency: asked for is (latency, bandwidth), in this order",
        }
        latencies = {seconds[smallest]: "that is the time of the smallest message: take its bytes × slope off"}
        explain(name, rows[-1], bandwidths)
        explain(name, rows[-2], latencies | {0.0: "without a latency, a thousand small messages would cost nothing"})
    return rows
