"""What tensors and `torch.cuda` say on a pretended node. `tell(node)` puts it in place and returns what takes it back.

Attributes of `torch.Tensor` and functions of `torch` are replaced, rather than intercepted by a TorchFunctionMode: a
mode is off while it handles a call, so hooks of a backward pass that went through it would see the CPU again, and other
threads have none. Inside C++ nothing is replaced: there every tensor is the CPU's.
"""

import functools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from tests.engine.node import graphs, process_group, streams

if TYPE_CHECKING:
    from tests.engine.node.node import Node

HOST = torch.device("cpu")
MEMORY_BYTES = 80 << 30  # of each GPU
_WITHOUT_KERNEL = ("empty", "empty_like", "empty_strided", "empty_permuted", "tensor", "as_tensor", "asarray")
_FROM_HOST = ("tensor", "as_tensor", "asarray", "frombuffer", "sparse_coo_tensor")


class Undo:
    """Replaces attributes, and puts back what was there."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, owner.__dict__.get(name, Undo)))
        setattr(owner, name, value)

    def __call__(self) -> None:
        for owner, name, value in reversed(self._before):
            delattr(owner, name) if value is Undo else setattr(owner, name, value)


def tell(node: "Node") -> Undo:
    undo = Undo()
    torch.utils._device._device_constructors()  # torch keeps this list, of the functions as they are now
    _attributes(node, undo)
    _moves(node, undo)
    _reads(node, undo)
    _factories(node, undo)
    _storages(node, undo)
    _cuda(node, undo)
    _threads(node, undo)
    process_group.tell(node, undo)
    graphs.tell(node, undo)
    return undo


def _in_device_context() -> bool:
    """Whether a `with torch.device(...)` is open, which says where tensors are made."""
    return any(isinstance(each, DeviceContext) for each in _get_current_function_mode_stack())


def _wanted(node: "Node", device: Any) -> torch.device:
    """cuda devices with an index; the others as they are."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return node.device(device) if device.type == "cuda" else device


def _attributes(node: "Node", undo: Undo) -> None:
    true_device = torch._C.TensorBase.device.__get__

    def device(self: torch.Tensor) -> torch.device:
        return node.device_of(self) or true_device(self)

    undo.set(torch.Tensor, "device", property(device))
    undo.set(torch.Tensor, "is_cuda", property(lambda self: node.device_of(self) is not None))
    undo.set(torch.Tensor, "is_cpu", property(lambda self: device(self).type == "cpu"))
    undo.set(torch.Tensor, "get_device", lambda self: -1 if (on := node.device_of(self)) is None else on.index)
    undo.set(torch.Tensor, "is_pinned", lambda self, device=None: bool((a := node.memory.of(self)) and a.pinned))

    def record_stream(self: torch.Tensor, stream: streams.Stream) -> None:
        if (allocation := node.memory.of(self)) is not None:
            allocation.recorded.add(stream.stream_id)

    undo.set(torch.Tensor, "record_stream", record_stream)


def _moves(node: "Node", undo: Undo) -> None:
    plain_to = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copy = kwargs.pop("copy", False)
        if len(args) == 4 or (len(args) == 3 and isinstance(args[0], torch.dtype)):
            args, copy = args[:-1], args[-1]
        other = kwargs.pop("other", args[0] if args else None)
        if isinstance(other, torch.Tensor):
            device, dtype = other.device, other.dtype
            _, _, non_blocking, layout = torch._C._nn._parse_to(dtype, *args[1:], **kwargs)
        else:
            device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
        options = {} if layout is None else {"memory_format": layout}
        dtype = self.dtype if dtype is None else dtype
        if device is None or _wanted(node, device) == self.device or "meta" in (device.type, self.device.type):
            true = {"device": "meta"} if device is not None and device.type == "meta" else {}
            return plain_to(self, **true, dtype=dtype, copy=copy, **options)
        wanted = _wanted(node, device)
        mine = node.mine
        before, mine.target = mine.target, (None if wanted.type == "cpu" else wanted, non_blocking)
        try:
            return plain_to(self, dtype=dtype, copy=True, **options)
        finally:
            mine.target = before

    undo.set(torch.Tensor, "to", to)
    undo.set(torch.Tensor, "cpu", lambda self, **_: to(self, HOST))

    def cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> torch.Tensor:
        return to(self, node.device(device), non_blocking=non_blocking)

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        if node.device_of(self) is not None:
            raise RuntimeError(f"cannot pin a tensor on {self.device}: only dense CPU tensors can be pinned")
        if node.races.capture is not None:
            node.races.capture.refuse("pin_memory")
        copy = self.clone()
        node.pinned(copy)
        return copy

    undo.set(torch.Tensor, "cuda", cuda)
    undo.set(torch.Tensor, "pin_memory", pin_memory)


def _reads(node: "Node", undo: Undo) -> None:
    names = ("tolist", "__repr__", "numpy", "__array__", "__deepcopy__")
    plain = {name: getattr(torch.Tensor, name) for name in names}

    def waiting(name: str) -> Callable:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            node.touched(self)
            if (on := node.device_of(self)) is not None:
                node.counting.wait(f"the host reads values (.{name})", on)
            with node.aside():
                return plain[name](self, *args, **kwargs)

        return read

    def only_on_host(name: str) -> Callable:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if node.device_of(self) is not None:
                raise TypeError(
                    f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
                    "host memory first."
                )
            node.touched(self)
            return plain[name](self, *args, **kwargs)

        return read

    def deepcopy(self: torch.Tensor, memo: dict) -> torch.Tensor:
        copy, device = plain["__deepcopy__"](self, memo), node.device_of(self)
        if device is not None and node.device_of(copy) is None:
            node.on_device_memory(copy, device, "clone")
        return copy

    undo.set(torch.Tensor, "tolist", waiting("tolist"))
    undo.set(torch.Tensor, "__repr__", waiting("__repr__"))
    undo.set(torch.Tensor, "__deepcopy__", deepcopy)
    for name in ("numpy", "__array__"):
        undo.set(torch.Tensor, name, only_on_host(name))


def _factories(node: "Node", undo: Undo) -> None:
    """Functions that make tensors, of torch and of tensors: `device=` and `pin_memory=` are true of the result."""

    true_tensor = torch.tensor

    def telling(name: str, plain: Callable, is_constructor: bool = False) -> Callable:
        @functools.wraps(plain)
        def make(*args: Any, **kwargs: Any) -> Any:
            device, pinned = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
            if name == "tensor" and device is None and isinstance(args[0], torch.Tensor):  # x.new_tensor(values)
                device = args[0].device if plain is not true_tensor else None
            if device is None and is_constructor and node.makes_on is not None and not _in_device_context():
                device = node.makes_on
            node.mine.in_factory += 1
            try:
                return place(device, pinned, *args, **kwargs)
            finally:
                node.mine.in_factory -= 1

        def place(device: Any, pinned: bool, *args: Any, **kwargs: Any) -> Any:
            if device is None:
                x = plain(*args, **kwargs)
            elif (wanted := _wanted(node, device)).type not in ("cuda", "cpu"):
                return plain(*args, device=wanted, **kwargs)
            else:
                node.check_generator(kwargs.get("generator"), wanted, name)
                x = plain(*args, device=HOST, **kwargs)
                if name in ("as_tensor", "asarray") and isinstance(args[0], torch.Tensor):
                    return x.to(wanted)
                node.memory.forget(x)
                if wanted.type == "cuda":
                    node.on_device_memory(x, wanted, "" if name in _WITHOUT_KERNEL else name)
                    if name in _FROM_HOST:
                        node.counting.wait(f"torch.{name} of the host's values with device={wanted}", wanted)
            if pinned:
                node.pinned(x)
            return x

        return make

    like = [torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like]
    constructors = torch.utils._device._device_constructors()
    for plain in [*constructors, *like, torch.randint_like]:
        if getattr(torch, plain.__name__, None) is plain:
            undo.set(torch, plain.__name__, telling(plain.__name__, plain, plain in constructors))
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided"):
        undo.set(torch.Tensor, name, telling(name.removeprefix("new_"), getattr(torch.Tensor, name)))

    true_default = torch.get_default_device
    undo.set(torch, "get_default_device", lambda: true_default() if _in_device_context() else node.makes_on or HOST)

    class Generator(torch.Generator):
        def __new__(cls, device: Any = "cpu") -> "Generator":
            return super().__new__(cls)

        def __init__(self, device: Any = "cpu") -> None:
            self._on = _wanted(node, device)

        @property
        def device(self) -> torch.device:
            return self._on

    undo.set(torch, "Generator", Generator)


def _storages(node: "Node", undo: Undo) -> None:
    plain_resize = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        plain_resize(self, size)
        node.memory.resized(self, node.current_stream().stream_id)
        return self

    undo.set(torch.UntypedStorage, "resize_", resize_)


def _cuda(node: "Node", undo: Undo) -> None:
    cuda = torch.cuda
    properties = {"name": "Pretended GPU", "major": 9, "minor": 0, "total_memory": MEMORY_BYTES, "warp_size": 32}

    def properties_of(device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(**properties, multi_processor_count=132, uuid=f"GPU-{node.device(device).index}")

    def alive(device: Any = None) -> int:
        return node.memory.alive.get(node.device(device), 0)

    def reset_peak(device: Any = None) -> None:
        node.memory.peak[node.device(device)] = alive(device)

    def synchronize(device: Any = None) -> None:
        node.counting.wait("torch.cuda.synchronize", node.device(device))
        node.races._handle_device_synchronization()
        node.arrive()

    told = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: node.count,
        "current_device": lambda: node.index,
        "set_device": node.set_device,
        "device": node.on_device,
        "current_stream": node.current_stream,
        "default_stream": node.default_stream,
        "set_stream": node.set_stream,
        "stream": node.stream,
        "Stream": streams.Stream,
        "Event": streams.Event,
        "synchronize": synchronize,
        "get_device_name": lambda *_: properties["name"],
        "get_device_properties": properties_of,
        "get_device_capability": lambda *_: (9, 0),
        "mem_get_info": lambda device=None: (MEMORY_BYTES - alive(device), MEMORY_BYTES),
        "memory_allocated": alive,
        "max_memory_allocated": lambda device=None: node.memory.peak.get(node.device(device), 0),
        "reset_peak_memory_stats": reset_peak,
        "empty_cache": lambda: None,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "manual_seed": torch.default_generator.manual_seed,  # GPUs draw from the host's generator
        "manual_seed_all": torch.default_generator.manual_seed,
        "_lazy_init": lambda: None,
    }
    for name, value in told.items():
        undo.set(cuda, name, value)
    undo.set(cuda.nccl, "version", lambda: (2, 27, 0))
    accelerator = {
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "current_device_index": cuda.current_device,
    }
    accelerator |= {name: told[name] for name in ("is_available", "device_count", "current_stream", "synchronize")}
    for name, value in accelerator.items():
        undo.set(torch.accelerator, name, value)


def _threads(node: "Node", undo: Undo) -> None:
    """Threads that Python starts are watched as well; those of a process group stand for the device, and are not."""
    plain = threading.Thread._bootstrap_inner

    def bootstrap_inner(self: threading.Thread) -> None:
        if self.name == process_group.DEVICE_THREAD:
            plain(self)
        else:
            with node.counting:
                plain(self)

    undo.set(threading.Thread, "_bootstrap_inner", bootstrap_inner)
