"""One operation of a group, the handle it returns, and the backend that carries it out.

    operation = Operation(...)      numbered by its group; it has an event if a ledger is open
    with operation:                 announced on the flight recorder, compared with the other ranks' announcements
        ...                         messages and collectives of the same group are part of it

The operation ends with the block. One that a backend only *launches* goes on: the flight recorder shows it as launched
until `complete` is called.
"""

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch

from minillm.comm.diagnostics.mismatch import MismatchCheck
from minillm.comm.errors import WaitedTooLongError
from minillm.measure.clock import Moment
from minillm.measure.ledger import Event

TAGS = 1_000_000  # how many tags there are; an operation's follows from its number and text
Message = tuple[torch.Tensor, int]  # (tensor, rank in the group)
Splits = tuple[list[int] | None, list[int] | None]  # rows (from, to) each rank; None: equally many


class Ranks(Protocol):
    """Numbered ranks that exchange messages: all that a collective algorithm needs. A `Group`, or some ranks of one."""

    rank: int
    world_size: int
    scratch: Any  # an operands.Scratch
    cuts_messages: bool

    def exchange(self, send: Any = (), recv: Any = ()) -> Any: ...


class Communicator(Ranks, Protocol):
    """What a collective needs of the `Group` that it is called on."""

    name: str
    device: torch.device

    def run(self, op: str, x: torch.Tensor, body: Callable[[], Any], *, async_op: bool = ...) -> Any: ...
    def check_rank(self, what: str, rank: int) -> None: ...


class Current(threading.local):
    """The operation of a group that this thread is running."""

    operation: "Operation | None" = None


@dataclass(eq=False)
class Operation:
    """sequence: its number among its group's operations; text: what every rank must announce, equal on all of them.

    ordinal: the group's number on the flight recorder. event: its ledger entry, None while no ledger is open.
    launches: whether it goes on after the `with` block; begin: when a device began it, if the ledger has to know.
    depth: how many `with` blocks of it are open, its own and those of the collectives called inside it; 0: not running.
    """

    group: Communicator
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

    @property
    def tag(self) -> int:
        """The tag of its messages."""
        return 1 + zlib.crc32(self.text, self.sequence) % TAGS

    def record_ring_bytes(self, num_bytes: int) -> None:
        """For a backend whose messages cannot be counted: the bytes that this rank sends by the ring formula."""
        if self.event is not None:
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
        self._grad = torch.is_grad_enabled()
        if self._grad:
            torch.set_grad_enabled(False)
        if self.event is not None:
            self.event.start = time.monotonic()
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


class Backend(Protocol):
    """What carries out a group's operations: `cpu.CpuBackend` sends messages, `native.NativeBackend` calls torch.

    The collectives take the arguments of the group's methods of the same name. They return a Work if `async_op` is
    true, else what its `wait` would return.
    """

    cuts_messages: bool  # whether rings send a large tensor in pieces
    launches: bool  # whether an operation may go on when its call has returned

    def all_reduce(self, operation: Operation, x: torch.Tensor, op: str, async_op: bool) -> Any: ...
    def broadcast(self, operation: Operation, x: torch.Tensor, root: int, async_op: bool) -> Any: ...
    def all_gather(self, operation: Operation, x: torch.Tensor, out: torch.Tensor | None, async_op: bool) -> Any: ...
    def reduce_scatter(
        self, operation: Operation, x: torch.Tensor, op: str, out: torch.Tensor | None, async_op: bool
    ) -> Any: ...
    def all_to_all(self, operation: Operation, x: torch.Tensor, splits: Splits, async_op: bool) -> Any: ...
    def barrier(self, operation: Operation) -> None: ...
    def gather_objects(self, operation: Operation, value: Any) -> list[Any]: ...

    def run(self, operation: Operation, x: torch.Tensor, body: Callable[[], Any], async_op: bool) -> Any:
        """Run `body`, a collective of several steps on x."""

    def exchange(self, operation: Operation, sends: Sequence[Message], recvs: Sequence[Message], eager: bool) -> Work:
        """Start messages. They are part of the operation if it is running, else all of it."""

    def torch_errors(self) -> AbstractContextManager:
        """Around a call of torch's that waits for other ranks: tells a lost rank and too long a wait apart."""
        return nullcontext()

    def connect(self) -> None:
        """Open connections for `eager` messages."""

    def finish(self) -> None:
        """Return when this rank's asynchronous operations are over."""

    def close(self) -> None:
        """Let go of threads, connections and torch's process group."""
