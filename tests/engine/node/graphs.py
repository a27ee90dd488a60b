"""CUDA graphs of a pretended node: a capture writes operations down, a replay carries them out on the same memory.

    with torch.cuda.graph(recorded): y = f(x)     nothing has run: y holds garbage, and what f wrote is as before
    recorded.replay()                             f's operations once more; y is written anew, for whatever x holds now

Memory that was there before the capture is known by its address alone, as to a GPU: NodeError if it has been freed
since. What is allocated inside belongs to the graph. A capture breaks off where CUDA's would: at a host wait, at a
question to an event or a stream, at pinned memory that is allocated, at a kernel on a stream that has not joined it or
does not join it again. For the streams a replay is one kernel, so inputs that another stream still writes are a race.
Collectives are carried out again, too. Numbers of the host that an operation was given stay as they were.

Not seen: random numbers, which a graph of CUDA draws anew; what graphs that share a pool do to each other.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tests.engine.node import streams
from tests.engine.node.counting import COPIES, Call, site, tensors_in
from tests.engine.node.memory import Allocation
from tests.engine.node.races import NodeError, Span

if TYPE_CHECKING:
    from tests.engine.node.lies import Undo
    from tests.engine.node.node import Node

Mark = tuple[int, int]  # a stream, and how many of its kernels had been captured


@dataclass(frozen=True)
class Address:
    """A tensor whose memory is not the graph's."""

    allocation: Allocation
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    at: str

    def tensor(self) -> torch.Tensor:
        storage = self.allocation.storage()
        if storage is None or storage.nbytes() < self.allocation.num_bytes:
            raise NodeError(
                f"a replay uses memory that has been freed since its capture: {list(self.shape)} {self.dtype}, "
                f"allocated at {self.allocation.at}, used at {self.at}: keep it, and copy each step's values into it"
            )
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


class Capture:
    """What is written down, by the thread and from the stream that began it. steps: what a replay does."""

    def __init__(self, node: "Node") -> None:
        self.node, self.stream, self.thread = node, node.current_stream(), threading.get_ident()
        self.steps: list[Callable[[], Any]] = []
        self.reads: dict[Span, None] = {}
        self.writes: dict[Span, None] = {}
        self._before = set(node.memory.allocations())
        self._saved: dict[Allocation, torch.Tensor] = {}  # what memory of before held
        self._own: dict[Allocation, torch.UntypedStorage] = {}
        self._kernels: Counter[int] = Counter({self.stream.stream_id: 0})  # by stream that is captured
        self._rejoined: Counter[int] = Counter()

    @property
    def is_here(self) -> bool:
        """Whether this thread's work is captured."""
        return threading.get_ident() == self.thread

    def refuse(self, what: str) -> None:
        """NodeError: CUDA does not do this in a capture."""
        if self.is_here:
            raise NodeError(f"{what} at {site()}, while a CUDA graph is captured: nothing has run yet")

    # Streams.

    def kernel(self, stream: int, name: str) -> None:
        if stream not in self._kernels:
            raise NodeError(
                f"{name} at {site()} runs on {self.node.races.name(stream)} while "
                f"{self.node.races.name(self.stream.stream_id)} is captured, which it has not waited for"
            )
        self._kernels[stream] += 1

    def mark(self, stream: int) -> Mark | None:
        """Of an event that is recorded now; None if the stream is not captured."""
        return (stream, self._kernels[stream]) if stream in self._kernels else None

    def wait(self, stream: int, mark: Mark | None) -> None:
        """The stream waits for an event."""
        if mark is None:
            if stream in self._kernels:
                self.refuse(f"{self.node.races.name(stream)} waits for work that is not captured")
            return
        self._kernels.setdefault(stream, 0)
        self._rejoined[mark[0]] = max(mark[1], self._rejoined[mark[0]])

    # Operations.

    def before(self, call: Call) -> None:
        """The call is going to run, as it would not on a GPU: what it writes is put back in the end."""
        for x in call.writes:
            allocation = self.node.memory.of(x)
            if allocation in self._before and allocation not in self._saved:
                self._saved[allocation] = _bytes(x.untyped_storage()).clone()

    def add(self, call: Call) -> None:
        """The call has run."""
        if not (call.launches or call.name in COPIES):
            return
        written = {x.untyped_storage()._cdata for x in call.writes}
        args, kwargs = self._kept(call.args), self._kept(call.kwargs)
        made = [x.untyped_storage()._cdata not in written for x in call.outputs]
        outputs = [self._kept(x) for x, is_new in zip(call.outputs, made, strict=True) if is_new]
        self._touch(call.reads, call.writes)
        func = call.func  # not the call, which holds its tensors

        def again() -> None:
            result = list(tensors_in(func(*_tensors(args), **_tensors(kwargs))))
            values = [x for x, is_new in zip(result, made, strict=True) if is_new]
            for x, value in zip(outputs, values, strict=True):
                _tensors(x).copy_(value)

        self.steps.append(again)

    def made(self, x: torch.Tensor) -> None:
        """A factory has made x with these values."""
        with self.node.aside():
            value, kept = x.detach().clone(), self._kept(x)
        self.steps.append(lambda: _tensors(kept).copy_(value))

    def collective(self, launch: Callable[[Any, Any], Any], inputs: Sequence, outputs: Sequence) -> None:
        """launch(inputs, outputs) returns a work."""
        with self.node.aside():
            self.before(Call(None, "", (), {}, [], list(outputs), False))
            kept = self._kept(list(inputs)), self._kept(list(outputs))
        self._touch(inputs, outputs)

        def again() -> None:
            handle = launch(*_tensors(kept))
            handle.wait()
            handle.work.fill()

        self.steps.append(again)

    def end(self) -> None:
        """NodeError if a stream has kernels that nobody waits for."""
        for stream, count in self._kernels.items():
            if stream != self.stream.stream_id and self._rejoined[stream] < count:
                self.refuse(f"nothing waits for {self.node.races.name(stream)} before the end")
        self.restore()
        with self.node.aside():
            for storage in self._own.values():
                _bytes(storage).fill_(255)  # not a number; -1

    def restore(self) -> None:
        with self.node.aside(), torch.inference_mode():
            for allocation, value in self._saved.items():
                if (storage := allocation.storage()) is not None:
                    _bytes(storage).copy_(value)

    def replay(self) -> None:
        node = self.node
        for allocation, _, _ in (*self.reads, *self.writes):
            if allocation.pending is not None:
                allocation.pending.fill()
        node.races.launch(node.current_stream().stream_id, "the replay of a graph", self.reads, self.writes)
        node.counting.launches["replay"] += 1
        with node.aside(), torch.inference_mode():
            for step in self.steps:
                step()

    def _touch(self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        for tensors, spans in ((reads, self.reads), (writes, self.writes)):
            spans |= dict.fromkeys(self.node._spans(tensors))

    def _kept(self, values: Any) -> Any:
        """The same, with an `Address` for each tensor that was there before and a copy of each number of the host."""
        if isinstance(values, torch.Tensor):
            return self._kept_tensor(values)
        if isinstance(values, dict):
            return {name: self._kept(value) for name, value in values.items()}
        return type(values)(map(self._kept, values)) if type(values) in (list, tuple) else values

    def _kept_tensor(self, x: torch.Tensor) -> Any:
        allocation = self.node.memory.of(x)
        if allocation is None or (allocation.device is None and not allocation.pinned):
            return x.detach().clone()
        if allocation in self._before:
            return Address(allocation, x.storage_offset(), tuple(x.shape), x.stride(), x.dtype, str(site()))
        self._own[allocation] = x.untyped_storage()
        return x


def _tensors(values: Any) -> Any:
    if isinstance(values, Address):
        return values.tensor()
    if isinstance(values, dict):
        return {name: _tensors(value) for name, value in values.items()}
    return type(values)(map(_tensors, values)) if type(values) in (list, tuple) else values


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class CUDAGraph:
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._capture: Capture | None = None
        self._pool: Any = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        node = streams.NODE
        if node.races.capture is not None:
            node.races.capture.refuse("another capture begins")
        if node.current_stream() == node.default_stream():
            raise NodeError("the default stream cannot be captured: capture on a stream of its own")
        self._pool, node.races.capture = pool or graph_pool_handle(), Capture(node)

    def capture_end(self) -> None:
        node = streams.NODE
        capture, node.races.capture = node.races.capture, None
        capture.end()
        self._capture = capture

    def replay(self) -> None:
        if self._capture is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self._capture.replay()

    def reset(self) -> None:
        self._capture = None

    def pool(self) -> Any:
        return self._pool


def graph_pool_handle() -> object:
    return object()


@contextlib.contextmanager
def graph(
    cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """Stands for torch.cuda.graph."""
    torch.cuda.synchronize()
    with torch.cuda.stream(stream or streams.Stream(name="the stream of a capture")):
        cuda_graph.capture_begin(pool, capture_error_mode)
        try:
            yield
        except BaseException:
            capture, streams.NODE.races.capture = streams.NODE.races.capture, None
            capture.restore()
            raise
        cuda_graph.capture_end()


def tell(node: "Node", undo: "Undo") -> None:
    for name, value in (("CUDAGraph", CUDAGraph), ("graph", graph), ("graph_pool_handle", graph_pool_handle)):
        undo.set(torch.cuda, name, value)

    def is_current_stream_capturing() -> bool:
        capture = node.races.capture
        return capture is not None and capture.is_here and capture.mark(node.current_stream().stream_id) is not None

    undo.set(torch.cuda, "is_current_stream_capturing", is_current_stream_capturing)
