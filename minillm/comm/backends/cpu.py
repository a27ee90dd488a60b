"""The CPU's backend: minillm's own collectives, made of point-to-point messages.

A collective runs in the calling thread; asynchronous ones run one after the other in a thread of the group. Its
messages are a `Transfer`, which posts any number of sends and receives at once, so that no order of sends can deadlock.
It hides three differences: exchanges of a collective between ranks of one machine use sockets of our own; gloo moves
CPU memory only, so tensors on a GPU are copied to the host and back; and an emulated link delivers later than the real
wire. For the last, the sender adds a stamp (the delivery time, 8 bytes, not counted: it belongs to the emulation), and
both sides wait for that time.

Sockets are used only when each rank sends and receives in every step, as in a ring, because a socket's send completes
even if the peer never joins; gloo's send completes once the peer receives. One-way messages, as in a tree, stay with
gloo, so a broadcast that another rank never joins is noticed. `eager` messages use sockets as well: their sender has
agreed not to notice.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from minillm.comm import collectives
from minillm.comm.backends import sockets
from minillm.comm.errors import MismatchError, PeerLostError, WaitedTooLongError
from minillm.comm.operands import part_shape
from minillm.comm.operation import Backend, Communicator, Message, Operation, Splits, Work
from minillm.comm.world import World

STAMP = 1 << 24  # added to the tag of a message that carries a delivery time
GLANCE_S = 0.002  # how long `done` waits before it returns False


class CpuBackend(Backend):
    """ranks: the members' global ranks; key: names their sockets, unique among this rank's groups."""

    launches = False

    def __init__(
        self, process_group: dist.ProcessGroup, ranks: Sequence[int], world: World, name: str, key: int
    ) -> None:
        self.process_group, self.ranks, self.world, self.name = process_group, ranks, world, name
        self.cuts_messages = world.egress is None  # on an emulated link each piece would pay its latency
        self.ranks_per_node = self._ranks_per_node()
        self.sockets = self._sockets(str(key))
        self.direct: sockets.Sockets | tuple[()] = ()
        self._key = key
        self._queue: ThreadPoolExecutor | None = None
        self._idle: threading.Event | None = None  # set when the last asynchronous one is over

    # The collectives. `__wrapped__` is the algorithm alone: `@collective` would make another operation of it.

    def all_reduce(self, operation: Operation, x: torch.Tensor, op: str, async_op: bool) -> Any:
        """One ring; on an emulated topology that asks for it, two levels."""
        if self.ranks_per_node > 1:
            two_level = collectives.hierarchical_all_reduce.__wrapped__
            return self._run(operation, async_op, two_level, x, operation.group, self.ranks_per_node, op)
        return self._run(operation, async_op, collectives.ring_all_reduce.__wrapped__, x, operation.group, op)

    def broadcast(self, operation: Operation, x: torch.Tensor, root: int, async_op: bool) -> Any:
        return self._run(operation, async_op, collectives.tree_broadcast.__wrapped__, x, operation.group, root)

    def all_gather(self, operation: Operation, x: torch.Tensor, out: torch.Tensor | None, async_op: bool) -> Any:
        return self._run(operation, async_op, collectives.ring_all_gather.__wrapped__, x, operation.group, out)

    def reduce_scatter(
        self, operation: Operation, x: torch.Tensor, op: str, out: torch.Tensor | None, async_op: bool
    ) -> Any:
        return self._run(operation, async_op, _reduce_scatter, x, operation.group, op, out)

    def all_to_all(self, operation: Operation, x: torch.Tensor, splits: Splits, async_op: bool) -> Any:
        return self._run(operation, async_op, collectives.all_to_all, x, operation.group, *splits)

    def run(self, operation: Operation, x: torch.Tensor, body: Callable[[], Any], async_op: bool) -> Any:
        return self._run(operation, async_op, _to_the_end, body)

    def barrier(self, operation: Operation) -> None:
        self._run(operation, False, self._barrier)

    def _barrier(self) -> None:
        with self.torch_errors():
            dist.barrier(self.process_group)

    def gather_objects(self, operation: Operation, value: Any) -> list[Any]:
        return self._run(operation, False, self._gather_objects, value)

    def _gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * len(self.ranks)
        with self.torch_errors():
            dist.all_gather_object(values, value, self.process_group)
        return values

    def _run(self, operation: Operation, async_op: bool, body: Callable[..., Any], *args: Any) -> Any:
        """Run the body in this thread; in the group's own thread if `async_op` or if that is still busy."""
        if operation.depth:  # part of a collective that is running in this thread
            result = body(*args)
            return Work(lambda: result) if async_op else result
        if not async_op and (self._idle is None or self._idle.is_set()):
            with operation:
                result = body(*args)
            operation.record_wait()
            return result
        if self._queue is None:
            self._queue = ThreadPoolExecutor(1, f"minillm-{self.name}", _use, [self.world.device])
        idle = self._idle = threading.Event()
        future = self._queue.submit(_perform, operation, _queued_so_far(self.world.device), idle, body, args)
        work = Work(functools.partial(_in_order, future), future.done, operation.event)
        return work if async_op else work.wait()

    def exchange(self, operation: Operation, sends: Sequence[Message], recvs: Sequence[Message], eager: bool) -> Work:
        if operation.depth:
            return Transfer(self, sends, recvs, operation.tag, eager)
        transfer = Transfer(self, sends, recvs, 0, eager)
        if eager and not transfer.left():
            with operation:
                transfer.leave()
        return Work(functools.partial(_deliver, operation, transfer), transfer.done, operation.event)

    # Connections and threads.

    def _ranks_per_node(self) -> int:
        """How many ranks of the group each emulated node has, where all-reduces are to have two levels; else 1."""
        links = self.world.egress and self.world.egress.links
        together = links.neighbours(self.ranks) if getattr(links, "two_level", False) else 1
        return together if together < len(self.ranks) else 1

    def _sockets(self, key: str) -> sockets.Sockets | tuple[()]:
        if self.world.device.type != "cpu" or self.world.egress is not None:
            return ()
        near = [place for place, rank in enumerate(self.ranks) if rank in self.world.local_ranks]
        return sockets.Sockets(self.process_group, key, near, self.world.timeout)

    def connect(self) -> None:
        if self.sockets and not self.direct:
            self.direct = self._sockets(f"{self._key}-direct")

    def finish(self) -> None:
        if self._queue is not None:
            self._queue.shutdown()

    def close(self) -> None:
        self.process_group = None
        for each in (self.sockets, self.direct):
            if each:
                each.close()

    @contextlib.contextmanager
    def torch_errors(self) -> Iterator[None]:
        """gloo's errors have one type. How long the call took tells a timeout from a lost rank."""
        start = time.monotonic()
        try:
            yield
        except (PeerLostError, WaitedTooLongError, MismatchError):
            raise
        except RuntimeError as error:
            if time.monotonic() - start > 0.95 * self.world.timeout.total_seconds():
                raise WaitedTooLongError(str(error)) from error
            raise self.lost(error) from error

    def lost(self, error: BaseException) -> PeerLostError:
        reason = (str(error).strip().splitlines() or ["it has gone"])[-1]
        return PeerLostError(f"rank {self.world.rank} lost its partner in group {self.name!r}: {reason}")


def _perform(
    operation: Operation,
    queued: torch.cuda.Event | None,
    idle: threading.Event,
    body: Callable[..., Any],
    args: Sequence[Any],
) -> tuple[Any, torch.cuda.Event | None]:
    """In the group's thread: returns the result, and the end of it on this thread's stream."""
    try:
        if queued:
            torch.cuda.current_stream().wait_event(queued)
        with operation:
            result = body(*args)
        return result, queued and torch.cuda.current_stream().record_event()
    finally:
        idle.set()


def _in_order(future: Future) -> Any:
    """The result; the current stream waits for the one that it was computed on."""
    result, finished = future.result()
    if finished:
        torch.cuda.current_stream().wait_event(finished)
    return result


def _to_the_end(body: Callable[[], Any]) -> Any:
    """A body may return the Work of an operation that it has started."""
    result = body()
    return result.wait() if isinstance(result, Work) else result


def _deliver(operation: Operation, transfer: "Transfer") -> None:
    with operation:
        transfer.wait()


def _reduce_scatter(x: torch.Tensor, group: Communicator, op: str, out: torch.Tensor | None) -> torch.Tensor:
    part = part_shape(x, group.world_size, "reduce_scatter")
    return collectives.ring_reduce_scatter.__wrapped__(x, group, op, out).view(part)


def _use(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _queued_so_far(device: torch.device) -> torch.cuda.Event | None:
    """What another thread's stream has to wait for before it reads what this one's has computed."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


class Transfer(Work):
    """Messages under way. tag: that of the collective they belong to, 0 for none."""

    def __init__(
        self, backend: CpuBackend, sends: Sequence[Message], recvs: Sequence[Message], tag: int, eager: bool
    ) -> None:
        self.backend = backend
        self._deliver_at, self._waited = 0.0, False
        self._waiter: threading.Thread | None = None
        self._error: Exception | None = None
        self._stamps: list[torch.Tensor] = []
        self._unstage: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._near = backend.direct if eager else backend.sockets if tag and sends and recvs else ()
        # Both sides know the sizes, so both skip empty tensors.
        sends = [(x.detach().contiguous(), dst) for x, dst in sends if x.numel()]
        with backend.torch_errors():
            self._works = self._post(sends, [(x.detach(), src) for x, src in recvs if x.numel()], tag)

    def _post(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> list[dist.Work]:
        pg, works, egress = self.backend.process_group, [], self.backend.world.egress
        here, ranks = self.backend.world.rank, self.backend.ranks
        for x, src in recvs:
            works.append((self._near if src in self._near else pg).recv([self._landing(x)], src, tag))
            if egress and egress.paces(ranks[src], here):
                self._stamps.append(torch.zeros(1, dtype=torch.float64))
                works.append(pg.recv([self._stamps[-1]], src, tag + STAMP))
        stamps = [egress and egress.deliver_at(here, ranks[dst], x.nbytes) for x, dst in sends]
        self._deliver_at = max([0.0, *(stamp for stamp in stamps if stamp is not None)])
        for (x, dst), stamp in zip(sends, stamps, strict=True):
            works.append((self._near if dst in self._near else pg).send([x.cpu()], dst, tag))
            if stamp is not None:
                works.append(pg.send([torch.tensor([stamp], dtype=torch.float64)], dst, tag + STAMP))
        return works

    def _landing(self, x: torch.Tensor) -> torch.Tensor:
        """Where gloo may write: x itself, or a CPU buffer that `wait` copies to the GPU."""
        if x.device.type == "cpu":
            return x
        self._unstage.append((x, torch.empty_like(x, device="cpu")))
        return self._unstage[-1][1]

    def left(self) -> bool:
        """Whether all eager sends have been handed to the system."""
        return not any(isinstance(work, sockets.Message) and work.sending and work.parts for work in self._works)

    def leave(self) -> None:
        """Return when they have been. Nothing would send the rest of a message while no call drives its connection."""
        self._arrive([work for work in self._works if isinstance(work, sockets.Message) and work.sending])

    def done(self) -> bool:
        """Whether `wait` would return at once. gloo can tell only by waiting, so another thread waits."""
        if self._waited:
            return True
        silent = [work for work in self._works if not isinstance(work, sockets.Message)]
        if silent:
            self._works = [work for work in self._works if work not in silent]
            self._waiter = threading.Thread(target=self._watch, args=[silent], name="minillm-transfer", daemon=True)
            self._waiter.start()
        if self._waiter:
            self._waiter.join(GLANCE_S)
        try:
            arrived = all(work.is_completed() for work in self._works)
        except (PeerLostError, MismatchError) as error:
            arrived, self._error = True, error
        arrived = arrived and not (self._waiter and self._waiter.is_alive())
        return arrived and (self._error is not None or time.monotonic() >= self._delivered_at())

    def wait(self) -> None:
        """Return when every message has been delivered. PeerLostError: the other side died meanwhile."""
        if self._waited:
            return
        if self._waiter:
            self._waiter.join()
        if self._error:
            raise self._error
        self._arrive(self._works)
        for x, landed in self._unstage:
            x.copy_(landed)
        late = self._delivered_at() - time.monotonic()
        if late > 0:
            time.sleep(late)
        self._waited = True

    def _watch(self, works: Sequence[dist.Work]) -> None:
        try:
            self._arrive(works)
        except (PeerLostError, WaitedTooLongError, MismatchError) as error:
            self._error = error

    def _arrive(self, works: Sequence[dist.Work]) -> None:
        for work in works:
            try:
                if isinstance(work, sockets.Message):
                    work.wait(self.backend.world.timeout)
                else:
                    with self.backend.torch_errors():
                        work.wait(self.backend.world.timeout)
            except PeerLostError as error:
                raise self.backend.lost(error) from error

    def _delivered_at(self) -> float:
        return max([self._deliver_at, *(float(stamp) for stamp in self._stamps)])
