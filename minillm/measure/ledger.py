"""The ledger: what this rank really did: every operation with its bytes, every span with its time.

`Group` writes an `Event` for each operation, `span` writes a `Span` for a stretch of work. Both land in every ledger
that is open in this process, whichever thread they come from. Times are `time.monotonic()` seconds, one clock for all
ranks of a machine, so ledgers returned by `launch` can be drawn over each other.

    with ledger() as led:
        group.all_reduce(gradients)
    led.bytes(op="all_reduce")      # bytes this rank sent
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

_open: list["Ledger"] = []
_lock = threading.Lock()


@dataclass
class Event:
    """One communication operation as one rank saw it.

    bytes: payload bytes this rank sent (counted message by message where minillm sends the messages itself; where a
    backend such as NCCL moves them inside one opaque call, the ring formula, and `counted` is False).
    waited: seconds the program stood still for it. shape, dtype: of the tensor the caller passed.
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


@dataclass
class Ledger:
    """What one rank recorded, in the order in which it finished."""

    events: list[Event] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

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


@contextlib.contextmanager
def span(name: str, kind: str = "compute") -> Iterator[None]:
    """Record how long the block took into every open ledger."""
    start = time.monotonic()
    try:
        yield
    finally:
        done = Span(name, kind, start, time.monotonic())
        for led in open_ledgers():
            led.spans.append(done)
