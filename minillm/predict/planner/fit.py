"""The constants of `clusters.py` that no data sheet has, fitted to every second published run and judged on the others.

    python -m minillm.predict.planner.fit

Five numbers: the share of the peak that wide matrix products reach on an A100 and on an H100, the width at which they
reach half of it, what overlapped communication costs, and the speed-up of 8 bits. Minimised is the sum of squares of
log(predicted / reported), by coordinate search: each number up and down by a step that is halved until it is below
0.5 %.
"""

import math
from dataclasses import dataclass, replace

from minillm.predict.planner import published
from minillm.predict.planner.clusters import CONTENTION, DEVICES, FP8_SPEEDUP, HALF_WIDTH

SMALLEST_STEP = 0.005


@dataclass(frozen=True)
class Constants:
    a100: float = DEVICES["a100-80"].achievable
    h100: float = DEVICES["h100"].achievable
    half_width: float = HALF_WIDTH
    contention: float = CONTENTION
    fp8_speedup: float = FP8_SPEEDUP

    def apply(self, run: published.Run) -> published.Run:
        achievable = self.a100 if "A100" in run.cluster.device.name else self.h100
        fitted = {"half_width": self.half_width, "fp8_speedup": self.fp8_speedup}
        device = replace(run.cluster.device, achievable=achievable, **fitted)
        return replace(run, cluster=replace(run.cluster, device=device, contention=self.contention))


def loss(constants: Constants, runs: list[published.Run]) -> float:
    """Σ log² (predicted / reported)."""
    return sum(math.log1p(published.compare(constants.apply(run)).off) ** 2 for run in runs)


def fit(runs: list[published.Run], start: Constants) -> Constants:
    """The constants with the smallest loss near `start`."""
    best, step = loss(start, runs), 0.1
    while step > SMALLEST_STEP:
        improved = False
        for name in Constants.__dataclass_fields__:
            for factor in (1 + step, 1 / (1 + step)):
                tried = replace(start, **{name: getattr(start, name) * factor})
                if (found := loss(tried, runs)) < best:
                    start, best, improved = tried, found, True
        step = step if improved else step / 2
    return start


if __name__ == "__main__":
    print(fit([run for run in published.RUNS if run.fitted], Constants(0.6, 0.6, 200.0, 0.3, 1.5)))
    for name, fitted in (("fitted", True), ("held", False)):
        errors = published.errors(fitted)
        print(f"{name}: {len(errors)} runs, median {errors[len(errors) // 2]:.1%}, worst {errors[-1]:.1%}")
