"""One operation of a group, and the handle that it returns.

    operation = Operation(...)      numbered by its group; it has an event if a ledger is open
    with operation:                 announced on the flight recorder, compared with the other ranks' announcements
        ...                         messages and collectives of the same group are part of it

The operation ends with the block. One that a backend only *launches* goes on: the flight recorder shows it as launched
until `complete` is called. Nothing in the block is recorded for backward; a backend that launches sees to that itself.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from minillm.comm.diagnostics.mismatch import MismatchCheck
from minillm.comm.errors import WaitedTooLongError
from minillm.measure.clock import Moment, moment
from minillm.measure.ledger import Event

Message = tuple[torch.Tensor, int]  # (tensor, rank in the group)
Messages = Sequence[Message]
Shape = tuple[int, ...]
Splits = tuple[list[int] | None, list[int] | None]  # rows (from, to) each rank; None: equally many


class Current(threading.local):
    """The operation of a group that this thread is running."""

    operation: "Operation | None" = None


@dataclass(eq=False, slots=True)
class Operation:
    """sequence: its number among its group's operations; text: what every rank must announce, equal on all of them.

    ordinal: the group's number on the flight recorder. event: its ledger entry, None while no ledger is open.
    launches: whether it goes on after the `with` block; begin: when it began then, if the ledger has to know.
    depth: how many `with` blocks of it are open, its own and those of the collectives called inside it; 0: not running.
    """

    check: MismatchCheck
    current: Current
    ordinal: int
    sequence: int
    text: bytes
    event: Event | None
    launches: bool = False
    begin: Moment | None = None
    depth: int = 0
    _outer: "Operation | None" = None
    _grad: bool = False

    def record_ring_bytes(self, num_bytes: int) -> None:
        """While a ledger is open, for a backend whose messages cannot be counted: what this rank sends in a ring."""
        self.event.bytes += num_bytes
        self.event.counted = False

    def record_wait(self) -> None:
        """For an operation that is over and held up its caller from begin to end."""
        if self.event is not None and not self.depth:
            self.event.waited += self.event.end - self.event.start

    def __enter__(self) -> "Operation":
        self.depth += 1
        if self.depth > 1:
            return self
        self._outer, self.current.operation = self.current.operation, self
        self._grad = not self.launches and torch.is_grad_enabled()
        if self._grad:
            torch.set_grad_enabled(False)
        if self.event is not None:
            self.event.start, self.begin = time.monotonic(), moment() if self.launches else None
        try:
            self.check.announce(self.ordinal, self.sequence, self.text, self.launches)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.depth -= 1
        if self.depth:
            return
        self.current.operation = self._outer
        if self._grad:
            torch.set_grad_enabled(True)
        if self.event is not None:
            self.event.end = time.monotonic()
        if isinstance(error, WaitedTooLongError):  # its announcement stays up for the other ranks' reports
            raise self.check.hang() from None
        if error is not None or not self.launches:
            self.check.withdraw(self.ordinal, self.sequence)

    def complete(self) -> None:
        """The launched operation has been seen to be done."""
        self.check.withdraw(self.ordinal, self.sequence)
        if self.event is not None and self.event.device is None:
            self.event.end = time.monotonic()


class Work:
    """What `async_op=True` returns. `wait()` returns the result; `done()` says whether it would do so at once.

    event: the ledger entry that the time spent in `wait` is added to.
    """

    def __init__(
        self, wait: Callable[[], Any], done: Callable[[], bool] | None = None, event: Event | None = None
    ) -> None:
        self._wait, self._done, self._event = wait, done, event
        self._result: Any = None
        self._waited = False

    def done(self) -> bool:
        return self._waited or self._done is None or self._done()

    def wait(self) -> Any:
        if not self._waited:
            start = time.monotonic()
            self._result = self._wait()
            self._waited = True
            if self._event is not None:
                self._event.waited += time.monotonic() - start
        return self._result
