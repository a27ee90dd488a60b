"""Where every piece of memory lies, and when it is free again: the caching allocator of the pretend node.

Tensors lie on the CPU; their storages are looked up here. CUDA's allocator gives a block that the host has freed to
the next allocation *on the stream that it was allocated on*, at once. That is right only if this stream is behind all
that other streams do with the block, or if `record_stream` has told the allocator of them. So a freed block waits in
`_freed` for the next allocation of its stream, and is checked then.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.engine.node.counting import Site, site
from tests.engine.node.races import Access, NodeError, Races


@dataclass(eq=False)
class Allocation:
    """device: None for the host. stream: on which it was allocated. accesses: the latest ones, by range of bytes.

    recorded: streams named to `record_stream`. pending: an operation whose result is not there yet. is_from_cpp: a
    function inside torch has made it, for a device that is not known yet.
    """

    device: torch.device | None
    num_bytes: int
    stream: int
    at: Site
    pinned: bool = False
    is_from_cpp: bool = False
    accesses: dict[tuple[int, int], list[Access]] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)
    pending: Any = None
    storage: Any = None  # a weak reference


class Memory:
    """alive, peak: bytes of each device."""

    def __init__(self, races: Races) -> None:
        self._races = races
        self._of: dict[int, Allocation] = {}
        self._freed: dict[int, list[Allocation]] = {}
        self.alive: dict[torch.device, int] = {}
        self.peak: dict[torch.device, int] = {}

    def allocations(self) -> Iterable[Allocation]:
        """Of memory that is alive."""
        return self._of.values()

    def of(self, x: torch.Tensor) -> Allocation | None:
        """None for memory of the host that nothing is known about, and for tensors without memory."""
        try:
            return self._of.get(x.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # wrapped or fake
            return None

    def add(self, x: torch.Tensor, device: torch.device | None, stream: int, pinned: bool = False) -> Allocation:
        """x has got memory of its own on the device. NodeError if that memory may still be in use."""
        self._check_freed(stream)
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._of:
            self.forget(x)
        made = Allocation(device, storage.nbytes(), stream, site(), pinned)
        made.storage = weakref.ref(storage, lambda _: self._free(key, made))
        self._of[key] = made
        self._count(device, made.num_bytes)
        return made

    def forget(self, x: torch.Tensor) -> None:
        """The memory of x is ordinary memory of the host after all."""
        if (found := self._of.pop(x.untyped_storage()._cdata, None)) is not None:
            self._count(found.device, -found.num_bytes)

    def resized(self, storage: torch.UntypedStorage, stream: int) -> None:
        """After storage.resize_: to nothing frees, from nothing allocates."""
        found = self._of.get(storage._cdata)
        if found is None or found.device is None:
            return
        self._count(found.device, storage.nbytes() - found.num_bytes)
        if storage.nbytes() < found.num_bytes:
            self._freed.setdefault(found.stream, []).append(
                Allocation(found.device, found.num_bytes, found.stream, found.at, accesses=found.accesses)
            )
            found.accesses = {}
        else:
            self._check_freed(stream)
            found.stream = stream
        found.num_bytes = storage.nbytes()

    def _free(self, key: int, allocation: Allocation) -> None:
        if self._of.get(key) is allocation:
            del self._of[key]
            self._count(allocation.device, -allocation.num_bytes)
        if allocation.device is not None:
            self._freed.setdefault(allocation.stream, []).append(allocation)

    def _count(self, device: torch.device | None, num_bytes: int) -> None:
        if device is not None:
            self.alive[device] = self.alive.get(device, 0) + num_bytes
            self.peak[device] = max(self.peak.get(device, 0), self.alive[device])

    def _check_freed(self, stream: int) -> None:
        """An allocation on the stream may get any block that has been freed there."""
        for block in self._freed.pop(stream, ()):
            for access in (each for accesses in block.accesses.values() for each in accesses):
                known = access.stream == stream or access.stream in block.recorded
                if not known and not self._races.is_after(stream, access):
                    raise NodeError(
                        f"memory freed too early: {block.num_bytes} bytes allocated at {block.at} are used again on "
                        f"{self._races.name(stream)} while {access.operator} of {self._races.name(access.stream)} "
                        f"(launched at {access.at}) may still use them: keep the tensor until the streams have met, or "
                        "call record_stream"
                    )
