"""What lab 07's checks run on ranks: a learner's ring and exchange, with what each did noted."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    """What one rank did. hidden: calls of attend while a message was under way; peers: whom it sent to, in order."""

    result: Any
    bytes: int
    calls: Counter
    hidden: int = 0
    peers: tuple[int, ...] = ()
    attended: tuple[int, ...] = ()


class MessageLog:
    """Notes on one rank which messages are posted and waited for, and when it attends."""

    def __init__(self, group: Group) -> None:
        self.group, self.post = group, group.exchange
        self.under_way = self.hidden = 0
        self.peers: list[int] = []
        self.attended: list[int] = []

    def exchange(self, send: Any = (), recv: Any = (), async_op: bool = False, **how: Any) -> Any:
        sends = [send] if len(send) == 2 and isinstance(send[0], Tensor) else list(send)
        self.peers += [to for _, to in sends]
        work = self.post(send, recv, async_op=async_op, **how)
        if async_op:
            self.under_way += 1
            wait, waited = work.wait, []

            def noted() -> Any:
                if not waited:
                    waited.append(True)
                    self.under_way -= 1
                return wait()

            work.wait = noted
        return work

    def attending(self, source: int) -> None:
        self.hidden += self.under_way > 0
        self.attended.append(source)


def run_ring(group: Group, learner: Callable, cases: Sequence[RingCase]) -> list[RingRecord | None]:
    """The learner's ring on each case; None where the case has fewer ranks."""
    return on_groups(group, cases, lambda case, part: _ring(part, learner, case))


def _ring(group: Group, learner: Callable, case: RingCase) -> RingRecord:
    mine = case.positions[group.rank]
    watched = MessageLog(group)

    def attend(q: Tensor, k: Tensor, v: Tensor, source: int) -> tuple[Tensor, Tensor]:
        watched.attending(source)
        return case.attend(group.rank, q, k, v, source)

    group.exchange = watched.exchange
    try:
        with measure.ledger() as led:
            result = learner(case.q[mine], case.k[mine], case.v[mine], group, attend)
    finally:
        del group.exchange  # the method shows through again
    seen = watched.hidden, tuple(watched.peers), tuple(watched.attended)
    return RingRecord(result, led.bytes(), led.calls, *seen)


def run_exchange(group: Group, learner: tuple[Callable, Callable], cases: Sequence[list[Tensor]]) -> list:
    """(what to_heads gave, what to_sequence made of the right heads); cases: x of each rank."""
    to_heads, to_sequence = learner

    def run(case: list[Tensor], part: Group) -> list[RingRecord]:
        heads = torch.cat(case, 1).chunk(len(case), 0)[part.rank].contiguous()
        calls = [(to_heads, case[part.rank]), (to_sequence, heads)]
        return [_exchange(part, each, x.clone()) for each, x in calls]

    return on_groups(group, cases, run, size=len)


def _exchange(group: Group, call: Callable, x: Tensor) -> RingRecord:
    with measure.ledger() as led:
        result = call(x, group)
    return RingRecord(result, led.bytes(), led.calls)
