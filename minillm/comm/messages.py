"""Point-to-point messages, the one thing all collectives are made of.

A `Transfer` posts any number of sends and receives at once, so that no order of sends can deadlock, and hides four
differences: NCCL wants them as one batch, gloo as separate calls; a collective's exchanges between ranks of one machine
take sockets of our own; gloo moves CPU memory only, so tensors on a GPU take a detour; and an emulated link delivers
later than the real wire. For the last, the sender adds a stamp (the delivery time, 8 bytes, not counted: it belongs to
the emulation) and both sides wait for that time.

A socket takes a small message whether or not anybody is there; gloo's send returns once the other side receives. So
sockets serve where every rank both sends and receives in each step, as in a ring: nobody gets through alone. What goes
one way only, as in a tree, stays with gloo: a broadcast that another rank never joins is noticed. `eager` messages take
sockets too: their sender has said that it need not notice.
"""

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from minillm.comm import sockets
from minillm.comm.errors import PeerLostError

if TYPE_CHECKING:
    from minillm.comm.group import Group

Message = tuple[torch.Tensor, int]  # (tensor, rank in the group)
STAMP = 1 << 24  # added to the tag of a message that carries a delivery time
GLANCE_S = 0.002  # how long `done` looks before it says no


class Transfer:
    """Messages under way. bytes: payload this rank sends; messages: how many sends carry it."""

    def __init__(
        self, group: "Group", sends: Sequence[Message], recvs: Sequence[Message], tag: int = 0, eager: bool = False
    ) -> None:
        self.group = group
        self.bytes = sum(x.numel() * x.element_size() for x, _ in sends)
        self._deliver_at, self._waiter, self._error = 0.0, None, None
        self._stamps: list[torch.Tensor] = []
        self._unstage: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._near = group.direct if eager else group.sockets if tag and sends and recvs else ()
        # Empty tensors have nothing to say: both sides know their size, so both sides skip them.
        sends = [(x.detach().contiguous(), dst) for x, dst in sends if x.numel()]
        self.messages = len(sends)
        recvs = [(x.detach(), src) for x, src in recvs if x.numel()]
        post = self._post_nccl if group.backend == "nccl" else self._post_gloo
        try:
            self._works = post(sends, recvs, tag)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _post_nccl(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> list[dist.Work]:
        pg = self.group.process_group
        ops = [dist.P2POp(dist.isend, x, group=pg, group_peer=dst) for x, dst in sends]
        ops += [dist.P2POp(dist.irecv, x, group=pg, group_peer=src) for x, src in recvs]
        self._pace(sends)
        return dist.batch_isend_irecv(ops) if ops else []

    def _post_gloo(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> list[dist.Work]:
        pg, works = self.group.process_group, []
        for x, src in recvs:
            works.append((self._near if src in self._near else pg).recv([self._landing(x)], src, tag))
            if self.group.link_between(src, self.group.rank):
                self._stamps.append(torch.zeros(1, dtype=torch.float64))
                works.append(pg.recv([self._stamps[-1]], src, tag + STAMP))
        stamps = self._pace(sends)
        for (x, dst), stamp in zip(sends, stamps, strict=True):
            works.append((self._near if dst in self._near else pg).send([x.cpu()], dst, tag))
            if stamp is not None:
                works.append(pg.send([torch.tensor([stamp], dtype=torch.float64)], dst, tag + STAMP))
        return works

    def _landing(self, x: torch.Tensor) -> torch.Tensor:
        """Where gloo may write: x itself, or a CPU buffer that `wait` copies to the GPU."""
        if x.device.type == "cpu":
            return x
        self._unstage.append((x, torch.empty_like(x, device="cpu")))
        return self._unstage[-1][1]

    def _pace(self, sends: Sequence[Message]) -> list[float | None]:
        """Delivery times of these messages on the emulated links; None for a message that no link slows down."""
        egress, ranks = self.group.world.egress, self.group.ranks
        if egress is None:
            return [None] * len(sends)
        times = [egress.deliver_at(self.group.world.rank, ranks[dst], x.numel() * x.element_size()) for x, dst in sends]
        self._deliver_at = max([self._deliver_at, *(t for t in times if t is not None)])
        return times

    def left(self) -> bool:
        """Whether all eager sends are on their way."""
        return not any(isinstance(work, sockets.Message) and work.sending and work.parts for work in self._works)

    def leave(self) -> None:
        """Return when they are. (Where nobody drives a connection, what is left of a message would stay behind.)"""
        self._arrive([work for work in self._works if isinstance(work, sockets.Message) and work.sending])
        if self._error:
            raise self._lost(self._error) from self._error

    def done(self) -> bool:
        """Whether `wait` would return at once. gloo cannot tell without waiting, so a thread waits in our place."""
        nccl = self.group.backend == "nccl"
        silent = [work for work in self._works if not (nccl or isinstance(work, sockets.Message))]
        if silent:
            self._works = [work for work in self._works if work not in silent]
            self._waiter = threading.Thread(target=self._arrive, args=[silent], name="minillm-transfer", daemon=True)
            self._waiter.start()
        if self._waiter:
            self._waiter.join(GLANCE_S)
        try:
            arrived = all(work.is_completed() for work in self._works)
        except RuntimeError as error:
            arrived, self._error = True, error
        arrived = arrived and not (self._waiter and self._waiter.is_alive())
        return arrived and (self._error is not None or time.monotonic() >= self._delivered_at())

    def wait(self) -> None:
        """Return when every message has been delivered. PeerLostError: the other side died meanwhile."""
        if self._waiter:
            self._waiter.join()
        self._arrive(self._works)
        if self._error:
            raise self._lost(self._error) from self._error
        for x, landed in self._unstage:
            x.copy_(landed)
        late = self._delivered_at() - time.monotonic()
        if late > 0:
            time.sleep(late)

    def _arrive(self, works: Sequence[dist.Work]) -> None:
        limit = () if self.group.backend == "nccl" else (self.group.world.timeout,)
        try:
            for work in works:
                work.wait(*limit)
        except RuntimeError as error:
            self._error = error

    def _delivered_at(self) -> float:
        return max([self._deliver_at, *(float(stamp) for stamp in self._stamps)])

    def _lost(self, error: RuntimeError) -> PeerLostError:
        reason = str(error).strip().splitlines()[-1]
        return PeerLostError(f"rank {self.group.world.rank} lost its partner in group {self.group.name!r}: {reason}")
