"""What a step did, and where its time went: input, forward, backward, communication, optimizer, and what is left: idle.

A step runs inside a ledger. Its spans say what it was doing; its communication events say how long it stood still for
other ranks, usually inside a span. Standing still counts as communication and not as the work it interrupted, so
communication that is hidden behind backward costs nothing here: the parts add up to the step.
"""

import bisect
import itertools
import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from minillm.measure import Ledger

ACTION = re.compile(r"[FBIW]\d+(\.\d+)?")
PARTS = ("input", "forward", "backward", "optimizer", "communication", "idle")


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step; the parts add up to `total`. Where they were not measured, all of it is idle."""

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
    def of(cls, ledger: Ledger, total: float) -> "StepTime":
        """The parts of one step that took `total` seconds, from what it recorded."""
        seconds = dict.fromkeys(PARTS, 0.0)
        events = sorted((event.end, event.waited) for event in ledger.events if event.waited)
        ends = [end for end, _ in events]
        up_to = [0.0, *itertools.accumulate(waited for _, waited in events)]
        known = sorted((done.start, done.end, part) for done in ledger.spans if (part := _part(done.name, done.kind)))
        inside, covered = 0.0, -math.inf
        for start, end, part in known:
            last = bisect.bisect_right(ends, end)
            waited = up_to[last] - up_to[bisect.bisect_left(ends, start)]
            seconds[part] += end - start - (0.0 if part == "communication" else waited)
            seconds["communication"] += 0.0 if part == "communication" else waited
            if end > covered:  # spans may lie within each other
                first = bisect.bisect_left(ends, start) if start > covered else bisect.bisect_right(ends, covered)
                inside, covered = inside + up_to[last] - up_to[first], end
        seconds["communication"] += up_to[-1] - inside  # between spans: it is no work of this rank either
        return cls(total, **{part: seconds[part] for part in PARTS if part != "idle"})

    def to_json(self) -> dict[str, float]:
        parts = {f"{part}_s": getattr(self, part) for part in PARTS} if self.idle < self.total else {}  # else unknown
        return {"seconds": self.total} | parts


def _part(name: str, kind: str) -> str | None:
    if ACTION.fullmatch(name):  # of a pipeline: F0, B3.1
        return "forward" if name[0] == "F" else "backward"
    if kind in ("comm", "wait"):
        return "communication"
    return next((part for part in PARTS[:4] if part in (name, kind)), None)


@dataclass(frozen=True)
class Step:
    """What one step did. loss: nats per token, before the update; grad_norm: before clipping; tokens: of all ranks.

    applied: False if nothing was updated: an overflow that loss scaling expects, or a `rollback` (why, and to where).
    mfu: useful FLOP/s as a share of the measured peak; recomputation is not useful. None without a peak.
    position: windows of the stream of data before this step; skipped: those that a rollback gives up, from and up to.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    time: StepTime
    mfu: float | None
    loss_scale: float
    applied: bool = True
    rollback: str | None = None
    position: int = 0
    skipped: tuple[int, int] | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.time.total

    def to_json(self) -> dict[str, Any]:
        flat = {name: value for name, value in asdict(self).items() if name != "time"}
        return flat | {"tokens_per_s": self.tokens_per_s} | self.time.to_json()
