"""What travels between the two sides: small messages in JSON, and frames of keys and values.

    a message   │ bytes │ JSON                                          who is there, what is wanted, what went wrong
    a frame     │ ticket │ layer │ first token, tokens │ first head, heads │ bytes │ keys, values │ their scales │

A ticket stands for one attempt to hand over one sequence. No two attempts share one, on whatever decode side, and later
ones have higher numbers.
"""

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import count
from typing import Any, ClassVar

CONNECT_S = 10.0  # the other side may take this long to answer a first message
PEER_BITS = 30  # of the number of a decode side, which is drawn; the other 32 of a ticket count its attempts
LARGEST = 1 << 28  # bytes of a message: a longer one is none of ours
_LENGTH = struct.Struct("<q")


def tickets_of(peer: int) -> Iterator[int]:
    """One for each attempt of a decode side."""
    return count((peer << 32) + 1)


def peer_of(ticket: int) -> int:
    return ticket >> 32


@dataclass(frozen=True)
class Frame:
    """What stands before the keys and values of one layer, of `tokens` tokens from number `first` on of those that the
    ticket is for, and of `heads` kv heads from the model's head number `head` on. nbytes: that follow."""

    ticket: int
    layer: int
    first: int
    tokens: int
    head: int
    heads: int
    nbytes: int
    FORM: ClassVar = struct.Struct("<7q")

    def to_bytes(self) -> bytes:
        return self.FORM.pack(*astuple(self))

    @classmethod
    def of(cls, line: "Line") -> "Frame | None":
        """The next one; None at the end."""
        head = line.read(cls.FORM.size)
        return None if head is None else cls(*cls.FORM.unpack(head))


class Line:
    """A connection. Any thread may `tell`; one thread hears or reads. All end quietly once either side has closed it,
    or gone."""

    def __init__(self, connection: socket.socket):
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self._telling = connection, threading.Lock()

    def tell(self, **message: Any) -> bool:
        """False if it cannot be told any more."""
        content = json.dumps(message).encode()
        return self.send(_LENGTH.pack(len(content)) + content)

    def send(self, *parts: bytes | memoryview) -> bool:
        """False if the other side has gone."""
        try:
            with self._telling:
                for part in parts:
                    self.connection.sendall(part)
        except OSError:
            return False
        return True

    def hear(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """The next message; None at the end, or if there is none within the time."""
        try:
            self.connection.settimeout(timeout_s)
            head = self.read(_LENGTH.size)
            if head is None or not 0 <= (size := _LENGTH.unpack(head)[0]) <= LARGEST:
                return None
            content = self.read(size)
            self.connection.settimeout(None)
            return None if content is None else json.loads(content)
        except (OSError, ValueError):
            return None

    def read(self, count: int) -> bytearray | None:
        """So many bytes; None if it ends before."""
        content = bytearray(count)
        view = memoryview(content)
        try:
            while view:
                moved = self.connection.recv_into(view)
                if not moved:
                    return None
                view = view[moved:]
        except OSError:
            return None
        return content

    def close(self) -> None:
        """Whoever reads it, here or there, comes to its end."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def dial(address: str, timeout_s: float = CONNECT_S) -> Line:
    """A line to "host:port". OSError if nobody answers there, ValueError for another text."""
    return Line(socket.create_connection(host_and_port(address), timeout_s))


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = str(address).rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"address {address!r} must be HOST:PORT, as 127.0.0.1:9000.")
    return host, int(port)


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{host}:{port}"
