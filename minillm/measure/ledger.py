"""The ledger: what this rank really did: every operation with its bytes, every span with its time.

`Group` writes an `Event` for each operation, `span` writes a `Span` for a stretch of work. Both land in every ledger
that is open in this process, whichever thread they come from. Times are `time.monotonic()` seconds, one clock for all
ranks of a machine, so ledgers returned by `launch` can be drawn over each other. On a GPU they are those of device
events (`measure/clock.py`), which become seconds when a ledger's `events` or `spans` are read.

    with ledger() as led:
        group.all_reduce(gradients)
    led.bytes(op="all_reduce")      # bytes this rank sent
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from minillm.measure.clock import Moment, anchor, moment, seconds

_open: list["Ledger"] = []
_lock = threading.Lock()


@dataclass
class DeviceTimes:
    """When a GPU began and ended an operation, and between which moments a stream waited for it."""

    start: Moment
    end: Moment
    waits: list[tuple[Moment, Moment]] = field(default_factory=list)


@dataclass
class Event:
    """One communication operation as one rank saw it.

    bytes: payload bytes this rank sent (counted message by message where minillm sends the messages itself; where a
    backend such as NCCL moves them inside one opaque call, the ring formula, and `counted` is False).
    waited: seconds the program (on a GPU, the stream) stood still for it. shape, dtype: of the caller's tensor.
    """

    op: str
    group: str
    bytes: int
    messages: int
    shape: tuple[int, ...]
    dtype: str
    start: float
    end: float
    waited: float = 0.0
    emulated: bool = False
    counted: bool = True
    device: DeviceTimes | None = field(default=None, repr=False, compare=False)

    def resolve(self) -> None:
        """Turns device times into seconds."""
        if self.device is not None:
            self.start, self.end = seconds(self.device.start), seconds(self.device.end)
            self.waited += sum(seconds(after) - seconds(before) for before, after in self.device.waits)
            self.device = None


@dataclass(frozen=True)
class Span:
    """A named stretch of one rank's time; `kind` is compute, comm, wait, idle, input or optimizer."""

    name: str
    kind: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def resolved(self) -> "Span":
        """The span with device times turned into seconds."""
        if isinstance(self.start, float | int) and isinstance(self.end, float | int):
            return self
        return replace(self, start=seconds(self.start), end=seconds(self.end))


class Ledger:
    """What one rank recorded. events: in the order in which they were called; spans: in which they finished."""

    def __init__(self, events: Iterable[Event] = (), spans: Iterable[Span] = ()) -> None:
        self._events, self._spans = list(events), list(spans)

    @property
    def events(self) -> list[Event]:
        for event in self._events:
            event.resolve()
        return self._events

    @property
    def spans(self) -> list[Span]:
        self._spans = [span.resolved() for span in self._spans]
        return self._spans

    def record(self, entry: Event | Span) -> None:
        """Add an entry, whose times may still be a device's."""
        (self._events if isinstance(entry, Event) else self._spans).append(entry)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and (self.events, self.spans) == (other.events, other.spans)

    def __reduce__(self):
        return Ledger, (self.events, self.spans)

    def select(self, op: str | None = None, group: str | None = None) -> list[Event]:
        """The events of one operation and one group; None means any."""
        return [e for e in self.events if op in (None, e.op) and group in (None, e.group)]

    def bytes(self, op: str | None = None, group: str | None = None) -> int:
        """Payload bytes this rank sent."""
        return sum(e.bytes for e in self.select(op, group))

    @property
    def calls(self) -> Counter[str]:
        """How many operations of each kind; a collective counts once, however many messages it takes."""
        return Counter(e.op for e in self.events)

    @property
    def messages(self) -> int:
        """Point-to-point messages this rank sent, those inside collectives included."""
        return sum(e.messages for e in self.events)

    @property
    def waited(self) -> float:
        """Seconds the program stood still for communication."""
        return sum(e.waited for e in self.events)


@contextlib.contextmanager
def ledger() -> Iterator[Ledger]:
    """Collect this rank's operations and spans while the block runs. Ledgers may nest: each gets everything."""
    led = Ledger()
    anchor()
    with _lock:
        _open.append(led)
    try:
        yield led
    finally:
        with _lock:
            _open[:] = [other for other in _open if other is not led]


def open_ledgers() -> tuple[Ledger, ...]:
    """The ledgers open now. An asynchronous operation notes them when it starts and reports to them when it ends."""
    return tuple(_open)


def new_event(op: str, group: str, x: Any, emulated: bool = False) -> Event | None:
    """The entry of an operation on tensor x that begins now, in every open ledger; None while none is open."""
    if not _open:
        return None
    now = time.monotonic()
    event = Event(op, group, 0, 0, tuple(x.shape), str(x.dtype).removeprefix("torch."), now, now, emulated=emulated)
    for led in open_ledgers():
        led.record(event)
    return event


@contextlib.contextmanager
def span(name: str, kind: str = "compute") -> Iterator[None]:
    """Record how long the block took into every open ledger. On a GPU: from when to when its stream worked on it."""
    if not _open:
        yield
        return
    start = moment()
    try:
        yield
    finally:
        done = Span(name, kind, start, moment())
        for led in open_ledgers():
            led.record(done)
