"""Where the hours of a run went, over all of its attempts: useful, saving, lost, restarting, other.

    attempt 1  step step step SAVE step step ✗            the two steps after the save are lost
               └── useful ──┘      └─ lost ──┘ restarting
    attempt 2                                 └─ begin … load … step step step SAVE end

    runs/NAME/time.jsonl   a line per event; a resumed run adds to it and never takes a line away

A step is useful if no later attempt or rollback made it again. Restarting runs from the last sign of life of an attempt
to the first step of the next. The time between an end that somebody asked for and the next start is not counted. An
agent that lets another node in ends its ranks in the same way; that time counts, as the agent was there before the end.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minillm.train.fault_tolerance.elastic import agent_began
from minillm.train.metrics import read_rows

FILE = "time.jsonl"
TYPES = {"event": str, "step": int | float, "at": int | float, "seconds": int | float}  # of an event's values
PARTS = ("useful", "saving", "lost", "restarting", "other")


@dataclass(frozen=True)
class Goodput:
    """Seconds by what they went to, and attempts begun. other: validation, and the start of the first attempt."""

    useful: float = 0.0
    saving: float = 0.0
    lost: float = 0.0
    restarting: float = 0.0
    other: float = 0.0
    attempts: int = 0

    @property
    def total(self) -> float:
        return sum(getattr(self, part) for part in PARTS)

    @property
    def share(self) -> float:
        """The goodput: useful seconds as a share of all; 0 before there are any."""
        return self.useful / self.total if self.total else 0.0

    def to_json(self) -> dict[str, float]:
        return asdict(self) | {"goodput": self.share}

    def __str__(self) -> str:
        if not self.total:
            return "no time spent yet"
        parts = ", ".join(f"{part} {getattr(self, part) / self.total:.1%}" for part in PARTS if getattr(self, part))
        return f"{self.total:.0f} s in {self.attempts} attempt{'s' * (self.attempts != 1)}: {parts}"


class TimeLog:
    """Notes what this attempt does, from step `steps_done` on.

    is_restart: an agent of torchrun has started this attempt, perhaps again. clock, since: seconds since the epoch,
    comparable across attempts: now, and when that agent began.
    """

    def __init__(
        self,
        folder: Path,
        steps_done: int,
        is_restart: bool = False,
        clock: Callable[[], float] = time.time,
        since: Callable[[], float] = agent_began,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.ended_at: int | None = None  # the step at which the attempt was done, or ended because it was asked to
        self._clock, self._file = clock, (folder / FILE).open("a", encoding="utf-8")
        if self._file.tell():
            self._file.write("\n")  # after a line that a crash has cut short
        self._note("begin", steps_done, **({"agent_began": since()} if is_restart else {}))

    def step(self, step: int, seconds: float, back_to: int | None = None) -> None:
        """Notes a step that took `seconds`. back_to: the step that a rollback has gone back to."""
        self._note("step", step, seconds, **({} if back_to is None else {"back_to": back_to}))

    @contextmanager
    def timing(self, event: str, step: int) -> Iterator[None]:
        """A context that times a "save" or a "validate"."""
        begin = self._clock()
        yield
        self._note(event, step, self._clock() - begin)

    def __enter__(self) -> "TimeLog":
        return self

    def __exit__(self, *_: object) -> None:
        if self.ended_at is not None:
            self._note("end", self.ended_at)
        self._file.close()

    def _note(self, event: str, step: int, seconds: float = 0.0, **more: Any) -> None:
        row = {"event": event, "step": step, "at": round(self._clock(), 4), "seconds": round(seconds, 6)}
        self._file.write(json.dumps(row | more) + "\n")
        self._file.flush()


def read_goodput(folder: Path) -> Goodput | None:
    """The goodput of the run in `folder`; None if it has noted nothing. Raises ValueError if the file holds something
    else."""
    path = folder / FILE
    if not path.exists():
        return None
    return goodput(read_rows(path, "the times of a run", TYPES))


def goodput(rows: Iterable[dict[str, Any]]) -> Goodput:
    """Adds up the events of `TimeLog`, in order."""
    kept: dict[int, float] = {}  # seconds of the steps that count so far
    spent = dict.fromkeys(PARTS, 0.0)
    attempts, last, was_ended, gap_is = 0, None, True, "other"
    for row in rows:
        event, step, at, seconds = row["event"], row["step"], row["at"], row["seconds"]
        if event == "begin":
            attempts += 1
            _lose(kept, step, spent)
            counts = last is not None and (not was_ended or row.get("agent_began", math.inf) <= last)
            gap_is, was_ended = ("restarting" if counts else "other"), False
            last = last if counts else at
            continue
        spent[gap_is] += max(0.0, at - seconds - (at if last is None else last))
        gap_is, last, was_ended = "other", at, event == "end"
        if event == "step":
            kept[step] = seconds
            _lose(kept, row.get("back_to", math.inf), spent)
        else:
            spent["saving" if event == "save" else "other"] += seconds
    return Goodput(**spent | {"useful": sum(kept.values())}, attempts=attempts)


def _lose(kept: dict[int, float], step: float, spent: dict[str, float]) -> None:
    """The steps from `step` on will be made again."""
    for number in [each for each in kept if each >= step]:
        spent["lost"] += kept.pop(number)
