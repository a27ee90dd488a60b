"""Ranks that exchange messages: the part of `Group` that is not a collective.

Messages from one rank to another, subgroups, the end of a group, and bad input in one sentence.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from minillm.comm.backends.gloo import gloo_errors
from minillm.comm.diagnostics.flight_recorder import describe
from minillm.comm.operation import Message, Messages, Operation
from minillm.measure.ledger import new_event

NOTHING = torch.empty(0)  # what an operation without a tensor is recorded with


class Ranks:
    """Base of `Group`, which sets the attributes."""

    # Messages. Outside of a collective they are an operation of their own, inside one they are part of it.

    def send(self, x: torch.Tensor, dst: int, async_op: bool = False) -> Any:
        """Send x to rank dst, which receives into a tensor of the same shape and dtype."""
        return self.exchange(send=(x, dst), async_op=async_op)

    def recv(self, x: torch.Tensor, src: int, async_op: bool = False) -> Any:
        """Receive into x (contiguous) from rank src."""
        return self.exchange(recv=(x, src), async_op=async_op)

    def connect(self) -> None:
        """Opens connections of their own for `eager` messages, once. Every rank of the group calls it."""
        if self._backend is not None and self.backend == "gloo":
            self._backend.connect()

    def exchange(
        self,
        send: Message | Sequence[Message] = (),
        recv: Message | Sequence[Message] = (),
        async_op: bool = False,
        eager: bool = False,
    ) -> Any:
        """Send and receive at once, so that no order can deadlock. Each side is one (tensor, rank) or a list of them.

        Returns when every message has been delivered (`async_op`: a Work for that).
        eager, on both sides, after `connect`: a message leaves at once, whether or not the other side asks for it yet,
        and no thread carries it, which takes a fraction of the time of a small one. A message that does not fit into
        the connection's buffer (4 MB) holds its sender up until it does.
        """
        sends, recvs = _as_list(send), _as_list(recv)
        if self._backend is None:
            self._check_member("send or recv")
        self._check_messages(sends, recvs)
        operation = self._current.operation or self._message_operation(sends, recvs)
        if operation.event is not None:
            operation.event.bytes += sum(x.nbytes for x, _ in sends)
            operation.event.messages += sum(x.numel() > 0 for x, _ in sends)
        return self._backend.exchange(operation, sends, recvs, eager, async_op)

    def _message_operation(self, sends: Messages, recvs: Messages) -> Operation:
        """Compared with the other side's: size and dtype of each message."""
        self._check.compare_messages(sends, recvs)
        op = "exchange" if sends and recvs else "send" if sends else "recv"
        x, _ = (sends or recvs or [(NOTHING, 0)])[0]
        waits_for = tuple(sorted({self.ranks[peer] for _, peer in recvs or sends}))
        text = self._check.describe(op, "", x.shape, x.dtype, waits_for)
        event = new_event(op, self.name, x, self.world.egress is not None)
        self._num_exchanges += 1
        ordinal, launches = self.ordinal + 1, self._backend.launches
        return Operation(self._check, self._current, ordinal, self._num_exchanges, text, event, launches)

    # Groups.

    def subgroup(self, ranks: Sequence[int], name: str) -> Any:
        """A group of some ranks of this one. Every rank of the *world* calls it, members or not."""
        if not ranks or len(set(ranks)) != len(ranks):
            raise ValueError(f"ranks {list(ranks)} of group {name!r} must be different ranks, at least one")
        for rank in ranks:
            self.check_rank("rank", rank)
        if list(ranks) != sorted(ranks):
            raise ValueError(f"ranks {list(ranks)} of group {name!r} must ascend: torch numbers a group's ranks so")
        members, everybody = [self.ranks[rank] for rank in ranks], list(range(dist.get_world_size()))
        text = describe("make group", [0], "", everybody, name)
        backend = None if self.backend in ("none", dist.get_backend()) else self.backend
        operation = Operation(self._check, self._current, 0, 2 + self.world.groups, text, event=None)
        with operation, gloo_errors(self):
            process_group = dist.new_group(members, timeout=self.world.timeout, backend=backend)
        return type(self)(self.world, process_group, members, name)

    def finish(self) -> None:
        """Returns when this rank's asynchronous operations are over. No more may follow."""
        if self._backend is not None:
            self._backend.finish()

    def release(self) -> None:
        """Lets go of threads, connections and what is torch's, when no other rank needs them any more."""
        self.process_group = None
        if self._backend is not None:
            self._backend.close()
            self._backend = None

    def __repr__(self) -> str:
        return f"Group({self.name!r}, rank {self.rank} of {self.world_size}, global ranks {self.ranks}, {self.device})"

    # Bad input, in one sentence.

    def check_rank(self, what: str, rank: int) -> None:
        if rank not in range(self.world_size):
            raise ValueError(f"{what}={rank} is not in group {self.name!r}: its ranks are 0 to {self.world_size - 1}")

    def _check_member(self, op: str) -> None:
        if self.rank < 0:
            raise ValueError(
                f"rank {self.world.rank} called {op} on group {self.name!r}, which it is not in (members: {self.ranks})"
            )
        if self._backend is None:
            raise ValueError(f"group {self.name!r} has ended with its mesh, so there is no {op}: close the mesh later.")

    def _check_messages(self, sends: Messages, recvs: Messages) -> None:
        """ValueError unless the group can send and receive them."""
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


def of_all_ranks(group: Ranks | None, value: Any) -> list[Any]:
    """The (small, picklable) value of every rank of the group; this one alone without a group."""
    return group.gather_objects(value) if group else [value]


def _as_list(messages: Message | Sequence[Message]) -> list[Message]:
    is_one = len(messages) == 2 and isinstance(messages[0], torch.Tensor)
    return [messages] if is_one else list(messages)
