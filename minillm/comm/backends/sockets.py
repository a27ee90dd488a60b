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
from collections.abc import Sequence

import torch
import torch.distributed as dist

from minillm.comm.errors import MismatchError, PeerLostError, WaitedTooLongError, lost_partner
from minillm.comm.operands import Communicator
from minillm.comm.operation import Message, Work

_HEADER = struct.Struct("<qq")  # tag, bytes that follow


class Sockets:
    """A connection to every other rank of a group whose ranks share a machine. name: as on the other ranks."""

    def __init__(self, group: Communicator, name: str) -> None:
        self.group = group
        self._to: dict[int, _Way] = {}
        self._from: dict[int, _Way] = {}
        me, timeout_s = group.rank, group.world.timeout.total_seconds()
        store = dist.PrefixStore(f"sockets{name}", group.process_group.get_group_store())
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(timeout_s)
            store.set(str(me), str(listener.getsockname()[1]))
            for rank in range(me):
                connection = socket.create_connection(("127.0.0.1", int(store.get(str(rank)))), timeout_s)
                connection.sendall(_HEADER.pack(me, 0))
                self._add(rank, connection)
            for _ in range(me + 1, group.world_size):  # whoever comes first says who it is
                connection, _ = listener.accept()
                rank, _ = _HEADER.unpack(connection.recv(_HEADER.size, socket.MSG_WAITALL))
                self._add(rank, connection)
        self.ways = [*self._to.values(), *self._from.values()]
        store.delete_key(str(me))  # all have read it; a later group over the same process group sets its own

    def _add(self, rank: int, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_CONGESTION"):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        connection.setblocking(False)
        self._to[rank], self._from[rank] = _Way(connection, sends=True), _Way(connection, sends=False)

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> "Exchange":
        """Start messages. Both sides know the sizes, so both skip empty tensors."""
        arriving = [_Message(x.detach(), self._from[src], tag) for x, src in recvs if x.numel()]
        leaving = [_Message(x.detach().contiguous(), self._to[dst], tag) for x, dst in sends if x.numel()]
        self.move([self._to[dst] for _, dst in sends])
        return Exchange(self, leaving, arriving)

    def move(self, ways: Sequence["_Way"]) -> bool:
        """Send and receive what is possible without waiting. False: nothing was."""
        try:
            return any([way.move() for way in ways])
        except OSError as error:
            raise lost_partner(self.group.world.rank, self.group.name, error) from error

    def complete(self, messages: Sequence["_Message"]) -> None:
        """Return when these have moved. WaitedTooLongError: for as long as the group may wait, nothing has."""
        for message in messages:
            deadline = time.monotonic() + self.group.world.timeout.total_seconds()
            while message.parts:
                if not self.move(self.ways):
                    self._sleep(deadline - time.monotonic())

    def _sleep(self, limit_s: float) -> None:
        """Wait until something can be sent or received."""
        poll, wanted = select.poll(), {}
        for way in self.ways:
            if way.queue:
                file, event = way.connection.fileno(), select.POLLOUT if way.sends else select.POLLIN
                wanted[file] = wanted.get(file, 0) | event
        for file, events in wanted.items():
            poll.register(file, events)
        if not poll.poll(max(0.0, limit_s) * 1e3):
            raise WaitedTooLongError("no message came in time")

    def close(self) -> None:
        for way in self.ways:
            way.connection.close()


class Exchange(Work):
    """Messages under way."""

    def __init__(self, sockets: Sockets, leaving: Sequence["_Message"], arriving: Sequence["_Message"]) -> None:
        self._sockets, self._leaving, self._arriving = sockets, leaving, arriving
        self._error: Exception | None = None

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        try:
            self._sockets.move(self._sockets.ways)
        except (PeerLostError, MismatchError) as error:
            self._error = error
        return self._error is not None or not any(message.parts for message in (*self._arriving, *self._leaving))

    def wait(self) -> None:
        """Return when every message has been delivered. PeerLostError: the other side died meanwhile."""
        if self._error is not None:
            raise self._error
        self._sockets.complete(self._arriving)
        self.leave()

    def has_left(self) -> bool:
        """Whether all sends have been handed to the system."""
        return not any(message.parts for message in self._leaving)

    def leave(self) -> None:
        """Return when they have been. Nothing would send the rest of a message while no call drives its connection."""
        self._sockets.complete(self._leaving)


class _Way:
    """One direction of a connection; its messages move one after the other."""

    def __init__(self, connection: socket.socket, sends: bool) -> None:
        self.connection, self.sends, self.queue = connection, sends, deque()
        self._step = connection.sendmsg if sends else self._receive

    def move(self) -> bool:
        """Move as much of the first message as is possible without waiting. False: nothing."""
        if not self.queue:
            return False
        message = self.queue[0]
        try:
            count = self._step(message.parts)
        except BlockingIOError:
            return False
        if message.advance(count):
            self.queue.popleft()
        return True

    def _receive(self, parts: list[memoryview]) -> int:
        count = self.connection.recvmsg_into(parts)[0]
        if not count:
            raise ConnectionResetError("the connection has ended")
        return count


class _Message:
    """One message under way. parts: what is left of its header and bytes."""

    def __init__(self, x: torch.Tensor, way: _Way, tag: int) -> None:
        self._expected = _HEADER.pack(tag, x.nbytes)
        self._header = self._expected if way.sends else bytearray(_HEADER.size)
        self._x = x  # kept until it has moved; through .numpy() its memory could never be freed again (ZeRO stage 3)
        body = (ctypes.c_char * x.nbytes).from_address(x.data_ptr())
        self.parts = [memoryview(self._header), memoryview(body).cast("B")]
        way.queue.append(self)

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
