"""NCCL's backend, and that of any other torch process group that keeps NCCL's rules: torch's own asynchronous calls.

    calling thread      launch all_reduce     compute ...      wait: "not before it is done", and on at once
    compute stream      ───────────────────── compute ──────── waits ── uses the result
    NCCL's stream       waits for the input ─ all_reduce ─────┘

Operations are launched from the calling thread, in program order, and no other thread ever touches them: ranks that
launch the same operations in the same order cannot cross. `wait` orders the current stream after an operation; the host
goes on. The flight recorder shows an operation as launched until this rank sees that it is done: when it waits, asks
or launches the next one. Nothing here synchronises with the device, so a CUDA graph can capture it.

A backend moves its bytes out of sight, so the ledger gets what the ring algorithm would send, marked as not counted.
"""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from minillm.comm.operands import all_to_all_output, check_op, checked_output, gather_output, part_shape
from minillm.comm.operation import Operation
from minillm.comm.protocol import Communicator, Message
from minillm.comm.work import Work
from minillm.measure.clock import Moment, moment
from minillm.measure.ledger import DeviceTimes, Event

_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# torch 2.13 renamed them, and the old names warn.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class NativeWork(Work):
    """Launched operations of torch. order: make the current stream wait for them; finish: what is left to do then.

    keeps: memory that must not be used for anything else before they are done.
    """

    def __init__(self, works: Sequence[Any], finish: Callable[[], Any], keeps: Any = None) -> None:
        super().__init__(self._order_and_finish, self.is_done)
        self._works, self._finish, self._keeps = works, finish, keeps
        self.device: DeviceTimes | None = None
        self._look: Callable[[], None] = lambda: None

    def launched(self, look: Callable[[], None], events: Sequence[Event]) -> None:
        """It is an operation of its own. look: called when the host has news of it; events: where waiting counts."""
        self._look, self._events = look, events

    def order(self) -> None:
        for work in self._works:
            work.wait()

    def done(self) -> bool:
        done = self.is_done()
        self._look()
        return done

    def is_done(self) -> bool:
        """Whether the device is done: `wait` returns at once in any case."""
        return all(work.is_completed() for work in self._works)

    def _order_and_finish(self) -> Any:
        before = self.device and moment()
        self.order()
        if self.device:
            self.device.waits.append((before, moment()))
        self._look()
        return self._finish()


class Queued:
    """What has been queued on the current stream, as a work of torch's."""

    def __init__(self) -> None:
        self._event = torch.cuda.current_stream().record_event()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def is_completed(self) -> bool:
        return self._event.query()


class NativeBackend:
    """process_group: on `device`; its rules are NCCL's."""

    cuts_messages = False  # torch does that itself
    launches = True

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device) -> None:
        self.process_group, self.device = process_group, device
        self.rank, self.world_size = process_group.rank(), process_group.size()
        self._on_gpu = device.type == "cuda"
        self._launched: deque[tuple[NativeWork, Operation]] = deque()  # and not yet seen to be done
        self._side: torch.cuda.Stream | None = None
        self._observer: torch.cuda.Stream | None = None

    def connect(self) -> None:
        """Messages need no connections but torch's."""

    def finish(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        self.process_group = None
        self._launched.clear()

    # How an operation is launched.

    def run(self, operation: Operation, body: Callable[[], Any], async_op: bool, own: bool = False) -> Any:
        """Launch the body's operations. own: it is a single one of those below. Any other may compute between them, so
        it gets a stream of its own where it is to overlap; its tensors are kept until it is waited for."""
        self._look()
        aside = async_op and not own and self._on_gpu
        with operation, self._stream(aside):
            begin = self._now(operation)
            result = body()
            if not isinstance(result, NativeWork):
                works = [Queued()] if self._on_gpu and not self._capturing() else []
                result = NativeWork(works, _hand_over(result, aside), keeps=body)
        self._track(operation, result, begin)
        return result if async_op else result.wait()

    def post(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int, eager: bool) -> NativeWork:
        """Sends and receives in one call, so that no order of theirs can deadlock."""
        sends = [(x.detach().contiguous(), dst) for x, dst in sends if x.numel()]
        ops = [dist.P2POp(dist.isend, x, group=self.process_group, group_peer=dst) for x, dst in sends]
        recvs = [(x.detach(), src) for x, src in recvs if x.numel()]
        ops += [dist.P2POp(dist.irecv, x, group=self.process_group, group_peer=src) for x, src in recvs]
        return NativeWork(dist.batch_isend_irecv(ops) if ops else [], lambda: None, keeps=ops)

    def deliver(self, operation: Operation, sends: Sequence[Message], recvs: Sequence[Message], eager: bool) -> Work:
        self._look()
        with operation:
            begin = self._now(operation)
            work = self.post(sends, recvs, 0, eager)
        self._track(operation, work, begin)
        return work

    @contextlib.contextmanager
    def _stream(self, aside: bool) -> Iterator[None]:
        """The stream that the body is queued on: the caller's or, `aside`, one behind it."""
        if not aside:
            yield
            return
        self._side = self._side or torch.cuda.Stream(self.device)
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield

    def _now(self, operation: Operation) -> Moment | None:
        timed = operation.event and self._on_gpu and not self._capturing()
        return moment() if timed else None

    def _track(self, operation: Operation, work: NativeWork, begin: Moment | None) -> None:
        """Note when the device is done with it, and keep it announced until that is seen."""
        if self._capturing():
            operation.complete()
            return
        if begin is not None:  # by a stream that does nothing but wait for the group's operations
            self._observer = self._observer or torch.cuda.Stream(self.device)
            with torch.cuda.stream(self._observer):
                work.order()
                work.device = operation.event.device = DeviceTimes(begin, moment())
        work.launched(self._look, () if work.device else operation.events)
        self._launched.append((work, operation))

    def _look(self) -> None:
        """Take down the announcements of what is done."""
        while self._launched and not self._capturing() and self._launched[0][0].is_done():
            self._launched.popleft()[1].complete()

    def _capturing(self) -> bool:
        return self._on_gpu and torch.cuda.is_current_stream_capturing()

    # The collectives.

    def all_reduce(self, x: torch.Tensor, group: Communicator, op: str) -> NativeWork:
        group.assume(2 * (self.world_size - 1) * x.nbytes // self.world_size)
        return self._in_place(
            x, lambda dense: dist.all_reduce(dense, _reduce_op(op, x), self.process_group, async_op=True)
        )

    def broadcast(self, x: torch.Tensor, group: Communicator, root: int) -> NativeWork:
        group.assume(0 if self.rank == (root - 1) % self.world_size else x.nbytes)
        call = lambda dense: dist.broadcast(dense, group=self.process_group, group_src=root, async_op=True)  # noqa: E731
        return self._in_place(x, call)

    def _in_place(self, x: torch.Tensor, call: Callable[[torch.Tensor], Any]) -> NativeWork:
        dense = x.detach().contiguous()

        def finish() -> torch.Tensor:
            if not x.is_contiguous():
                x.detach().copy_(dense)
            return x

        return NativeWork([call(dense)], finish, keeps=dense)

    def all_gather(self, x: torch.Tensor, group: Communicator, out: torch.Tensor | None) -> NativeWork:
        out = checked_output(gather_output(x, self.world_size, out), x, self.world_size * x.numel())
        group.assume((self.world_size - 1) * x.nbytes)
        dense = x.detach().contiguous()
        work = _ALL_GATHER(out.flatten(), dense.flatten(), self.process_group, async_op=True)
        return NativeWork([work], lambda: out, keeps=dense)

    def reduce_scatter(self, x: torch.Tensor, group: Communicator, op: str, out: torch.Tensor | None) -> NativeWork:
        part = part_shape(x, self.world_size, "reduce_scatter")
        out = x.new_empty(part) if out is None else checked_output(out, x, math.prod(part)).view(part)
        group.assume((self.world_size - 1) * out.nbytes)
        dense = x.detach().contiguous()
        work = _REDUCE_SCATTER(out, dense, _reduce_op(op, x), self.process_group, async_op=True)
        return NativeWork([work], lambda: out, keeps=dense)

    def all_to_all(
        self, x: torch.Tensor, group: Communicator, output_splits: list[int] | None, input_splits: list[int] | None
    ) -> NativeWork:
        out, dense = all_to_all_output(x, output_splits), x.detach().contiguous()
        own = len(x) // self.world_size if input_splits is None else input_splits[self.rank]
        group.assume((len(x) - own) * x[:1].nbytes)
        work = dist.all_to_all_single(out, dense, output_splits, input_splits, self.process_group, async_op=True)
        return NativeWork([work], lambda: out, keeps=dense)

    # What the host has to wait for.

    def blocking(self, call: Callable[[], Any]) -> Any:
        return call()

    def barrier(self) -> None:
        dist.barrier(self.process_group)

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, self.process_group)
        return values


def _reduce_op(op: str, x: torch.Tensor) -> dist.ReduceOp:
    check_op(op, x)
    return _OPS[op]


def _hand_over(result: Any, from_another_stream: bool) -> Callable[[], Any]:
    """What a body returned; its memory belongs to the stream that it was made on, and is used on this one."""

    def finish() -> Any:
        if from_another_stream and isinstance(result, torch.Tensor):
            result.record_stream(torch.cuda.current_stream())
        return result

    return finish
