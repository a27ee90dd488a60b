"""A group of ranks: the only way anything in minillm communicates.

`Group` wraps a torch.distributed process group. It knows its axis name, writes every operation into the ledger and onto
the notice board, and paces messages when a link is emulated. On CPU its collectives are minillm's own
(`comm/collectives.py`), made of point-to-point messages (`comm/messages.py`); on NCCL they are NCCL's.

Conventions are torch's: `all_reduce` and `broadcast` work in place and return their tensor, the others return a new
one; `async_op=True` returns a `Work` at once. Ranks in calls (`root`, `src`, `dst`) are ranks inside the group.
"""

import functools
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from minillm.comm import collectives
from minillm.comm.diagnostics.flight_recorder import describe
from minillm.comm.diagnostics.mismatch import Notices
from minillm.comm.emulation import Link
from minillm.comm.messages import Message, Transfer
from minillm.comm.operands import dtype_name, part_shape
from minillm.comm.sockets import Sockets
from minillm.comm.work import Work
from minillm.comm.world import Scratch, World
from minillm.measure.ledger import Event, Ledger, open_ledgers

TAGS = 1_000_000  # messages carry one of so many, made of the operation's number and text: others are told apart


@dataclass
class _Operation:
    """The collective that runs in this thread: its messages are counted as its own."""

    tag: int
    bytes: int = 0
    messages: int = 0
    counted: bool = True


class Group:
    """A set of ranks that communicate. rank: this rank's place in it (-1 outside); ranks: the members' global ranks."""

    def __init__(self, world: World, process_group: dist.ProcessGroup | None, ranks: Sequence[int], name: str) -> None:
        self.world, self.name, self.ranks, self.device = world, name, list(ranks), world.device
        self.process_group, self.world_size = process_group, len(self.ranks)
        self.rank = self.ranks.index(world.rank) if world.rank in self.ranks else -1
        self.backend = dist.get_backend(process_group) if self.rank >= 0 else "none"
        self._ordinal, self._sequence, self._p2p_sequence = world.next_ordinal(), 0, 0
        self._notices = Notices(world, self.ranks, name, self._ordinal)
        own_sockets = self.backend == "gloo" and self.device.type == "cpu" and world.egress is None
        self.sockets = Sockets(process_group, str(self._ordinal), world.timeout) if own_sockets else ()
        self.direct: Sockets | tuple[()] = ()
        world.kept.append(self)
        self.scratch = Scratch()
        self._thread = threading.local()  # .operation: the collective this thread is inside of
        self._queue: ThreadPoolExecutor | None = None
        self._idle: threading.Event | None = None  # of the last asynchronous one; its handle would keep its tensor

    def __repr__(self) -> str:
        return f"Group({self.name!r}, rank {self.rank} of {self.world_size}, global ranks {self.ranks}, {self.device})"

    def let_go(self) -> None:
        """No more of torch's: the world has ended."""
        self.process_group = None

    # Collectives: every rank of the group calls them in the same order.

    def all_reduce(self, x: torch.Tensor, op: str = "sum", async_op: bool = False) -> Any:
        """Every rank gets the sum (avg, max, min) over the ranks, in place. Same shape and dtype on every rank."""
        how = "" if op == "sum" else f"op={op}"
        return self.run("all_reduce", x, lambda: self._best("all_reduce")(x, self, op), async_op, how=how)

    def broadcast(self, x: torch.Tensor, root: int = 0, async_op: bool = False) -> Any:
        """Every rank gets root's x, in place."""
        self.check_rank("root", root)
        how = f"root={root}" if root else ""
        return self.run("broadcast", x, lambda: self._best("broadcast")(x, self, root), async_op, how=how)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None, async_op: bool = False) -> Any:
        """x: [n, ...] on each rank -> [world_size * n, ...]: the ranks' tensors in rank order."""
        return self.run("all_gather", x, lambda: self._best("all_gather")(x, self, out), async_op, same=out is None)

    def reduce_scatter(
        self, x: torch.Tensor, op: str = "sum", async_op: bool = False, out: torch.Tensor | None = None
    ) -> Any:
        """x: [world_size * n, ...] on each rank -> [n, ...]: this rank's part of the sum over the ranks.

        out: where to put it (contiguous, n elements); it may be this rank's part of x itself.
        """
        part, how = part_shape(x, self, "reduce_scatter"), "" if op == "sum" else f"op={op}"
        body = lambda: self._best("reduce_scatter")(x, self, op, out).view(part)  # noqa: E731
        return self.run("reduce_scatter", x, body, async_op, how=how)

    def all_to_all(self, x: torch.Tensor, async_op: bool = False) -> Any:
        """x: [world_size * n, ...]: part j goes to rank j; the result holds part `rank` of every rank."""
        return self.run("all_to_all", x, lambda: self._best("all_to_all")(x, self), async_op)

    def barrier(self) -> None:
        """Return when every rank of the group has called it."""
        self.run("barrier", torch.empty(0), lambda: dist.barrier(self.process_group))

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank gets the list of all ranks' (small, picklable) values, in rank order."""
        values: list[Any] = [None] * self.world_size
        self.run("gather_objects", torch.empty(0), lambda: dist.all_gather_object(values, value, self.process_group))
        return values

    def subgroup(self, ranks: Sequence[int], name: str) -> "Group":
        """A group of some ranks of this one. Every rank of the *world* calls it, members or not."""
        if not ranks or len(set(ranks)) != len(ranks):
            raise ValueError(f"ranks {list(ranks)} of group {name!r} must be different ranks, at least one")
        for rank in ranks:
            self.check_rank("rank", rank)
        if list(ranks) != sorted(ranks):
            raise ValueError(f"ranks {list(ranks)} of group {name!r} must ascend: torch numbers a group's ranks so")
        members, everybody = [self.ranks[rank] for rank in ranks], list(range(dist.get_world_size()))
        text = describe("make group", [0], "", everybody, name)
        make = functools.partial(dist.new_group, members, timeout=self.world.timeout)
        process_group = self._notices.during(0, 2 + self.world.groups, text, make)
        return Group(self.world, process_group, members, name)

    # Point-to-point messages.

    def send(self, x: torch.Tensor, dst: int, async_op: bool = False) -> Any:
        """Send x to rank dst, which receives into a tensor of the same shape and dtype."""
        return self.exchange(send=(x, dst), async_op=async_op)

    def recv(self, x: torch.Tensor, src: int, async_op: bool = False) -> Any:
        """Receive into x (contiguous) from rank src."""
        return self.exchange(recv=(x, src), async_op=async_op)

    def connect(self) -> None:
        """Opens connections of their own for `eager` messages, once. Every rank of the group calls it."""
        if self.sockets and not self.direct:
            self.direct = Sockets(self.process_group, f"{self._ordinal}-direct", self.world.timeout)

    def exchange(
        self,
        send: Message | Sequence[Message] = (),
        recv: Message | Sequence[Message] = (),
        async_op: bool = False,
        eager: bool = False,
    ) -> Any:
        """Send and receive at once, so that no order can deadlock. Each side is one (tensor, rank) or a list of them.

        Returns when every message has been delivered (`async_op`: a handle for that).
        eager, on both sides, after `connect`: a message leaves at once, whether or not the other side asks for it yet,
        and no thread carries it: a fraction of the time where it is small. One that the connection's buffer (4 MB) has
        no room for holds its sender up until it has.
        """
        sends, recvs = _as_list(send), _as_list(recv)
        self._check_messages(sends, recvs)
        inside = getattr(self._thread, "operation", None)
        if not inside:
            self._notices.compare_messages(sends, recvs)
        transfer = Transfer(self, sends, recvs, tag=inside.tag if inside else 0, eager=eager)
        if inside:
            inside.bytes += transfer.bytes
            inside.messages += transfer.messages
            return Work(transfer.wait, transfer.done, []) if async_op else transfer.wait()

        op = "exchange" if sends and recvs else "send" if sends else "recv"
        x = (sends or recvs or [(torch.empty(0), 0)])[0][0]
        event = self._event(op, x, transfer.bytes, transfer.messages, open_ledgers())
        text = self._describe(op, x, [peer for _, peer in recvs or sends])

        def on_board(body: Callable[[], None]) -> None:
            self._p2p_sequence += 1
            self._notices.during(self._ordinal + 1, self._p2p_sequence, text, body)
            event.end = time.monotonic()

        if eager and not transfer.left():
            on_board(transfer.leave)
        handle = Work(lambda: on_board(transfer.wait), transfer.done, [event])
        return handle if async_op else handle.wait()

    # How a collective is run: recorded, announced, in the caller's thread or in this group's own.

    def run(
        self,
        op: str,
        x: torch.Tensor,
        body: Callable[[], Any],
        async_op: bool = False,
        same: bool = True,
        how: str = "",
    ) -> Any:
        """Run `body` as one collective called `op`: every message inside it is counted as part of it.

        same: x has the same shape on every rank, so that a rank with another one can be named; how: what else has to
        be the same (op, root). A collective inside another one is part of it. Asynchronous ones run one after the
        other in a thread of this group.
        """
        self._check_member(op)
        if getattr(self._thread, "operation", None):
            result = body()
            return Work(lambda: result, lambda: True, []) if async_op else result
        event = self._event(op, x, 0, 0, open_ledgers())
        text = self._describe(f"{op}({how})" if how else op, x if same else x.new_empty(0))
        if not async_op and (self._idle is None or self._idle.is_set()):
            handle = Work(lambda: self._perform(event, text, body), lambda: False, [event])
        else:
            self._queue = self._queue or ThreadPoolExecutor(1, thread_name_prefix=f"minillm-{self.name}")
            future = self._queue.submit(self._perform, event, text, body)
            idle = self._idle = threading.Event()
            future.add_done_callback(lambda _: idle.set())
            handle = Work(future.result, future.done, [event])
        return handle if async_op else handle.wait()

    @torch.no_grad()
    def _perform(self, event: Event, text: bytes, body: Callable[[], Any]) -> Any:
        self._sequence += 1
        operation = self._thread.operation = _Operation(tag=1 + zlib.crc32(text, self._sequence) % TAGS)
        event.start = time.monotonic()
        try:
            return self._notices.during(self._ordinal, self._sequence, text, body)
        finally:
            self._thread.operation = None
            event.end = time.monotonic()
            event.bytes, event.messages, event.counted = operation.bytes, operation.messages, operation.counted

    def assume(self, num_bytes: int) -> None:
        """Called by a collective whose messages cannot be counted: what this rank sends by the ring formula."""
        operation = self._thread.operation
        operation.bytes, operation.counted = operation.bytes + num_bytes, False

    def _event(self, op: str, x: torch.Tensor, num_bytes: int, messages: int, ledgers: Sequence[Ledger]) -> Event:
        now, emulated = time.monotonic(), self.world.egress is not None
        event = Event(op, self.name, num_bytes, messages, tuple(x.shape), dtype_name(x), now, now, emulated=emulated)
        for ledger in ledgers:
            ledger.events.append(event)
        return event

    def _describe(self, op: str, x: torch.Tensor, peers: Sequence[int] | None = None) -> bytes:
        waits_for = None if peers is None else sorted({self.ranks[peer] for peer in peers})
        return describe(op, list(x.shape), dtype_name(x), self.ranks, self.name, waits_for)

    def _best(self, name: str) -> Callable[..., Any]:
        """minillm's own algorithm; NCCL's on NCCL, unless a link is emulated (NCCL's messages cannot be paced)."""
        native = self.backend == "nccl" and self.world.egress is None
        return (collectives.NATIVE if native else collectives.DEFAULT)[name]

    @property
    def cuts_messages(self) -> bool:
        """Whether large messages go in pieces: NCCL does that itself, and on an emulated link it would add latency."""
        return self.backend != "nccl" and self.world.egress is None

    def link_between(self, src: int, dst: int) -> Link | None:
        """The emulated link from group rank src to group rank dst, if any."""
        egress = self.world.egress
        return egress.links.between(self.ranks[src], self.ranks[dst]) if egress else None

    # Bad input, in one sentence.

    def check_rank(self, what: str, rank: int) -> None:
        if rank not in range(self.world_size):
            raise ValueError(f"{what}={rank} is not in group {self.name!r}: its ranks are 0 to {self.world_size - 1}")

    def _check_member(self, op: str) -> None:
        if self.rank < 0:
            raise ValueError(
                f"rank {self.world.rank} called {op} on group {self.name!r}, which it is not in (members: {self.ranks})"
            )

    def _check_messages(self, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        self._check_member("send or recv")
        for what, messages in (("dst", sends), ("src", recvs)):
            for x, peer in messages:
                self.check_rank(what, peer)
                if peer == self.rank:
                    raise ValueError(
                        f"{what}={peer} is this rank itself in group {self.name!r}: copy the tensor instead"
                    )
                if x.device.type != self.device.type:
                    raise ValueError(
                        f"tensor on {x.device} in group {self.name!r} on {self.device}: move it with .to()"
                    )
        for x, src in recvs:
            if not x.is_contiguous():
                raise ValueError(f"cannot receive from rank {src} into a non-contiguous {list(x.shape)} tensor")


def _as_list(messages: Message | Sequence[Message]) -> list[Message]:
    is_one = len(messages) == 2 and isinstance(messages[0], torch.Tensor)
    return [messages] if is_one else list(messages)
