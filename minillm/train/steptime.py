"""Where the time of a step goes: input, forward, backward, communication, optimizer, and what is left: idle.

A step runs inside a ledger. Its spans say what it was doing; its communication events say how long it stood still for
other ranks, usually inside a span. Standing still counts as communication and not as the work it interrupted, so
communication that is hidden behind backward costs nothing here: the parts add up to the step.

On a GPU the host only enqueues work, so a span lies between two events of the device's stream. They are read once, when
the step is over: nothing waits for the device on the way.
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from minillm.measure import Ledger, Span, span
from minillm.measure.ledger import open_ledgers

ACTION = re.compile(r"[FBIW]\d+(\.\d+)?")
PARTS = ("input", "forward", "backward", "optimizer", "communication", "idle")


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step; the parts add up to `total`."""

    total: float
    input: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    communication: float = 0.0

    @property
    def idle(self) -> float:
        """What no span accounts for: Python between them."""
        return self.total - self.input - self.forward - self.backward - self.optimizer - self.communication

    @classmethod
    def of(cls, ledger: Ledger, start: float, end: float) -> "StepTime":
        """From what was recorded between `start` and `end` (time.monotonic() seconds)."""
        seconds = dict.fromkeys(PARTS, 0.0)
        for done in ledger.spans:
            if done.start >= start and done.end <= end and (part := _part(done.name, done.kind)):
                seconds[part] += done.seconds
                if part != "communication":
                    waited = sum(event.waited for event in ledger.events if done.start <= event.end <= done.end)
                    seconds[part] -= waited
                    seconds["communication"] += waited
        return cls(end - start, **{part: seconds[part] for part in PARTS if part != "idle"})

    def to_json(self) -> dict[str, float]:
        return {"seconds": self.total} | {f"{part}_s": getattr(self, part) for part in PARTS}


class DeviceClock:
    """Spans of the work on one device. On the CPU they are the ledger's own; on a GPU `stop` writes them into it.

    The device is idle when the clock starts, since `stop` waited for the work before: both clocks agree there.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.pending: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> float:
        """time.monotonic() seconds, now."""
        self.pending, self.started = [], time.monotonic()
        self.origin = self._event()
        return self.started

    @contextmanager
    def span(self, name: str, kind: str = "compute") -> Iterator[None]:
        if self.device.type != "cuda":
            with span(name, kind):
                yield
            return
        begin = self._event()
        yield
        self.pending.append((name, kind, begin, self._event()))

    def stop(self) -> float:
        """Waits for the device, writes its spans into the open ledgers and returns the time then."""
        for name, kind, begin, end in self.pending:
            end.synchronize()  # the first of them waits, the others follow it on the stream
            first, last = (self.started + self.origin.elapsed_time(event) / 1e3 for event in (begin, end))
            for led in open_ledgers():
                led.spans.append(Span(name, kind, first, last))
        return time.monotonic()

    def _event(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


def _part(name: str, kind: str) -> str | None:
    if ACTION.fullmatch(name):  # of a pipeline: F0, B3.1
        return "forward" if name[0] == "F" else "backward"
    if kind in ("comm", "wait"):
        return "communication"
    return next((part for part in PARTS[:4] if part in (name, kind)), None)
