"""What lab 07's checks run on ranks: a learner's ring and exchange, with what each did noted."""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from course.kit.exercises import CheckFailed
from course.shared.groups import on_groups
from minillm import measure
from minillm.comm import Group


@dataclass(frozen=True)
class RingCase:
    """q, k, v: [seq, head_dim], whole; positions[r]: those of rank r."""

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Sequence[Tensor]

    @property
    def world_size(self) -> int:
        return len(self.positions)

    def attend(self, rank: int, q: Tensor, k: Tensor, v: Tensor, source: int) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of rank's queries over the block of `source`; 0 and -inf where nothing is visible."""
        visible = self.positions[rank][:, None] >= self.positions[source]
        scores = (q @ k.T * q.shape[1] ** -0.5).masked_fill(~visible, float("-inf"))
        return scores.softmax(1).nan_to_num() @ v, scores.logsumexp(1)


@dataclass(frozen=True)
class RingRecord:
    """What one rank did. hidden: calls of attend while a message was under way; peers: whom it sent to, in order;
    held: bytes of received tensors alive at most when it attended; raced: what it did with a tensor that was under way.
    """

    result: Any
    bytes: int
    calls: Counter
    hidden: int = 0
    peers: tuple[int, ...] = ()
    attended: tuple[int, ...] = ()
    held: int = 0
    raced: str = ""


class MessageLog:
    """Notes on one rank which messages are posted and waited for, and when it attends."""

    def __init__(self, group: Group) -> None:
        self.group, self.post = group, group.exchange
        self.under_way: list[tuple[list[Tensor], list[Tensor]]] = []  # sent, received, of each message
        self.hidden = self.held = 0
        self.raced = ""
        self.peers: list[int] = []
        self.attended: list[int] = []
        self._alive: dict[int, int] = {}  # bytes of received tensors, by the storage's address

    def exchange(self, send: Any = (), recv: Any = (), async_op: bool = False, **how: Any) -> Any:
        sends, recvs = (
            [each] if len(each) == 2 and isinstance(each[0], Tensor) else list(each) for each in (send, recv)
        )
        self.peers += [to for _, to in sends]
        message = [x for x, _ in sends], [x for x, _ in recvs]
        if any(_overlap(x, y) for x in message[1] for leaving, _ in (*self.under_way, message) for y in leaving):
            self.raced = (
                self.raced or "receives into a block that is still being sent: receive into a tensor of its own"
            )
        for storage in (x.untyped_storage() for x in message[1]):
            if storage.data_ptr() not in self._alive:
                self._alive[storage.data_ptr()] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, storage.data_ptr(), None)
        work = self.post(send, recv, async_op=async_op, **how)
        if async_op:
            self.under_way.append(message)
            wait = work.wait

            def noted() -> Any:
                del work.wait  # a handle that is let go of lets its tensors go
                self.under_way[:] = [each for each in self.under_way if each is not message]
                return wait()

            work.wait = noted
        return work

    def attending(self, source: int, *block: Tensor) -> None:
        self.hidden += bool(self.under_way)
        self.held = max(self.held, sum(self._alive.values()))
        self.attended.append(source)
        if any(_overlap(x, y) for x in block for _, arriving in self.under_way for y in arriving):
            self.raced = self.raced or "attends to a block that is still on its way: wait before you read it"


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    return max(x.data_ptr(), y.data_ptr()) < min(x.data_ptr() + x.nbytes, y.data_ptr() + y.nbytes)


def run_ring(group: Group, learner: Callable, cases: Sequence[RingCase]) -> list[RingRecord | None]:
    """The learner's ring on each case; None where the case has fewer ranks."""
    return on_groups(group, cases, lambda case, part: _ring(part, learner, case))


def _ring(group: Group, learner: Callable, case: RingCase) -> RingRecord:
    mine = case.positions[group.rank]
    watched = MessageLog(group)

    def attend(q: Tensor, k: Tensor, v: Tensor, source: int) -> tuple[Tensor, Tensor]:
        watched.attending(source, k, v)
        return case.attend(group.rank, q, k, v, source)

    group.exchange = watched.exchange
    try:
        with measure.ledger() as led:
            result = learner(case.q[mine], case.k[mine], case.v[mine], group, attend)
    finally:
        del group.exchange  # the method shows through again
    seen = watched.hidden, tuple(watched.peers), tuple(watched.attended), watched.held, watched.raced
    return RingRecord(result, led.bytes(), led.calls, *seen)


def run_exchange(group: Group, learner: tuple[Callable, Callable], cases: Sequence[list[Tensor]]) -> list:
    """(what to_heads gave, what to_sequence made of the right heads); cases: x of each rank."""
    to_heads, to_sequence = learner

    def run(case: list[Tensor], part: Group) -> list[RingRecord]:
        heads = torch.cat(case, 1).chunk(len(case), 0)[part.rank].contiguous()
        calls = {"to_heads": (to_heads, case[part.rank]), "to_sequence": (to_sequence, heads)}
        return [_exchange(part, name, call, x.clone()) for name, (call, x) in calls.items()]

    return on_groups(group, cases, run, size=len)


def _exchange(group: Group, name: str, call: Callable, x: Tensor) -> RingRecord:
    post = group.all_to_all

    def all_to_all(x: Tensor, *how: Any, **splits: Any) -> Any:
        if not (how or splits) and len(x) % group.world_size:
            raise CheckFailed(
                f"{name} hands {list(x.shape)} to all_to_all, which cuts dimension 0 into {group.world_size} equal "
                "parts: bring what each rank is to get a part of to the front"
            )
        return post(x, *how, **splits)

    group.all_to_all = all_to_all
    try:
        with measure.ledger() as led:
            result = call(x, group)
    finally:
        del group.all_to_all  # the method shows through again
    return RingRecord(result, led.bytes(), led.calls)
