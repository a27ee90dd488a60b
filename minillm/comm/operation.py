"""One operation of a group, from its call to its end: on the flight recorder, in the ledger, compared with the others.

    with operation:          announced, compared, timed; messages inside are counted as its own
        body()

A backend that only *launches* its work leaves the `with` before the work is done: the announcement then stays up, as
"launched", until `complete` is called.
"""

import threading
import time
import zlib
from types import TracebackType

import torch

from minillm.comm.diagnostics.mismatch import MismatchCheck
from minillm.comm.errors import WaitedTooLongError
from minillm.measure.ledger import Event

TAGS = 1_000_000  # messages carry one of so many, made of the operation's number and text: others are told apart


class Inside(threading.local):
    """The operation that this thread is inside of."""

    operation: "Operation | None" = None


class Operation:
    """sequence: its number among its group's; text: what all ranks must agree on; event: its ledger entry, if any.

    ordinal: the group's number on the flight recorder. launches: whether it goes on after the `with` block.
    """

    def __init__(
        self,
        check: MismatchCheck,
        inside: Inside,
        ordinal: int,
        sequence: int,
        text: bytes,
        event: Event | None,
        launches: bool = False,
    ) -> None:
        self.check, self.inside, self.text, self.event = check, inside, text, event
        self.ordinal, self.sequence, self.launches = ordinal, sequence, launches
        self.bytes, self.messages, self.counted = 0, 0, True
        self._outer: Operation | None = None
        self._grad = False

    @property
    def tag(self) -> int:
        """Of its messages."""
        return 1 + zlib.crc32(self.text, self.sequence) % TAGS

    @property
    def events(self) -> tuple[Event, ...]:
        return (self.event,) if self.event else ()

    def __enter__(self) -> "Operation":
        self._outer, self.inside.operation = self.inside.operation, self
        self._grad = torch.is_grad_enabled()
        if self._grad:
            torch.set_grad_enabled(False)
        if self.event:
            self.event.start = time.monotonic()
        try:
            self.check.enter(self.ordinal, self.sequence, self.text, self.launches)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, WaitedTooLongError):  # its announcement stays up, for the others' reports
            self._restore()
            raise self.check.hang() from None
        if self.launches and error is None:
            self._restore()
        else:
            self._end()

    def complete(self) -> None:
        """What was launched has been seen to be done."""
        self.check.leave(self.ordinal, self.sequence)
        if self.event and self.event.device is None:
            self.event.end = time.monotonic()

    def _end(self) -> None:
        self._restore()
        self.check.leave(self.ordinal, self.sequence)

    def _restore(self) -> None:
        self.inside.operation = self._outer
        if self._grad:
            torch.set_grad_enabled(True)
        if self.event:
            self.event.end = time.monotonic()
            self.event.bytes, self.event.messages, self.event.counted = self.bytes, self.messages, self.counted
