"""The CPU's backend: minillm's own collectives, made of messages between two ranks.

A collective runs in the calling thread; asynchronous ones run one after the other in a thread of the group. Two things
carry messages. Sockets of our own, where the ranks share a machine and each of them sends and receives in every step of
a collective, as in a ring: there a send completes even if the peer never joins, and in a ring nobody gets through
alone. gloo carries the rest. One-way messages, as in a tree, stay with it, since its send completes once the peer
receives, so that a broadcast which another rank never joins is noticed. `eager` messages use sockets as well: their
sender has agreed not to notice.
"""

import functools
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from minillm.comm.backends.gloo import Transfer, gloo_errors
from minillm.comm.backends.sockets import Exchange, Sockets
from minillm.comm.collectives.all_to_all import all_to_all
from minillm.comm.collectives.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from minillm.comm.collectives.tree import tree_broadcast
from minillm.comm.collectives.two_level import hierarchical_all_reduce
from minillm.comm.operands import Communicator
from minillm.comm.operation import Messages, Operation, Shape, Splits, Work

TAGS = 1_000_000  # how many tags there are; those of an operation's messages follow from its number and text


class CpuBackend:
    """Carries out the operations of a group.

    launches: whether an operation goes on after its call.
    ranks_per_node: of an emulated topology where all-reduces are to have two levels; else 1.
    """

    launches = False

    def __init__(self, group: Communicator) -> None:
        self.group, world = group, group.world
        links = world.egress and world.egress.links
        neighbours = links.neighbours(group.ranks) if getattr(links, "two_level", False) else 1
        self.ranks_per_node = neighbours if neighbours < group.world_size else 1
        is_near = world.local_ranks.issuperset(group.ranks) and world.egress is None and group.device.type == "cpu"
        self.sockets = Sockets(group, str(group.ordinal)) if is_near else None
        self.eager_sockets: Sockets | None = None
        self._queue: ThreadPoolExecutor | None = None
        self._idle: threading.Event | None = None  # set when the last asynchronous one is over

    # The collectives. `__wrapped__` is the algorithm alone: `@collective` would make another operation of it.

    def all_reduce(self, operation: Operation, x: torch.Tensor, op: str, async_op: bool) -> Any:
        """One ring; on an emulated topology that asks for it, two levels."""
        if self.ranks_per_node > 1:
            two_levels = hierarchical_all_reduce.__wrapped__
            return self._run(operation, async_op, two_levels, x, self.group, self.ranks_per_node, op)
        return self._run(operation, async_op, ring_all_reduce.__wrapped__, x, self.group, op)

    def broadcast(self, operation: Operation, x: torch.Tensor, root: int, async_op: bool) -> Any:
        return self._run(operation, async_op, tree_broadcast.__wrapped__, x, self.group, root)

    def all_gather(self, operation: Operation, x: torch.Tensor, out: torch.Tensor | None, async_op: bool) -> Any:
        return self._run(operation, async_op, ring_all_gather.__wrapped__, x, self.group, out)

    def reduce_scatter(
        self, operation: Operation, x: torch.Tensor, part: Shape, op: str, out: torch.Tensor | None, async_op: bool
    ) -> Any:
        return self._run(operation, async_op, _reduce_scatter, x, self.group, part, op, out)

    def all_to_all(self, operation: Operation, x: torch.Tensor, splits: Splits, async_op: bool) -> Any:
        return self._run(operation, async_op, all_to_all, x, self.group, *splits)

    def run(self, operation: Operation, x: torch.Tensor, body: Callable[[], Any], async_op: bool) -> Any:
        return self._run(operation, async_op, _to_the_end, body)

    def barrier(self, operation: Operation) -> None:
        self._run(operation, False, self._barrier)

    def _barrier(self) -> None:
        with gloo_errors(self.group):
            dist.barrier(self.group.process_group)

    def gather_objects(self, operation: Operation, value: Any) -> list[Any]:
        return self._run(operation, False, self._gather_objects, value)

    def _gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.group.world_size
        with gloo_errors(self.group):
            dist.all_gather_object(values, value, self.group.process_group)
        return values

    # Which thread runs a collective, and what carries its messages.

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
            self._queue = ThreadPoolExecutor(1, f"minillm-{self.group.name}")
        idle = self._idle = threading.Event()
        device = self.group.device
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        future = self._queue.submit(_perform, operation, stream, idle, body, args)
        work = Work(future.result, future.done, operation.event)
        return work if async_op else work.wait()

    def exchange(self, operation: Operation, sends: Messages, recvs: Messages, eager: bool, async_op: bool) -> Any:
        """Messages that are part of the operation if it is running, else all of it."""
        if operation.depth:
            tag = 1 + zlib.crc32(operation.text, operation.sequence) % TAGS
            both_ways = self.sockets and sends and recvs
            work = self.sockets.exchange(sends, recvs, tag) if both_ways else Transfer(self.group, sends, recvs, tag)
            return work if async_op else work.wait()
        if eager and self.eager_sockets:
            messages = self.eager_sockets.exchange(sends, recvs, tag=0)
            if not messages.has_left():
                with operation:
                    messages.leave()
        else:
            messages = Transfer(self.group, sends, recvs, tag=0)
        work = Work(functools.partial(_deliver, operation, messages), messages.done, operation.event)
        return work if async_op else work.wait()

    def connect(self) -> None:
        if self.sockets and not self.eager_sockets:
            self.eager_sockets = Sockets(self.group, f"{self.group.ordinal}-eager")

    def finish(self) -> None:
        if self._queue is not None:
            self._queue.shutdown()

    def close(self) -> None:
        for sockets in (self.sockets, self.eager_sockets):
            if sockets:
                sockets.close()


def _perform(
    operation: Operation,
    stream: torch.cuda.Stream | None,
    idle: threading.Event,
    body: Callable[..., Any],
    args: Sequence[Any],
) -> Any:
    """In the group's thread. stream: the caller's on a GPU; work goes behind what it has queued, and ends in here."""
    try:
        with torch.cuda.stream(stream) if stream else nullcontext(), operation:
            result = body(*args)
            if stream:
                stream.synchronize()
            return result
    finally:
        idle.set()


def _to_the_end(body: Callable[[], Any]) -> Any:
    """A body may return the Work of an operation that it has started."""
    result = body()
    return result.wait() if isinstance(result, Work) else result


def _deliver(operation: Operation, messages: Exchange | Transfer) -> None:
    with operation:
        messages.wait()


def _reduce_scatter(x: torch.Tensor, group: Communicator, part: Shape, op: str, out: torch.Tensor | None) -> Any:
    return ring_reduce_scatter.__wrapped__(x, group, op, out).view(part)
