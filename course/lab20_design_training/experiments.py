"""Lab 20: a job with failures, second by second, beside the formula that predicts what it wastes."""

import random


def simulated_waste(
    interval_s: float, save_s: float, restart_s: float, mtbf_s: float, *, failures: int = 4000, seed: int = 0
) -> float:
    """Share of the time that saves, repeated work and restarts take, over so many exponential failures.

    A period is interval_s of training and one save. A failure throws away what came after the last complete save.
    """
    draw, useful, total = random.Random(seed), 0.0, 0.0
    for _ in range(failures):
        alive = draw.expovariate(1 / mtbf_s)
        whole = int(alive // (interval_s + save_s))
        useful += whole * interval_s
        total += alive + restart_s
    return 1 - useful / total
