"""Point-to-point messages, the one thing all collectives are made of.

A `Transfer` posts any number of sends and receives at once, so that no order of sends can deadlock, and hides three
differences: NCCL wants them as one batch, gloo as separate calls; gloo moves CPU memory only, so tensors on a GPU take
a detour; and an emulated link delivers later than the real wire. For the last, the sender adds a stamp (the delivery
time, 8 bytes, not counted: it belongs to the emulation) and both sides wait for that time.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from minillm.comm.errors import PeerLostError

if TYPE_CHECKING:
    from minillm.comm.group import Group

Message = tuple[torch.Tensor, int]  # (tensor, rank in the group)
STAMP = 1 << 24  # added to the tag of a message that carries a delivery time


class Transfer:
    """Messages under way. bytes: payload this rank sends."""

    def __init__(self, group: "Group", sends: Sequence[Message], recvs: Sequence[Message], tag: int = 0) -> None:
        self.group = group
        self.bytes = sum(x.numel() * x.element_size() for x, _ in sends)
        self._deliver_at = 0.0
        self._stamps: list[torch.Tensor] = []
        self._unstage: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Empty tensors have nothing to say: both sides know their size, so both sides skip them.
        sends = [(x.detach().contiguous(), dst) for x, dst in sends if x.numel()]
        recvs = [(x.detach(), src) for x, src in recvs if x.numel()]
        post = self._post_nccl if group.backend == "nccl" else self._post_gloo
        self._works = post(sends, recvs, tag)

    def _post_nccl(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> list[dist.Work]:
        pg = self.group.process_group
        ops = [dist.P2POp(dist.isend, x, group=pg, group_peer=dst) for x, dst in sends]
        ops += [dist.P2POp(dist.irecv, x, group=pg, group_peer=src) for x, src in recvs]
        self._pace(sends)
        return dist.batch_isend_irecv(ops) if ops else []

    def _post_gloo(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> list[dist.Work]:
        pg, works = self.group.process_group, []
        for x, src in recvs:
            works.append(pg.recv([self._landing(x)], src, tag))
            if self.group.link_between(src, self.group.rank):
                self._stamps.append(torch.zeros(1, dtype=torch.float64))
                works.append(pg.recv([self._stamps[-1]], src, tag + STAMP))
        stamps = self._pace(sends)
        for (x, dst), stamp in zip(sends, stamps, strict=True):
            works.append(pg.send([x.cpu()], dst, tag))
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

    def done(self) -> bool:
        arrived = all(work.is_completed() for work in self._works)
        return arrived and time.monotonic() >= max([self._deliver_at, *(float(s) for s in self._stamps)])

    def wait(self) -> None:
        """Return when every message has been delivered. PeerLostError: the other side died meanwhile."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise PeerLostError(
                f"rank {self.group.world.rank} lost its partner in group {self.group.name!r}: {reason}"
            ) from error
        for x, landed in self._unstage:
            x.copy_(landed)
        late = max([self._deliver_at, *(float(s) for s in self._stamps)]) - time.monotonic()
        if late > 0:
            time.sleep(late)
