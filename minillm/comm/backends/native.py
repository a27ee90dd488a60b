"""NCCL's backend, and that of any other torch process group that keeps NCCL's rules: torch's own asynchronous calls.

    calling thread      launch all_reduce     compute ...      wait: "not before it is done", and on at once
    compute stream      ───────────────────── compute ──────── waits ── uses the result
    NCCL's stream       waits for the input ─ all_reduce ─────┘

Operations are launched from the calling thread, in program order, and no other thread ever touches them: ranks that
launch the same operations in the same order cannot cross. `wait` orders the current stream after an operation; the host
goes on. The flight recorder shows an operation as launched until this rank sees that it is done, when it waits or
asks, or until it launches the next one. Nothing here synchronises with the device, so a CUDA graph can capture it.

A backend moves its bytes out of sight, so the ledger gets what the ring algorithm would send, marked as not counted.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import P2POp, irecv, isend

from minillm.comm.operands import all_to_all_output, check_op, checked_output, dense, gather_output
from minillm.comm.operation import Messages, Operation, Shape, Splits, Work
from minillm.measure.clock import moment
from minillm.measure.ledger import DeviceTimes, Event

_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# torch 2.13 renamed them, and the old names warn.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class NativeBackend:
    """process_group: on `device`; its rules are NCCL's."""

    launches = True

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device) -> None:
        self.process_group, self.device = process_group, device
        self.rank, self.world_size = process_group.rank(), process_group.size()
        self._on_gpu = device.type == "cuda"
        self._launched: deque[Launch] = deque()  # those not yet seen to be done
        self._side: torch.cuda.Stream | None = None
        self._observer: torch.cuda.Stream | None = None

    def all_reduce(self, operation: Operation, x: torch.Tensor, op: str, async_op: bool) -> Any:
        with operation:
            check_op(op, x)
            if operation.event is not None:
                operation.record_ring_bytes(2 * (self.world_size - 1) * x.nbytes // self.world_size)
            sent = dense(x)
            handle = dist.all_reduce(sent, _OPS[op], self.process_group, async_op=True)
        return self._launch(operation, [handle], sent, x, async_op, copy_back=not x.is_contiguous())

    def broadcast(self, operation: Operation, x: torch.Tensor, root: int, async_op: bool) -> Any:
        with operation:
            if operation.event is not None:
                operation.record_ring_bytes(0 if self.rank == (root - 1) % self.world_size else x.nbytes)
            sent = dense(x)
            handle = dist.broadcast(sent, group=self.process_group, group_src=root, async_op=True)
        return self._launch(operation, [handle], sent, x, async_op, copy_back=not x.is_contiguous())

    def all_gather(self, operation: Operation, x: torch.Tensor, out: torch.Tensor | None, async_op: bool) -> Any:
        with operation:
            numel = self.world_size * x.numel()
            out = gather_output(x, self.world_size, None) if out is None else checked_output(out, x, numel)
            if operation.event is not None:
                operation.record_ring_bytes((self.world_size - 1) * x.nbytes)
            sent = dense(x)
            handle = all_gather_single(dense(out), sent, self.process_group, async_op=True)
        return self._launch(operation, [handle], (sent, out), out, async_op)

    def reduce_scatter(
        self, operation: Operation, x: torch.Tensor, part: Shape, op: str, out: torch.Tensor | None, async_op: bool
    ) -> Any:
        with operation:
            check_op(op, x)
            out = x.new_empty(part) if out is None else dense(checked_output(out, x, x.numel() // self.world_size))
            out = out if out.shape == part else out.view(part)
            if operation.event is not None:
                operation.record_ring_bytes((self.world_size - 1) * out.nbytes)
            sent = dense(x)
            handle = reduce_scatter_single(out, sent, _OPS[op], self.process_group, async_op=True)
        return self._launch(operation, [handle], (sent, out), out, async_op)

    def all_to_all(self, operation: Operation, x: torch.Tensor, splits: Splits, async_op: bool) -> Any:
        rows_from, rows_to = splits
        with operation:
            if operation.event is not None:
                stays = len(x) // self.world_size if rows_to is None else rows_to[self.rank]
                operation.record_ring_bytes((len(x) - stays) * x.nbytes // max(1, len(x)))
            out, sent = all_to_all_output(x, rows_from), dense(x)
            handle = dist.all_to_all_single(out, sent, rows_from, rows_to, self.process_group, async_op=True)
        return self._launch(operation, [handle], (sent, out), out, async_op)

    def exchange(self, operation: Operation, sends: Messages, recvs: Messages, eager: bool, async_op: bool) -> Any:
        """Sends and receives in one call, so that no order of theirs can deadlock."""
        with operation:
            pg = self.process_group
            ops = [P2POp(isend, dense(x), group=pg, group_peer=dst) for x, dst in sends if x.numel()]
            ops += [P2POp(irecv, dense(x), group=pg, group_peer=src) for x, src in recvs if x.numel()]
            handles = dist.batch_isend_irecv(ops) if ops else []
        return self._launch(operation, handles, ops, None, async_op)

    def run(self, operation: Operation, x: torch.Tensor, body: Callable[[], Any], async_op: bool) -> Any:
        """Runs `body` on the current stream; with `async_op` on a side stream, since it may compute between messages.

        Its tensors stay in memory until `wait`. It may return the Work of an operation that it has launched: waiting
        for that is part of waiting for this one.
        """
        on_side_stream = async_op and self._on_gpu
        with operation, torch.no_grad(), self._side_stream() if on_side_stream else nullcontext():
            result = body()
            if isinstance(result, NativeWork):
                handles = result.launch.handles
            else:
                handles = [Queued()] if self._on_gpu and not self._capturing() else []
        return self._launch(operation, handles, (x, body), result, async_op, on_side_stream=on_side_stream)

    def barrier(self, operation: Operation) -> None:
        with operation:
            dist.barrier(self.process_group)
        operation.record_wait()

    def gather_objects(self, operation: Operation, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        with operation:
            dist.all_gather_object(values, value, self.process_group)
        operation.record_wait()
        return values

    def finish(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        self.process_group = None
        self._launched.clear()

    # Before and after the launch of an operation.

    def _launch(
        self,
        operation: Operation,
        handles: Sequence[Any],
        tensors: Any,
        result: Any,
        async_op: bool,
        copy_back: bool = False,
        on_side_stream: bool = False,
    ) -> Any:
        launch = Launch(operation, handles, tensors, self.current_stream() if async_op else None)
        if not operation.depth:  # else it is part of an operation that is still running
            self._track(launch)
        work = NativeWork(self, launch, result, copy_back, on_side_stream)
        return work if async_op else work.finish(on_launching_stream=True)

    def _track(self, launch: "Launch") -> None:
        """Keep the operation announced until it is seen to be done, and its tensors in memory until `let_go`."""
        operation = launch.operation
        if self._on_gpu and self._capturing():
            operation.complete()
            return
        launch.event = operation.event
        if self._on_gpu and operation.begin is not None:  # a stream that does nothing but wait times its end
            self._observer = self._observer or torch.cuda.Stream(self.device)
            with torch.cuda.stream(self._observer):
                launch.order()
                operation.event.device = DeviceTimes(operation.begin, moment())
        if self._launched and self._launched[-1].is_ordered:  # its handle stayed for the recorder alone
            earlier = self._launched.pop()
            earlier.handles = ()
            if earlier.operation.ordinal != operation.ordinal:  # else this announcement has taken the place of that
                earlier.operation.complete()
        self._launched.append(launch)

    def let_go(self, launch: "Launch") -> None:
        """The stream that launched it waits for it, so memory that is freed from now on is used again only behind it.

        Handles hold memory, too. The latest one stays: the recorder shows its operation until it is seen to be done.
        """
        launch.is_ordered, launch.tensors = True, None
        if self._launched and self._launched[-1] is not launch:
            launch.handles = ()

    def retire_finished(self) -> None:
        """Withdraw the announcements of operations that the device has finished."""
        if self._on_gpu and self._capturing():
            return
        launched = self._launched
        while launched and launched[0].is_done():
            launched.popleft().operation.complete()

    def current_stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self.device) if self._on_gpu else None

    def _side_stream(self) -> AbstractContextManager:
        """Inside, work is queued on a stream that waits for what the current one has queued so far."""
        self._side = self._side or torch.cuda.Stream(self.device)
        self._side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._side)

    def _capturing(self) -> bool:
        """On a GPU: whether a CUDA graph records what is launched."""
        return torch.cuda.is_current_stream_capturing()


class Launch:
    """Calls of torch under way. handles: torch's, one for each; tensors: the memory that they use.

    stream: the one that they were launched from, None if it waits for them at once; is_ordered: it waits for them.
    event: the ledger entry, if they are an operation of their own.
    """

    def __init__(
        self, operation: Operation, handles: Sequence[Any], tensors: Any, stream: torch.cuda.Stream | None
    ) -> None:
        self.operation, self.handles, self.tensors, self.stream = operation, handles, tensors, stream
        self.event: Event | None = None
        self.is_ordered = False

    def order(self) -> None:
        """Make the current stream wait for them."""
        for handle in self.handles:
            handle.wait()

    def order_timed(self, event: Event) -> None:
        """The same; the ledger gets the time that the stream waits, or the host where there is no device."""
        clock = time.monotonic if event.device is None else moment
        start = clock()
        self.order()
        if event.device is None:
            event.waited += clock() - start
        else:
            event.device.waits.append((start, clock()))

    def is_done(self) -> bool:
        """Whether the device is done with them."""
        for handle in self.handles:  # noqa: SIM110 (a generator takes longer)
            if not handle.is_completed():
                return False
        return True


class NativeWork(Work):
    """A launch, and the result that `wait` returns.

    copy_back: the launch has worked on a contiguous copy of the result; on_side_stream: the result was made there.
    """

    def __init__(
        self, backend: NativeBackend, launch: Launch, result: Any, copy_back: bool, on_side_stream: bool
    ) -> None:
        self.launch = launch
        self._backend, self._result = backend, result
        self._copy_back, self._on_side_stream = copy_back, on_side_stream
        self._waited = False

    def done(self) -> bool:
        """Whether the device is done: `wait` returns at once in any case."""
        self._backend.retire_finished()
        return self.launch.is_done()

    def wait(self) -> Any:
        """Makes the current stream wait for the operation; the host goes on. Once the stream that launched it has
        waited, its memory is let go of: a wait on another stream does not make one on that stream needless."""
        launch, stream = self.launch, self._backend.current_stream()
        is_launching_stream = stream == launch.stream
        if not self._waited:
            return self.finish(is_launching_stream)
        if not launch.is_ordered:
            launch.order()
            if is_launching_stream:
                self._backend.let_go(launch)
        elif not is_launching_stream:
            stream.wait_stream(launch.stream)  # which has waited
        return self._result

    def finish(self, on_launching_stream: bool) -> Any:
        """The first wait. on_launching_stream: the current stream is the one that launched it."""
        launch = self.launch
        launch.order() if launch.event is None else launch.order_timed(launch.event)
        self._waited = True
        if isinstance(self._result, Work):
            self._result = self._result.wait()
        if self._copy_back:
            self._result.detach().copy_(launch.tensors)
        if self._on_side_stream and isinstance(self._result, torch.Tensor):
            self._result.record_stream(torch.cuda.current_stream())
        if on_launching_stream:
            self._backend.let_go(launch)
        self._backend.retire_finished()
        return self._result


class Queued:
    """What has been queued on the current stream, as a work of torch's."""

    def __init__(self) -> None:
        self._event = torch.cuda.current_stream().record_event()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def is_completed(self) -> bool:
        return self._event.query()
