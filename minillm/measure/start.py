"""Where the time of a process's start went: a replica that is being started serves nobody.

process ──▶ imports ──▶ load ──▶ warm-up ──▶ ready
the interpreter    packages    weights    first pass
"""

import os
import sys
import time
from pathlib import Path

import psutil

import minillm


class Start:
    """Seconds of each phase that has ended, in order. "process": until the first line of this package ran."""

    def __init__(self):
        began = time.time() - age_s()
        self.phases = {"process": max(0.0, minillm.IMPORTED_AT - began)}
        self._last = max(began, minillm.IMPORTED_AT)

    def end(self, phase: str) -> None:
        """The phase since the one before ends now."""
        now = time.time()
        self.phases[phase] = max(0.0, now - self._last)
        self._last = now


def age_s() -> float:
    """Seconds since this process began, to a hundredth on Linux. psutil dates processes by the second in which the
    machine was started, which may be off by one."""
    if sys.platform != "linux":
        return time.time() - psutil.Process().create_time()
    after_name = Path("/proc/self/stat").read_text("utf-8").rpartition(")")[2].split()
    ticks = int(after_name[19])  # field 22, man 5 proc: since the machine was started
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
