"""Messages between the ranks of one machine, over connections that the calling thread drives itself.

gloo hands every message from the calling thread to a thread of its own and back. On Linux the two trip over each other:
a message wakes the other rank's thread, which takes the CPU from the sender while that still holds a lock of gloo's;
the sender's own gloo thread spins for that lock, on the same CPU, until the scheduler's next tick, 4 ms later. Here no
other thread is involved: a thread that waits for a message moves all messages under way in its group, in order.

Packets are not paced either: where the system's congestion control is BBR, it spreads them over time even on the
loopback interface, and large messages take up to twice as long as under Reno.

A message is (tag, size) and its bytes, over TCP on the loopback interface, whose counters `measure.wire` reads.
"""

import ctypes
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from minillm.comm.errors import MismatchError, PeerLostError, WaitedTooLongError

_HEADER = struct.Struct("<qq")  # tag, bytes that follow


class Sockets:
    """A connection to every other rank of the group on this machine; `send` and `recv` are a process group's.

    near: the ranks of the group that are on this machine.
    """

    def __init__(self, process_group: dist.ProcessGroup, name: str, near: Sequence[int], timeout: timedelta) -> None:
        me, store = process_group.rank(), dist.PrefixStore(f"sockets{name}", process_group.get_group_store())
        self._ways: dict[int, tuple[_Way, _Way]] = {}  # rank -> (to it, from it)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(timeout.total_seconds())
            store.set(str(me), str(listener.getsockname()[1]))
            for rank in near:
                if rank == me:
                    continue
                if rank < me:
                    connection = socket.create_connection(
                        ("127.0.0.1", int(store.get(str(rank)))), timeout.total_seconds()
                    )
                    connection.sendall(_HEADER.pack(me, 0))
                else:  # whoever comes first says who it is
                    connection, _ = listener.accept()
                    rank, _ = _HEADER.unpack(connection.recv(_HEADER.size, socket.MSG_WAITALL))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if hasattr(socket, "TCP_CONGESTION"):  # Linux
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
                connection.setblocking(False)
                self._ways[rank] = _Way(connection, _give, select.POLLOUT), _Way(connection, _take, select.POLLIN)
        store.delete_key(str(me))  # all have read it; a later group over the same process group sets its own

    def __contains__(self, rank: int) -> bool:
        return rank in self._ways

    def close(self) -> None:
        for way, _ in self._ways.values():
            way.connection.close()

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int) -> "Message":
        return Message(self, self._ways[dst][0], tensors[0], tag, sending=True)

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int) -> "Message":
        return Message(self, self._ways[src][1], tensors[0], tag, sending=False)

    def move(self) -> bool:
        """Send and receive what is possible without waiting. False: nothing was."""
        return any([way.move() for ways in self._ways.values() for way in ways])

    def sleep(self, limit_s: float) -> None:
        """Wait until something can be sent or received. WaitedTooLongError after `limit_s` seconds."""
        poll, wanted = select.poll(), {}
        for way in (way for ways in self._ways.values() for way in ways if way.queue):
            wanted[way.connection.fileno()] = wanted.get(way.connection.fileno(), 0) | way.event
        for file, events in wanted.items():
            poll.register(file, events)
        if not poll.poll(max(0.0, limit_s) * 1e3):
            raise WaitedTooLongError("no message came in time")


class _Way:
    """One direction of a connection; its messages move one after the other."""

    def __init__(self, connection: socket.socket, step: Callable, event: int) -> None:
        self.connection, self.queue, self.event, self._step = connection, deque(), event, step

    def move(self) -> bool:
        """Move as much of the first message as is possible without waiting. False: nothing."""
        if not self.queue:
            return False
        message = self.queue[0]
        try:
            count = self._step(self.connection, message.parts)
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerLostError(str(error)) from error
        if message.advance(count):
            self.queue.popleft()
        return True


def _give(connection: socket.socket, parts: list[memoryview]) -> int:
    return connection.sendmsg(parts)


def _take(connection: socket.socket, parts: list[memoryview]) -> int:
    count = connection.recvmsg_into(parts)[0]
    if not count:
        raise ConnectionResetError("the connection has ended")
    return count


class Message:
    """One message under way, with the methods of torch's Work. parts: what is left of its header and bytes."""

    def __init__(self, sockets: Sockets, way: _Way, x: torch.Tensor, tag: int, sending: bool) -> None:
        self._sockets, self.sending, self._expected = sockets, sending, _HEADER.pack(tag, x.nbytes)
        self._header = self._expected if sending else bytearray(_HEADER.size)
        self._x = x  # kept until it has moved; through .numpy() its memory could never be freed again (ZeRO stage 3)
        body = (ctypes.c_char * x.nbytes).from_address(x.data_ptr())
        self.parts = [memoryview(self._header), memoryview(body).cast("B")]
        way.queue.append(self)
        if sending:
            way.move()

    def advance(self, count: int) -> bool:
        """Count bytes that have moved. True: the message is complete. MismatchError: another one than expected came."""
        while self.parts and count >= len(self.parts[0]):
            count -= len(self.parts.pop(0))
            if len(self.parts) == 1 and self._header != self._expected:
                (tag, size), (mine, expected) = _HEADER.unpack(self._header), _HEADER.unpack(self._expected)
                what = f"{size} bytes" if tag == mine else "a part of another operation"
                raise MismatchError(f"a message of {expected} bytes was expected, but {what} came")
        if self.parts:
            self.parts[0] = self.parts[0][count:]
        return not self.parts

    def is_completed(self) -> bool:
        self._sockets.move()
        return not self.parts

    def wait(self, timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while self.parts:
            if not self._sockets.move():
                self._sockets.sleep(deadline - time.monotonic())
