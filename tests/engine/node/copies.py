"""Copies between the host's pinned memory and a device: what a program may not touch before it has waited."""

import zlib

import torch

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

    def arrive(self) -> None:
        if self.to_host:
            self.host.copy_(self.value)
        elif _checksum(self.host) != self._checksum:
            raise NodeError(
                f"pinned memory changed under its copy to the device, which was launched at {self.access.at}: "
                "record an event behind the copy and wait for it before writing again"
            )


def _checksum(x: torch.Tensor) -> int:
    return zlib.crc32(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()) if x.numel() else 0
