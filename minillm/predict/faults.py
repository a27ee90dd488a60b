"""Failures of large jobs in expectation: how often, how far apart to save, what share of the time is useful.

    MTBF of a job   MTBF of one device / devices            failures are independent and exponential
    interval        √(2 · cost of a save · MTBF)            Young 1974, https://doi.org/10.1145/361147.361115
    wasted share    cost / interval + (interval / 2 + restart) / MTBF

The wasted share is smallest at Young's interval, where the first two terms are equal; it holds while the interval is
short against the MTBF (Daly 2006 has the next term, https://doi.org/10.1016/j.future.2004.11.016).
"""

import math


def job_mtbf(device_mtbf_s: float, devices: int) -> float:
    """Seconds between failures of a job that any of its devices stops."""
    _positive(device_mtbf_s=device_mtbf_s, devices=devices)
    return device_mtbf_s / devices


def young_interval(save_s: float, mtbf_s: float) -> float:
    """Seconds between two saves that waste least. save_s: what a save keeps training from."""
    _positive(save_s=save_s, mtbf_s=mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s)


def wasted_share(interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Share of the time that saving, work done twice, and restarting take."""
    _positive(interval_s=interval_s, mtbf_s=mtbf_s)
    if save_s < 0 or restart_s < 0:
        raise ValueError(f"save_s {save_s} and restart_s {restart_s} cannot be negative.")
    return save_s / interval_s + (interval_s / 2 + restart_s) / mtbf_s


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value}; give a number above 0.")
