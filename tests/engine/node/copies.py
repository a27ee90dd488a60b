"""Copies, inside a device and between it and the host: which of them the host waits for, and what of its memory a
program may not touch before it has waited.
"""

import zlib

import torch

from tests.engine.node.counting import Call, site
from tests.engine.node.races import Access, NodeError


class HostCopy:
    """A copy between the host's pinned memory and a device that the device has not been seen to finish.

    A copy to the host leaves garbage there until the host has waited; the host's memory must not change under a copy
    to the device.
    """

    def __init__(self, access: Access, host: torch.Tensor, to_host: bool) -> None:
        self.access, self.host, self.to_host = access, host, to_host
        self.value = host.clone() if to_host else None
        self._checksum = None if to_host else _checksum(host)

    def is_of(self, x: torch.Tensor) -> bool:
        return self.host.untyped_storage()._cdata == x.untyped_storage()._cdata

    def arrive(self) -> None:
        if self.to_host:
            self.host.copy_(self.value)
        elif _checksum(self.host) != self._checksum:
            raise NodeError(
                f"pinned memory changed under its copy to the device, which was launched at {self.access.at}: "
                "record an event behind the copy and wait for it before writing again"
            )


class Copies:
    """What `Node` does about them."""

    def __init__(self) -> None:
        self._copies: list[HostCopy] = []

    def arrive(self, everything: bool = False) -> None:
        """The host has waited for something: copies that it is behind of have arrived."""
        done = [each for each in self._copies if everything or self.races.is_known_to_host(each.access)]
        self._copies = [each for each in self._copies if each not in done]
        with self.aside():
            for each in done:
                each.arrive()

    def _check_host_write(self, x: torch.Tensor, call: Call) -> None:
        for copy in self._copies:
            if not copy.to_host and copy.is_of(x):
                raise NodeError(
                    f"{call.name} at {site()} writes pinned memory that a copy to the device, launched at "
                    f"{copy.access.at}, may still read: wait for an event behind the copy"
                )

    def _check_host_read(self, x: torch.Tensor) -> None:
        for copy in self._copies:
            if copy.to_host and copy.is_of(x):
                raise NodeError(
                    f"the host touches memory at {site()} that a copy from the device, launched at "
                    f"{copy.access.at}, has not reached: wait for an event behind the copy"
                )

    def _copy(self, call: Call) -> None:
        if call.name == "_to_copy":
            (target,), source = call.outputs, call.args[0]
            here = self.device_of(source)
            to, non_blocking = self.mine.target or (here, False)
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


def _checksum(x: torch.Tensor) -> int:
    return zlib.crc32(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()) if x.numel() else 0
