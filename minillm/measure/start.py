"""Where the time of a process's start went: a replica that is being started serves nobody.

process ──▶ imports ──▶ load ──▶ warm-up ──▶ ready
the interpreter    packages    weights    first pass
"""

import time

import psutil

import minillm


class Start:
    """Seconds of each phase that has ended, in order. "process": until the first line of this package ran."""

    def __init__(self):
        began = psutil.Process().create_time()
        self.phases = {"process": max(0.0, minillm.IMPORTED_AT - began)}
        self._last = max(began, minillm.IMPORTED_AT)

    def end(self, phase: str) -> None:
        """The phase since the one before ends now."""
        now = time.time()  # as the system dates processes
        self.phases[phase] = max(0.0, now - self._last)
        self._last = now
