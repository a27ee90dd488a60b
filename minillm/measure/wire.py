"""The independent witness: bytes on the loopback interface, counted by the operating system.

Ranks of one machine talk over loopback, so the kernel's counter sees every byte they send, whoever wrote the code:

    group.barrier()                     # nobody is still sending what came before
    with wire() as w:
        group.barrier()                 # nobody sends before everybody has begun to count
        ring_all_reduce(x, group)
        group.barrier()                 # everybody has sent what belongs to it
    print(w.sent)                       # read it on one rank: all ranks see the same counter

What it is not: it counts the whole machine, so other loopback traffic (a notebook kernel, a database) is in it, and so
are TCP/IP headers and acknowledgements (0.1 to 3 %, the less the larger the messages) and the barriers themselves. It
cannot tell ranks apart: it shows the total of all of them, to be compared with `Cost.total_bytes`. Messages through
shared memory or NVLink never reach it.
"""

from __future__ import annotations

import ipaddress
from types import TracebackType

import psutil


class wire:
    """Bytes and packets sent over loopback since the `with` began; they stand still once it ends.

    interface: name of a network interface; found by its address (127.0.0.1 or ::1) if not given.
    Raises RuntimeError if the interface's counters are not there.
    """

    def __init__(self, interface: str | None = None) -> None:
        self.interface = interface or loopback()
        self._start = self._end = None
        self._now()  # fail here, not after the measured work

    def __enter__(self) -> wire:
        self._start, self._end = self._now(), None
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end = self._now()

    @property
    def sent(self) -> int:
        """Bytes sent by all processes of this machine over the interface, headers included."""
        return self._difference(0)

    @property
    def packets(self) -> int:
        """Packets sent by all processes of this machine over the interface."""
        return self._difference(1)

    def _difference(self, column: int) -> int:
        if self._start is None:
            raise RuntimeError("nothing counted yet: read it inside or after `with wire() as w:`")
        return (self._end or self._now())[column] - self._start[column]

    def _now(self) -> tuple[int, int]:
        try:
            counters = psutil.net_io_counters(pernic=True)
        except OSError as error:
            raise RuntimeError(f"this system shows no network counters ({error}); use the ledger instead") from None
        if self.interface not in counters:
            names = ", ".join(sorted(counters)) or "none"
            raise RuntimeError(f"no counters for interface {self.interface!r}; this system has: {names}")
        return counters[self.interface].bytes_sent, counters[self.interface].packets_sent


def loopback() -> str:
    """Name of the loopback interface ("lo" on Linux, "lo0" on macOS), found by its address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(_is_loopback(address.address) for address in addresses):
            return name
    raise RuntimeError("no network interface carries 127.0.0.1, so loopback bytes cannot be counted; use the ledger")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.split("%")[0]).is_loopback
    except ValueError:  # a hardware address
        return False
