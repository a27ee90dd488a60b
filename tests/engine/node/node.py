"""A node with eight GPUs, pretended on the CPU, with real values: each rank is a process that believes it has a GPU.

    launch(on_node(program), 4)        program(group): group.device is cuda:rank, its backend NCCL
    with pretend_node() as node: ...   in this process, without other ranks

Tensors lie in the CPU's memory, so numbers come out as on the CPU. What makes it a node:

    lies.py           tensors say that they are on cuda:i, and `torch.cuda` that it has eight devices
    counting.py       every aten operation passes a dispatch mode: launches and host waits are counted there
    streams.py        streams and events keep clocks; races.py finds accesses that these do not order
    graphs.py         CUDA graphs: a capture writes operations down, a replay carries them out
    memory.py         a freed block is the next allocation's of its stream
    process_group.py  the process group "nccl": a stream and a worker thread for each communicator

`NodeError` or `RuleBroken` names what a real node would punish, and the line: tensors of two devices in one operation;
a host wait inside `node.without_waits()`; a race between streams; memory freed while another stream uses it; a buffer
of the host that changes under a copy, or is read before it is there; a collective on tensors of the CPU; communicators
used in orders that cannot all be kept (`order.py`); buffers that the backend keeps behind their wait (`check_buffers`).

Not seen:

- inside C++: a kernel that waits by itself (`sort` in some versions), an operation that is several kernels; torch's own
  DDP, FSDP2 and DTensor, whose C++ takes tensors for the CPU's, which they are. A tensor that a formula of autograd
  makes is on the device of what it first meets;
- gradients that go back over `.to(device)` from a GPU to the host;
- memory read past torch (`data_ptr`, ctypes, DLPack); of pinned memory only that it has changed when its copy ends;
- what kernels compute: they are the CPU's, so a dtype, shape or alignment that CUDA lacks passes (but for masks of
  attention), and sums are added up in the CPU's order; a GPU's generator draws what the host's of the same seed draws;
- Triton: its kernels run in its interpreter only. Without it minillm computes with torch, as where triton is not
  installed; and nothing is compiled for a GPU;
- time: kernels run when they are launched, one after the other. A race is found by the clocks of the streams and never
  changes a number; nothing says how long a kernel, a copy or a wait takes;
- where a pickled tensor comes out: what a rank returns or hands to `gather_objects` is on the CPU here, there on a GPU
  that the other process may not see;
- room: no allocation fails, nothing is fragmented, a free block is the next allocation's whatever its size;
- what lies between GPUs: links, their order in the node, NCCL's memory and faults (`tests/engine/comm/nccl_like.py`).
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch

from minillm.model import elementwise_triton, kernels
from minillm.model.kernels import triton
from minillm.model.paged import backend
from minillm.quantize import triton as products_triton
from minillm.serve.sample import rows_triton
from tests.engine.node import lies, streams
from tests.engine.node.copies import Copies
from tests.engine.node.counting import COPIES, Call, Counting, Site, Watch, site
from tests.engine.node.graphs import Capture
from tests.engine.node.memory import Allocation, Memory
from tests.engine.node.order import Entry
from tests.engine.node.races import NodeError, Races, Span, span_of
from tests.engine.node.streams import Devices

EXPECTED_WAITS = ("native.py:gather_objects", "native.py:barrier")  # documented: the host waits on any backend
LAG = 20


class ThreadState(threading.local):
    """in_factory: how many factories of Python are under way in this thread; target: device and non_blocking of its
    `.to`, if one is."""

    in_factory = 0
    target: tuple[torch.device | None, bool] | None = None


class Node(Devices, Copies, Watch):
    """count: GPUs of the node; lag: how often an event says that it is not done yet before it is."""

    def __init__(self, count: int = 8, lag: int = LAG, keeps_tensors: bool = True) -> None:
        Devices.__init__(self, count, Races())
        Copies.__init__(self)
        self.lag, self.keeps_tensors = lag, keeps_tensors
        self.memory = Memory(self.races)
        self.counting = Counting(self)
        self.mine = ThreadState()
        self.process_groups: list[Any] = []
        self.launched: list[Entry] = []
        self.makes_on: torch.device | None = None  # what is made without `device=`, as by torch.set_default_device
        self.stack: Any = None  # what takes the node away again, in a rank
        self._allowed: tuple[str, ...] | None = None

    # What programs are held to.

    @contextlib.contextmanager
    def without_waits(self, *allowed: str) -> Iterator[None]:
        """Inside, a host wait is an error, unless a caller "file.py:function" of it is in `allowed`."""
        before, self._allowed = self._allowed, (*EXPECTED_WAITS, *allowed)
        try:
            yield
        finally:
            self._allowed = before

    def finish(self) -> None:
        """At the end of a program: nothing is left that is wrong."""
        self.races._handle_device_synchronization()
        self.arrive(everything=True)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, operations are the node's own: nobody counts or checks them."""
        before, self.counting.paused = self.counting.paused, True
        try:
            yield
        finally:
            self.counting.paused = before

    @property
    def capture(self) -> Capture | None:
        """What this thread's operations are recorded in."""
        capture = self.races.capture
        return capture if capture is not None and capture.is_here else None

    # Devices of tensors.

    def device_of(self, x: torch.Tensor) -> torch.device | None:
        found = self.memory.of(x)
        return None if found is None else found.device

    def on_device_memory(self, x: torch.Tensor, device: torch.device, name: str = "") -> torch.Tensor:
        """x, which has just been made, lies on the device from now on. name: of the kernel that has written it."""
        stream = self.current_stream(device).stream_id
        allocation = self.memory.add(x, device, stream)
        if name and (span := span_of(allocation, x)):
            self.races.launch(stream, name, (), [span])
            self.counting.launches[name] += 1
        if self.capture is not None:
            self.capture.made(x)
        return x

    # `Watch`: called around each operation.

    def before(self, call: Call) -> None:
        self._fill(*call.reads, *call.writes)
        if self.capture is not None:
            self.capture.before(call)
        for x in call.writes if not call.is_view else ():
            self._check_host_write(x, call)
        if call.name in COPIES:
            return
        on = {x: self.device_of(x) for x in (*call.writes, *call.reads)}
        devices = {device for device in on.values() if device is not None}
        if not devices:
            return
        self.check_generator(call.kwargs.get("generator"), min(devices, key=str), call.name)
        for x in [x for x, device in on.items() if device is None and self._is_from_cpp(x)]:
            on[x] = self.on_device_memory(x, min(devices, key=str)).device
        host = [x for x, device in on.items() if device is None and x.dim() and not call.is_view]
        if call.name.startswith(("index", "_index_put", "_unsafe_index")) and len(devices) == 1:
            indices = list(tensors_of(call.argument(1, "indices")))
            if host and all(any(x is each for each in indices) for x in host):
                self.counting.wait(f"{call.name} with indices of the CPU, which are copied first", devices.pop())
                return
        if len(devices) > 1 or host or any(self.device_of(x) is None for x in call.writes):
            places = ", ".join(f"{list(x.shape)} on {device or 'cpu'}" for x, device in on.items())
            raise NodeError(f"tensors of two devices in {call.name} at {site()}: {places}")
        if call.name.startswith("_scaled_dot_product") and not is_readable(call.kwargs.get("attn_mask")):
            raise NodeError(f"misaligned address: {call.name} at {site()} reads a mask that begins amid 16 bytes")

    def check_generator(self, generator: torch.Generator | None, device: torch.device, name: str) -> None:
        """RuntimeError as torch's, if the host's generator draws for a GPU: not in a program for the CPU that the node
        has given another default device."""
        if generator is not None and self.makes_on is None and generator.device.type != device.type:
            found = f"Expected a '{device.type}' device type for generator but found '{generator.device.type}'"
            raise RuntimeError(f"{found}, in {name} at {site()}")

    def after(self, call: Call, device: torch.device | None) -> None:
        if call.name in COPIES:
            self._copy(call)
        else:
            self._launched(call, device)
        if self.capture is not None and any(self.device_of(x) for x in (*call.reads, *call.writes, *call.outputs)):
            self.capture.add(call)

    def _launched(self, call: Call, device: torch.device | None) -> None:
        """Any operation but a copy."""
        if device is None:
            if not (call.reads or call.writes or self.mine.in_factory):
                for x in call.outputs:
                    self.memory.add(x, None, 0).is_from_cpp = True
            return
        stream = self.current_stream(device).stream_id
        for x in call.outputs:
            if self.memory.of(x) is None and x.device.type == "cpu" and call.name not in ("_local_scalar_dense",):
                self.memory.add(x, device, stream)
        if call.launches:
            reads, outputs = self._spans(call.reads), self._spans((*call.writes, *call.outputs))
            self.races.launch(stream, call.name, reads, outputs)

    def host_waits(self, kind: str, device: torch.device, at: Site) -> None:
        if self.capture is not None:
            self.capture.refuse(f"the host waits for {device}: {kind}")
        self.current_stream(device).reach()
        if self._allowed is not None and not at.is_within(self._allowed):
            raise NodeError(f"the host waits for {device}: {kind} at {at}")

    def _spans(self, tensors: Iterable[torch.Tensor]) -> list[Span]:
        found = []
        for x in tensors:
            allocation = self.memory.of(x)
            if allocation is not None and allocation.device is not None and (span := span_of(allocation, x)):
                found.append(span)
        return found

    def _is_from_cpp(self, x: torch.Tensor) -> bool:
        """Whether C++ has made x and nothing else has used it: a formula of autograd, which means its own device."""
        allocation = self.memory.of(x)
        return allocation is not None and allocation.is_from_cpp

    def _fill(self, *tensors: torch.Tensor) -> None:
        """Results of collectives are put in place when somebody touches them. NodeError for a read of a host's copy
        that has not arrived."""
        for x in tensors:
            allocation = self.memory.of(x)
            if allocation is None:
                continue
            if allocation.pending is not None:
                allocation.pending.fill()
            if allocation.device is None:
                self._check_host_read(x)

    def touched(self, x: torch.Tensor) -> None:
        """Python reads the memory of x past the dispatcher."""
        self._fill(x)

    def pinned(self, x: torch.Tensor) -> Allocation:
        return self.memory.add(x, None, 0, pinned=True)


def tensors_of(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for each in values:
            yield from tensors_of(each)


@contextlib.contextmanager
def pretend_node(**how: Any) -> Iterator[Node]:
    """This process sees a node; `how`: of Node."""
    if streams.NODE is not None:
        raise ValueError("this process is on a pretended node already")
    node = streams.NODE = Node(**how)
    undo = lies.tell(node)
    try:
        with _no_triton_without_interpreter(), node.counting:
            yield node
            node.finish()
    finally:
        undo()
        streams.NODE = None


@contextlib.contextmanager
def _no_triton_without_interpreter() -> Iterator[None]:
    """Inside, minillm looks as if triton were not installed, unless it interprets kernels: the node's processor is none
    of a GPU."""
    with contextlib.ExitStack() as stack:
        if triton is not None and not triton.knobs.runtime.interpret:
            for module in (kernels, elementwise_triton, products_triton, rows_triton):
                stack.enter_context(mock.patch.object(module, "triton", None))
            stack.enter_context(mock.patch.object(backend, "find_spec", lambda name: None))
        yield


def is_readable(mask: torch.Tensor | None) -> bool:
    """Whether torch's attention on a GPU can read a mask: it does so 16 bytes at once, and copies masks beforehand of
    which a stride is no multiple of 16, but not those that only begin in a wrong place."""
    if mask is None or mask.stride(-1) != 1 or any(stride % 16 for stride in mask.stride()[:-1]):
        return True
    return mask.storage_offset() * mask.element_size() % 16 == 0
