"""Failures of large jobs in expectation: how often, how far apart to save, what share of the time is useful.

    MTBF of a job   MTBF of one device / devices            failures are independent and exponential
    interval        √(2 · cost of a save · MTBF)            Young 1974, https://doi.org/10.1145/361147.361115
    wasted share    cost / interval + (interval / 2 + restart) / MTBF

The wasted share is smallest at Young's interval, where the first two terms are equal; it holds while a save is short
against the interval, and interval and restart against the MTBF. `daly_interval` has the next terms, and `goodput` is
exact for exponential failures that also strike while saving and restarting (Daly 2006,
https://doi.org/10.1016/j.future.2004.11.016).
`simulate_failures` plays the same job event by event:

    work interval | stall | work interval | stall | work ...  X  restart | work from the last save that was complete ...
                    └ write ─────┘                                        an asynchronous save counts when it is written
"""

import math
import random
from dataclasses import dataclass

# Llama 3 405B: unexpected interruptions of one job in a snapshot of 54 days (47 planned ones are left out), on so many
# GPUs; more than this share of that time trained (Grattafiori et al. 2024, §3.3.4, https://arxiv.org/abs/2407.21783).
LLAMA3_INTERRUPTIONS, LLAMA3_DAYS, LLAMA3_GPUS, LLAMA3_GOODPUT = 419, 54, 16384, 0.90
LLAMA3_GPU_MTBF_S = LLAMA3_DAYS * 86400 / LLAMA3_INTERRUPTIONS * LLAMA3_GPUS  # 5.8 years

MOST_EVENTS = 5_000_000  # of one simulation
ADAM_BYTES = 14  # of a parameter in a checkpoint: bf16 weight, and in float32 its master and two moments


def job_mtbf(device_mtbf_s: float, devices: int) -> float:
    """Seconds between failures of a job that any of its devices stops."""
    _positive(device_mtbf_s=device_mtbf_s)
    _whole(devices=devices)
    return device_mtbf_s / devices


def young_interval(save_s: float, mtbf_s: float) -> float:
    """The interval between two saves, in seconds, that wastes the least time (Young 1974). save_s: seconds that a save
    stops training for."""
    _positive(save_s=save_s, mtbf_s=mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s)


def daly_interval(save_s: float, mtbf_s: float) -> float:
    """Young's interval with higher-order terms, for saves that are not short against the MTBF as well (Daly 2006, eq.
    37)."""
    _positive(save_s=save_s, mtbf_s=mtbf_s)
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return young_interval(save_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def wasted_share(interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Share of the time that saves, repeated work and restarts take, if failures are rare; `goodput` is exact."""
    _positive(interval_s=interval_s, mtbf_s=mtbf_s)
    _not_negative(save_s=save_s, restart_s=restart_s)
    return save_s / interval_s + (interval_s / 2 + restart_s) / mtbf_s


def goodput(interval_s: float, save_s: float, restart_s: float, mtbf_s: float, write_s: float = 0.0) -> float:
    """Share of the time that goes into work which is kept, if a job saves after every interval_s of work.

    save_s: seconds that a save stops training for; write_s: seconds after which an asynchronous save counts, for which
    the next save waits. Exact for exponential failures that strike during saves and restarts too. From the end of a
    restart to that of the next mtbf · e^(restart / mtbf) seconds pass on average. In these the first save counts after
    interval + save + write, and then one more every cycle = save + max(interval, write), so that

        interval · e^(-(interval + save + write) / mtbf) / (1 - e^(-cycle / mtbf))

    seconds of work are kept. With write_s 0 the share is that of Daly 2006, eq. 20.
    """
    _positive(interval_s=interval_s, mtbf_s=mtbf_s)
    _not_negative(save_s=save_s, restart_s=restart_s, write_s=write_s)
    cycle_s = save_s + max(interval_s, write_s)
    first_counts = math.exp(-(interval_s + save_s + write_s + restart_s) / mtbf_s)
    return interval_s * first_counts / (mtbf_s * -math.expm1(-cycle_s / mtbf_s))


def best_goodput(save_s: float, restart_s: float, mtbf_s: float) -> float:
    """The goodput at Daly's interval."""
    return goodput(daly_interval(save_s, mtbf_s), save_s, restart_s, mtbf_s)


@dataclass(frozen=True)
class CheckpointCost:
    """What saving costs a job. total_bytes: of one checkpoint, which `ranks` write together, each its own part.

    storage_bytes_per_s: of the storage in all; link_bytes_per_s: of one rank's network to it; copy_bytes_per_s: of one
    rank from its device to the host's memory.
    """

    total_bytes: float
    ranks: int
    storage_bytes_per_s: float
    link_bytes_per_s: float
    copy_bytes_per_s: float

    def __post_init__(self) -> None:
        _positive(**vars(self))
        _whole(ranks=self.ranks)

    @property
    def bytes_per_rank(self) -> float:
        return self.total_bytes / self.ranks

    @property
    def write_s(self) -> float:
        """Seconds until all ranks have written: limited by the storage as a whole or by one rank's link."""
        return max(self.total_bytes / self.storage_bytes_per_s, self.bytes_per_rank / self.link_bytes_per_s)

    @property
    def copy_s(self) -> float:
        """Seconds to copy a rank's part to host memory."""
        return self.bytes_per_rank / self.copy_bytes_per_s

    @property
    def sync_stall_s(self) -> float:
        """Seconds that a synchronous save stops training for: the copy and the write."""
        return self.copy_s + self.write_s

    def async_stall_s(self, interval_s: float) -> float:
        """Seconds that an asynchronous save stops training for: the copy, and what is left of the previous write if
        that takes longer than the interval."""
        _positive(interval_s=interval_s)
        return self.copy_s + max(0.0, self.write_s - interval_s)

    def async_wasted_share(self, interval_s: float, restart_s: float, mtbf_s: float) -> float:
        """`wasted_share` of asynchronous saves. Each stops training for less, but counts only once it is written, so a
        failure undoes half an interval and the time of a write. Raises ValueError if a write takes longer than the
        interval; `goodput` covers that case."""
        if self.write_s > interval_s:
            raise ValueError(f"interval_s is {interval_s:g}, but a write takes {self.write_s:g} s: save less often.")
        return wasted_share(interval_s, self.copy_s, restart_s, mtbf_s) + self.write_s / mtbf_s


def checkpoint_bytes(parameters: float, bytes_per_parameter: float = ADAM_BYTES) -> float:
    """Bytes of a checkpoint in which nothing is stored twice."""
    _positive(parameters=parameters, bytes_per_parameter=bytes_per_parameter)
    return parameters * bytes_per_parameter


def checkpoint_bandwidth(total_bytes: float, mtbf_s: float, wasted: float) -> float:
    """Bytes/s that storage must take for synchronous saves, at Young's interval, to cost no more than the share
    `wasted` together with the work that failures undo. √(2 · save / mtbf) = wasted gives the longest save."""
    _positive(total_bytes=total_bytes, mtbf_s=mtbf_s, wasted=wasted)
    if wasted >= 1:
        raise ValueError(f"wasted is {wasted}; give a share below 1.")
    return total_bytes / (wasted**2 * mtbf_s / 2)


@dataclass(frozen=True)
class SimulatedJob:
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


def simulate_failures(
    work_s: float,
    interval_s: float,
    stall_s: float,
    restart_s: float,
    mtbf_s: float,
    write_s: float = 0.0,
    seed: int = 0,
) -> SimulatedJob:
    """Simulates a job of `work_s` seconds of work that saves after every `interval_s` of it, and at the end.

    stall_s: seconds that a save stops training for; write_s: seconds after which an asynchronous save is complete. The
    next save waits for it, and so does the end of the job. Raises ValueError for a job that hardly ever reaches a save,
    or that takes more than MOST_EVENTS saves and failures.
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
    return SimulatedJob(work_s, saving, lost, restarting, failures, saves)


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value}; give a finite number above 0.")


def _not_negative(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value}; give a finite number from 0 on.")


def _whole(**values: float) -> None:
    for name, value in values.items():
        if not (value >= 1 and value % 1 == 0):
            raise ValueError(f"{name} is {value}; give a whole number from 1 on.")
