"""Streams, events and devices as `torch.cuda` has them, pretended: they keep the clocks of `races.py`.

Kernels run when they are launched, so values are right; but nobody can tell: an event or a stream says that it is
done only when the host has waited for it, or after `lag` questions: a device far behind its host, which catches up.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from tests.engine.node.races import Races

if TYPE_CHECKING:
    from tests.engine.node.node import Node

NODE: "Node | None" = None  # of this process, while one is installed


class Stream:
    """Stands for torch.cuda.Stream."""

    _ids = itertools.count(1)

    def __init__(self, device: Any = None, priority: int = 0, name: str = "", **_: Any) -> None:
        self.device = NODE.device(device)
        self.stream_id = self.cuda_stream = next(Stream._ids)
        self.device_index, self.priority = self.device.index, priority
        self._asked = 0
        NODE.races.names[self.stream_id] = name or f"side stream {self.stream_id} of {self.device}"
        NODE.races._handle_stream_creation(self.stream_id)

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        _refuse_in_capture("Stream.query")
        self._asked += 1
        return self._asked > NODE.lag

    def is_capturing(self) -> bool:
        return NODE.races.capture is not None and NODE.races.capture.mark(self.stream_id) is not None

    def synchronize(self) -> None:
        NODE.counting.wait("Stream.synchronize", self.device)
        self.reach()

    def reach(self) -> None:
        """The host is behind all that this stream has got so far."""
        NODE.races._handle_stream_synchronization(self.stream_id)
        NODE.arrive()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __repr__(self) -> str:
        return f"<pretended {NODE.races.name(self.stream_id)}>"


class Event:
    """Stands for torch.cuda.Event."""

    _ids = itertools.count(1)

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any):
        self._id, self._enable_timing = next(Event._ids), enable_timing
        self._at: float | None = None
        self._device = NODE.device(None)
        self._asked, self._is_reached = 0, False
        self._mark: tuple[int, int] | None = None  # if it was recorded while its stream was captured
        NODE.races._handle_event_creation(self._id)

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or NODE.current_stream()
        self._at, self._device, self._asked, self._is_reached = time.monotonic(), stream.device, 0, False
        capture = NODE.races.capture
        self._mark = None if capture is None else capture.mark(stream.stream_id)
        NODE.races._handle_event_record(self._id, stream.stream_id)

    def wait(self, stream: Stream | None = None) -> None:
        stream = stream or NODE.current_stream()
        if NODE.races.capture is not None:
            NODE.races.capture.wait(stream.stream_id, self._mark)
        NODE.races._handle_event_wait(self._id, stream.stream_id)

    def query(self) -> bool:
        _refuse_in_capture("Event.query")
        self._asked += 1
        return self._at is None or self._is_reached or self._asked > NODE.lag

    def synchronize(self) -> None:
        if not self._is_reached:
            NODE.counting.wait("Event.synchronize", self._device)
        self._is_reached = True
        NODE.races._handle_event_synchronization(self._id)
        NODE.arrive()

    def elapsed_time(self, later: "Event") -> float:
        if not (self._enable_timing and later._enable_timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        return 1e3 * (later._at - self._at)


def _refuse_in_capture(what: str) -> None:
    if NODE.races.capture is not None:
        NODE.races.capture.refuse(what)


class Current(threading.local):
    """Of one thread: it starts at GPU 0 and on default streams, wherever the thread that started it is."""

    def __init__(self) -> None:
        self.index = 0
        self.streams: dict[int, Stream] = {}


class Devices:
    """Which device and which stream of it are current in a thread. Part of `Node`."""

    def __init__(self, count: int, races: Races) -> None:
        self.count, self.races, self.current = count, races, Current()
        self._default: dict[int, Stream] = {}

    @property
    def index(self) -> int:
        return self.current.index

    @index.setter
    def index(self, index: int) -> None:
        self.current.index = index

    def device(self, device: Any) -> torch.device:
        """With an index. ValueError for a device that is not on this node."""
        if isinstance(device, int):
            device = torch.device("cuda", device)
        device = torch.device("cuda", self.index) if device is None else torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {device}")
        device = torch.device("cuda", self.index if device.index is None else device.index)
        if device.index >= self.count:
            raise RuntimeError(f"CUDA error: invalid device ordinal {device.index}, this node has {self.count}")
        return device

    def set_device(self, device: Any) -> None:
        self.index = self.device(device).index

    def default_stream(self, device: Any = None) -> Stream:
        index = self.device(device).index
        if index not in self._default:
            self._default[index] = Stream(index, name=f"the default stream of cuda:{index}")
        return self._default[index]

    def current_stream(self, device: Any = None) -> Stream:
        return self.current.streams.get(self.device(device).index) or self.default_stream(device)

    def set_stream(self, stream: Stream) -> None:
        self.current.streams[stream.device.index] = stream
        self.index = stream.device.index

    @contextlib.contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        index, before = self.index, self.current_stream(stream.device)
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)
            self.index = index

    @contextlib.contextmanager
    def on_device(self, device: Any) -> Iterator[None]:
        before = self.index
        if device is not None and not (isinstance(device, int) and device < 0):
            self.set_device(device)
        try:
            yield
        finally:
            self.index = before
