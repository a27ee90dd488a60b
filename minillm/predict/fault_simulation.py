"""A job under failures, played event by event from a seed: what the formulas of `faults.py` say on average.

    work interval | stall | work interval | stall | work ...  X  restart | work from the last save that was complete ...
                    └ write ─────┘                                        an asynchronous save counts when it is written

A synchronous save has no write beyond its stall. Failures are exponential and strike in work, saves and restarts alike.
"""

import random
from dataclasses import dataclass

from minillm.predict.faults import _not_negative, _positive

MOST_EVENTS = 5_000_000


@dataclass(frozen=True)
class Simulated:
    """Seconds of a simulated job by what they went to, and how often it failed and saved."""

    useful_s: float
    saving_s: float
    lost_s: float
    restarting_s: float
    failures: int
    saves: int

    @property
    def total_s(self) -> float:
        return self.useful_s + self.saving_s + self.lost_s + self.restarting_s

    @property
    def goodput(self) -> float:
        return self.useful_s / self.total_s


def simulate(
    work_s: float,
    interval_s: float,
    stall_s: float,
    restart_s: float,
    mtbf_s: float,
    write_s: float = 0.0,
    seed: int = 0,
) -> Simulated:
    """A job of `work_s` seconds of work, which saves after every `interval_s` of it and once more in the end.

    stall_s: what a save keeps training from; write_s: how long after that it is complete (asynchronous saves); the next
    save waits for it, and the end for the last one. ValueError for a job that hardly ever reaches a save, or takes more
    than MOST_EVENTS saves and failures.
    """
    _positive(work_s=work_s, interval_s=interval_s, mtbf_s=mtbf_s)
    _not_negative(stall_s=stall_s, restart_s=restart_s, write_s=write_s)
    draw = random.Random(seed)
    now, next_failure = 0.0, draw.expovariate(1 / mtbf_s)
    newest = before = 0.0  # seconds of work in the newest save, and in the one before it
    complete_at = 0.0  # when the newest one is written
    saving = lost = restarting = 0.0
    failures = saves = 0
    while newest < work_s:
        if failures + saves > MOST_EVENTS:
            more_or_less = "more" if failures > saves else "less"
            raise ValueError(
                f"after {failures} failures and {saves} saves {newest:.0f} of {work_s:.0f} s of work are saved: save "
                f"{more_or_less} often than every {interval_s:g} s at an MTBF of {mtbf_s:g} s, or simulate less work."
            )
        work, is_last = min(interval_s, work_s - newest), work_s - newest <= interval_s
        stall = stall_s + max(0.0, complete_at - now - work) + (write_s if is_last else 0.0)
        if next_failure >= now + work + stall:
            before, newest = newest, work_s if is_last else newest + work
            now, saving, saves = now + work + stall, saving + stall, saves + 1
            complete_at = now if is_last else now + write_s
            continue
        worked = min(work, next_failure - now)
        saving += next_failure - now - worked
        kept = newest if next_failure >= complete_at else before
        lost += newest + worked - kept
        newest = before = kept
        now = complete_at = next_failure
        next_failure, failures = now + draw.expovariate(1 / mtbf_s), failures + 1
        while next_failure < now + restart_s:  # it fails again before it has begun
            if failures > MOST_EVENTS:
                raise ValueError(f"a restart of {restart_s:g} s hardly ever ends at an MTBF of {mtbf_s:g} s.")
            restarting, now = restarting + next_failure - now, next_failure
            next_failure, failures = now + draw.expovariate(1 / mtbf_s), failures + 1
        restarting, now = restarting + restart_s, now + restart_s
    return Simulated(work_s, saving, lost, restarting, failures, saves)
