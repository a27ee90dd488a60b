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

Not seen: operations inside C++ (a composite CUDA kernel that waits by itself, such as `sort` in some versions), memory
read past torch (`data_ptr`, ctypes), what a dtype or an alignment costs, the real duration of anything,
and gradients that go back over `.to(device)` from a GPU to the host. Triton's kernels run in its interpreter only:
without it, an engine's attention, rotation, gate and sampler compute with torch, as where triton is not installed.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch

from minillm.model import elementwise_triton
from minillm.model.kernels import triton
from minillm.model.paged import backend
from minillm.serve.sample import rows_triton
from tests.engine.node import lies, streams
from tests.engine.node.copies import HostCopy
from tests.engine.node.counting import COPIES, Call, Counting, Site, Watch, site
from tests.engine.node.graphs import Capture
from tests.engine.node.memory import Allocation, Memory
from tests.engine.node.order import Entry
from tests.engine.node.races import Access, NodeError, Races, Span, span_of
from tests.engine.node.streams import Devices

EXPECTED_WAITS = ("native.py:gather_objects", "native.py:barrier")  # documented: the host waits on any backend
LAG = 20


class ThreadState(threading.local):
    """in_factory: how many factories of Python are under way in this thread."""

    in_factory = 0


class Node(Devices, Watch):
    """count: GPUs of the node; lag: how often an event says that it is not done yet before it is."""

    def __init__(self, count: int = 8, lag: int = LAG, keeps_tensors: bool = True) -> None:
        super().__init__(count, Races())
        self.lag, self.keeps_tensors = lag, keeps_tensors
        self.memory = Memory(self.races)
        self.counting = Counting(self)
        self.target: tuple[torch.device | None, bool] | None = None  # of the `.to` under way, and its non_blocking
        self.mine = ThreadState()
        self.process_groups: list[Any] = []
        self.launched: list[Entry] = []
        self.makes_on: torch.device | None = None  # what is made without `device=`, as by torch.set_default_device
        self.stack: Any = None  # what takes the node away again, in a rank
        self._copies: list[HostCopy] = []
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

    def arrive(self, everything: bool = False) -> None:
        """The host has waited for something: copies that it is behind of have arrived."""
        done = [each for each in self._copies if everything or self.races.is_known_to_host(each.access)]
        self._copies = [each for each in self._copies if each not in done]
        with self.aside():
            for each in done:
                each.arrive()

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
                for copy in self._copies:
                    if copy.to_host and copy.host.untyped_storage()._cdata == x.untyped_storage()._cdata:
                        raise NodeError(
                            f"the host touches memory at {site()} that a copy from the device, launched at "
                            f"{copy.access.at}, has not reached: wait for an event behind the copy"
                        )

    def touched(self, x: torch.Tensor) -> None:
        """Python reads the memory of x past the dispatcher."""
        self._fill(x)

    def _check_host_write(self, x: torch.Tensor, call: Call) -> None:
        for copy in self._copies:
            if not copy.to_host and copy.host.untyped_storage()._cdata == x.untyped_storage()._cdata:
                raise NodeError(
                    f"{call.name} at {site()} writes pinned memory that a copy to the device, launched at "
                    f"{copy.access.at}, may still read: wait for an event behind the copy"
                )

    # Copies.

    def _copy(self, call: Call) -> None:
        if call.name == "_to_copy":
            (target,), source = call.outputs, call.args[0]
            here = self.device_of(source)
            to, non_blocking = self.target or (here, False)
            if to is not None:
                self.memory.add(target, to, self.current_stream(to).stream_id)
            elif here is not None and non_blocking:  # torch makes such a target pinned
                self.memory.add(target, None, 0, pinned=True)
            self._move(call, target, source, to, non_blocking)
            return
        non_blocking = bool(call.argument(2, "non_blocking", False))
        pairs = zip(*call.args[:2], strict=True) if call.name == "_foreach_copy_" else [call.args[:2]]
        for target, source in pairs:
            self._move(call, target, source, self.device_of(target), non_blocking)

    def _move(
        self, call: Call, target: torch.Tensor, source: torch.Tensor, to: torch.device | None, non_blocking: bool
    ) -> None:
        here = self.device_of(source)
        if here is None and to is None:
            return
        stream = self.current_stream(to if here is None else here).stream_id
        access = self.races.launch(stream, call.name, self._spans([source]), self._spans([target]))
        self.counting.launches[call.name] += 1
        if here is None or to is None:
            self._cross(access, source if here is None else target, here is not None, non_blocking, here or to)

    def _cross(
        self, access: Access, host: torch.Tensor, to_host: bool, non_blocking: bool, device: torch.device
    ) -> None:
        """Between host and device: without a wait only if the host's memory is pinned, and the caller asks for it."""
        allocation = self.memory.of(host)
        way = "to the host" if to_host else "to the device"
        if not non_blocking:
            self.counting.wait(f"blocking copy {way}", device)
        elif allocation is None or not allocation.pinned:
            self.counting.wait(f"copy {way} of pageable memory, which non_blocking does not help", device)
        elif self.capture is None:
            with self.aside():
                self._copies.append(HostCopy(access, host.detach(), to_host))
                if to_host:
                    host.detach().fill_(float("nan") if host.is_floating_point() else host.dtype is torch.bool or -1)

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
    """Inside, the kernels that an engine takes on every GPU look as if triton were not installed, unless it
    interprets them: the node's processor is none of a GPU."""
    with contextlib.ExitStack() as stack:
        if triton is not None and not triton.knobs.runtime.interpret:
            for module in (elementwise_triton, rows_triton):
                stack.enter_context(mock.patch.object(module, "triton", None))
            stack.enter_context(mock.patch.object(backend, "find_spec", lambda name: None))
        yield
