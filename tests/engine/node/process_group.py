"""The process group "nccl" of a pretended node: the rules of `tests.engine.comm.nccl_like`, and streams.

    calling thread    launch ───── compute (on the current stream) ───── wait: that stream waits, the host goes on
    its own stream    waits for the current stream ── all_reduce ──┘

A communicator has a stream of its own, which the sanitizer knows; a worker thread carries the operation out over gloo.
The result is put in place when a kernel touches it. Tensors have to be on this rank's device. Like NCCL's in torch, a
work keeps its tensors until it is waited for, its outputs as long as itself; with `keeps_tensors=False` the caller has
to keep them, as with a backend that leaves that to it.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tests.engine.comm import nccl_like
from tests.engine.comm.nccl_like import NcclLike, RuleBroken, Work
from tests.engine.node import streams
from tests.engine.node.counting import Site, site
from tests.engine.node.memory import Allocation
from tests.engine.node.order import Entry
from tests.engine.node.races import span_of

if TYPE_CHECKING:
    from tests.engine.node.lies import Undo
    from tests.engine.node.node import Node

DEVICE_THREAD = "device"  # name of the worker threads


@dataclass
class Use:
    """What a work has used: allocations, which hold no memory. waited: whether a stream has waited for it."""

    text: str
    allocations: list[Allocation]
    waited: bool = False


class NodeWork(Work):
    """What the worker thread carries out. It holds no memory of the program: where the outputs go is written down.

    at: the line that launched it.
    """

    def __init__(self, group: "NodeGroup", text: str, inputs: Sequence, outputs: Sequence, run: Callable) -> None:
        node = streams.NODE
        node._fill(*inputs, *outputs)
        with node.aside():
            super().__init__(group, text, inputs, outputs, run)
        self._inputs, self._outputs, self._before = [], [], []
        self.at: Site = site()
        self._lock, self._is_filled = threading.Lock(), False
        spans = [[(node.memory.of(x), span_of(node.memory.of(x), x)) for x in each] for each in (inputs, outputs)]
        reads, writes = ([span for _, span in each if span] for each in spans)
        group.stream.wait_event(node.current_stream().record_event())
        node.races.launch(group.stream.stream_id, f"{text} of {group.label}", reads, writes)
        node.counting.launches[text.partition(" ")[0]] += 1
        self.end = group.stream.record_event()
        self.use = Use(text, [allocation for each in spans for allocation, _ in each])
        self._targets = []
        for x, (allocation, _) in zip(outputs, spans[1], strict=True):
            allocation.pending = self
            self._targets.append((allocation.storage, x.storage_offset(), x.shape, x.stride(), x.dtype))

    def fill(self) -> None:
        """Put the result in place: somebody is going to touch it. The sanitizer looks whether they may."""
        with self._lock:
            if self._is_filled:
                return
            self._is_filled = True
            for allocation in self.use.allocations:
                if allocation.pending is self:
                    allocation.pending = None
            self.settle()
            with streams.NODE.aside(), torch.no_grad():
                for (storage, offset, shape, stride, dtype), value in zip(self._targets, self._values, strict=True):
                    if (alive := storage()) is not None and alive.nbytes():
                        target = torch.empty(0, dtype=dtype).set_(alive, offset, shape, stride)
                        target.copy_(value.view(shape))

    def settle(self) -> None:
        """RuleBroken if the operation has broken a rule or does not come to an end."""
        error = self._error
        if not self._finished.wait(2 * nccl_like.TIMEOUT.total_seconds()):
            error = RuleBroken(f"{self.text} never came to an end on rank {self._group.rank()}")
        if error := error or self._error:
            raise RuleBroken(f"{error} (launched at {self.at}){self._group.stuck()}")


class Handle(dist.Work):
    """What the program gets, and waits for. It keeps the inputs until then and the outputs as long as itself."""

    def __init__(self, work: NodeWork, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.work = work
        with streams.NODE.aside():  # no kernel touches the result here, which would have to be there
            self.inputs, self.outputs = ([x.detach() for x in each] for each in (inputs, outputs))

    def wait(self, timeout: timedelta = nccl_like.TIMEOUT) -> bool:
        """The current stream waits; the host goes on."""
        self.work._group.check_thread(f"the wait for {self.work.text}")
        self.work.end.wait()
        self.work.waited = self.work.use.waited = True
        self.inputs = []
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.work.end.query()


class NodeGroup(NcclLike):
    """Stands for ProcessGroupNCCL. works: not waited for, or not carried out yet; recent: what the last ones used."""

    class Options:
        """What torch fills in."""

    supports_splitting = False

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        super().__init__(store, rank, size, options._timeout)
        node = streams.NODE
        self._ranks, self.label = list(options.global_ranks_in_group), str(options.group_name)
        self.label = f"communicator {self.label} of ranks {self._ranks or 'all'}"
        self.stream = streams.Stream(name=f"NCCL's stream of {self.label}")
        self.recent: deque[Use] = deque(maxlen=200)
        self._messages: tuple[list[int], list[int]] = [], []  # peers of the batch that is being launched
        node.process_groups.append(self)

    def _set_sequence_number_for_group(self) -> None: ...

    def _set_default_timeout(self, timeout: timedelta) -> None: ...

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda")]

    def getBackendName(self) -> str:
        return "nccl"

    def _launch(self, stream: nccl_like.Stream, text: str, inputs: Any, outputs: Any, run: Callable) -> Work:
        node = streams.NODE
        for x in (*inputs, *outputs):
            if (device := node.device_of(x)) != node.device(None):
                raise RuleBroken(
                    f"{text} at {site()} is given a tensor on {device or 'cpu'}: NCCL takes tensors of this rank's "
                    f"{node.device(None)}"
                )
        self.check_thread(text)
        messages = self._messages
        if node.capture is not None:
            node.capture.collective(partial(self._again, stream, text, run, messages), inputs, outputs)
        work = NodeWork(self, text, inputs, outputs, run)
        if node.capture is None:
            node.launched.append(Entry(self.label, self.members, text, str(work.at), *messages))
        self.works = [*(each for each in self.works if not (each.waited and each.is_completed())), work]
        stream.add(work)
        self.recent.append(work.use)
        kept = (inputs, outputs) if node.keeps_tensors else ([], [])
        return Handle(work, *kept)

    def _again(self, stream: nccl_like.Stream, text: str, run: Callable, messages: Any, *tensors: Any) -> Work:
        """Launch it as a graph does that has captured it."""
        before, self._messages = self._messages, messages
        try:
            return self._launch(stream, text, *tensors, run)
        finally:
            self._messages = before

    def batch(self, ops: Sequence[dist.P2POp]) -> list[Work]:
        peers = {
            kind: [self.members[op.group_peer] for op in ops if op.op is kind] for kind in (dist.isend, dist.irecv)
        }
        self._messages = peers[dist.isend], peers[dist.irecv]
        try:
            return super().batch(ops)
        finally:
            self._messages = [], []

    def _alone(self, text: str, x: torch.Tensor, peer: int, sending: bool) -> Work:
        other = [self.members[peer]]
        self._messages = (other, []) if sending else ([], other)
        try:
            return super()._alone(text, x, peer, sending)
        finally:
            self._messages = [], []

    def settle(self) -> None:
        """RuleBroken if an operation that nobody has touched the result of has broken a rule."""
        for work in self.works:
            work.settle()

    def barrier(self, opts: Any = None) -> Work:
        """torch holds up the host."""
        work = super().barrier(opts)
        streams.NODE.counting.wait("barrier", streams.NODE.device(None))
        work.work.fill()
        return work

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(self._ranks or range(self.size()))

    def stuck(self) -> str:
        """What the order of launches has to do with an operation that never came to an end. See launching.py."""
        return ""


def tell(node: "Node", undo: "Undo") -> None:
    """torch.distributed has NCCL, and it is this."""
    c10d = dist.distributed_c10d
    undo.set(c10d, "ProcessGroupNCCL", NodeGroup)
    undo.set(c10d, "_NCCL_AVAILABLE", True)
    undo.set(c10d, "default_pg_nccl_timeout", timedelta(minutes=10))
    batched = dist.batch_isend_irecv

    def batch_isend_irecv(ops: list[dist.P2POp]) -> list:
        return ops[0].group.batch(ops) if isinstance(ops[0].group, NcclLike) else batched(ops)

    undo.set(dist, "batch_isend_irecv", batch_isend_irecv)
    undo.set(c10d, "batch_isend_irecv", batch_isend_irecv)
