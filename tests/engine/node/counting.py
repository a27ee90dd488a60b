"""A dispatch mode that sees every aten operation of a thread: what it launches, and where the host waits for a device.

    with Counting(watch=Watch()) as counting:
        step()
    counting.launches        Counter: name -> kernels (views and `empty` launch none)
    counting.waits           [Wait(kind, site)]: the line of ours that made the host wait

It needs a `Watch`, which says on which device a tensor is. `Watch` itself believes `tensor.device`, so on a plain CPU
every operation counts as a launch there; the pretend node of `node.py` has another one, which knows about devices that
are only pretended. The mode is active in backward as well, which runs in the calling thread on a CPU; it counts an
operation as one launch even where CUDA needs several kernels.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_TORCH = str(Path(torch.__file__).parent)
_HERE = Path(__file__).parent
_OF_THE_NODE = (
    "counting",
    "memory",
    "races",
    "streams",
    "graphs",
    "copies",
    "node",
    "lies",
    "process_group",
    "launching",
)
_OURS = {str(_HERE / f"{name}.py") for name in _OF_THE_NODE} | {str(_HERE.parent / "comm" / "nccl_like.py")}
# Reads of values by the host: on a GPU each of them waits for all that its stream has queued.
HOST_READS = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "argwhere", "masked_select", "bincount"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "multinomial", "histc"),
}
COPIES = {"copy_", "_to_copy", "_foreach_copy_"}
LAUNCH_NOTHING = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh"),
    *("_unsafe_view", "set_", "resize_", "record_stream", "is_pinned", "_local_scalar_dense", "is_same_size"),
}


@dataclass(frozen=True)
class Site:
    """The innermost line that is neither torch's nor the node's. callers: "file.py:function", innermost first."""

    line: str
    callers: tuple[str, ...]

    def is_within(self, allowed: Iterator[str]) -> bool:
        return any(caller in self.callers for caller in allowed)

    def __str__(self) -> str:
        return self.line


@lru_cache(None)
def _shown(file: str) -> str:
    """The file's name; "" for one of torch's or of the node's."""
    return "" if file in _OURS or file.startswith((_TORCH, "<")) else file.rpartition("/")[2]


def site(most_callers: int = 0) -> Site:
    """Of the calling line; where that is inside minillm.comm, also of the line that called into it."""
    frame, lines, callers, is_open = sys._getframe(1), [], [], True
    while frame is not None and (is_open or len(callers) < most_callers):
        code = frame.f_code
        if shown := _shown(file := code.co_filename):
            callers.append(f"{shown}:{code.co_name}")
            if is_open and not (lines and "/minillm/comm/" in file):
                lines.append(f"{'/'.join(file.split('/')[-3:])}:{frame.f_lineno} in {code.co_name}")
                is_open = len(lines) == 1 and "comm/" in lines[0]
        frame = frame.f_back
    return Site(", for ".join(lines) or "unknown", tuple(callers))


@dataclass(frozen=True)
class Wait:
    """The host waited for a device. kind: because of what."""

    kind: str
    site: Site

    def __str__(self) -> str:
        return f"{self.kind} at {self.site}"


@dataclass
class Call:
    """One aten operation, `func`. reads, writes: tensors it takes; outputs: those it returns; is_view: it touches no
    value."""

    func: Any
    name: str
    args: tuple
    kwargs: dict[str, Any]
    reads: list[torch.Tensor]
    writes: list[torch.Tensor]
    is_view: bool
    outputs: list[torch.Tensor] = field(default_factory=list)

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    @property
    def launches(self) -> bool:
        return not self.is_view and self.name not in LAUNCH_NOTHING


class Watch:
    """What `Counting` asks about devices, and tells about calls. A device of None is the host."""

    def device_of(self, x: torch.Tensor) -> torch.device | None:
        return x.device

    def before(self, call: Call) -> None: ...

    def after(self, call: Call, device: torch.device | None) -> None: ...

    def host_waits(self, kind: str, device: torch.device, at: Site) -> None: ...


class _ThreadState(threading.local):
    paused = False


class Counting(TorchDispatchMode):
    """See above."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch, self._mine = watch, _ThreadState()
        self.launches: Counter[str] = Counter()
        self.waits: list[Wait] = []

    @property
    def paused(self) -> bool:
        """Whether operations of this thread pass unseen."""
        return self._mine.paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._mine.paused = paused

    def clear(self) -> None:
        self.launches.clear()
        self.waits.clear()

    def wait(self, kind: str, device: torch.device) -> None:
        """The host waits for the device."""
        found = Wait(kind, site(most_callers=40))
        self.waits.append(found)
        self.watch.host_waits(kind, device, found.site)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and _is_composite(func):  # elsewhere it comes in pieces
            with self:
                return func.decompose(*args, **kwargs)
        call = _call(func, args, kwargs)
        self.watch.before(call)
        result = func(*args, **kwargs)
        call.outputs = list(tensors_in(result))
        devices = (self.watch.device_of(x) for x in (*call.writes, *call.reads))
        device = next((each for each in devices if each is not None), None)
        self.watch.after(call, device)
        if device is not None:
            if call.launches:
                self.launches[call.name] += 1
            if (kind := _host_read(call)) is not None:
                self.wait(kind, device)
        return result


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for each in values:
            yield from tensors_in(each)


@lru_cache(None)
def _plan(func: Any) -> tuple[str, tuple[str, ...], frozenset[str], bool]:
    """Name, names of arguments, those written, and whether the operation only makes views."""
    schema = func._schema
    written = frozenset(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    aliases = any(a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments)
    names = tuple(a.name for a in schema.arguments)
    return schema.name.partition("::")[2], names, written, aliases and not written


@lru_cache(None)
def _is_composite(func: Any) -> bool:
    return func._can_decompose()


def _call(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Call:
    name, names, written, is_view = _plan(func)
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for key, value in (*zip(names, args, strict=False), *kwargs.items()):
        (writes if key in written else reads).extend(tensors_in(value))
    return Call(func, name, args, kwargs, reads, writes, is_view)


def _host_read(call: Call) -> str | None:
    """The kind of wait that the operation is by itself, copies apart."""
    if call.name in HOST_READS:
        return "the host reads a value (.item, bool, int, float)" if call.name == "_local_scalar_dense" else call.name
    if call.name == "repeat_interleave" and call.kwargs.get("output_size") is None:
        return "repeat_interleave without output_size"
    if call.name.startswith(("index", "_index_put", "_unsafe_index")):
        masks = [x for x in tensors_in(call.argument(1, "indices")) if x.dtype in (torch.bool, torch.uint8)]
        if masks and not isinstance(call.argument(1, "indices"), torch.Tensor):
            return f"{call.name} with a mask, which needs its nonzero elements"
    return None
