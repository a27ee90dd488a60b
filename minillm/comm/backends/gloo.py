"""Messages that gloo carries: one-way ones, those between machines, over emulated links, and of tensors on a GPU.

A `Transfer` posts any number of sends and receives at once, so that no order of sends can deadlock. It hides two
differences: gloo moves CPU memory only, so tensors on a GPU are copied to the host and back; and an emulated link
delivers later than the real wire. For that, the sender adds a stamp (the delivery time, 8 bytes, not counted: it
belongs to the emulation), and both sides wait for that time.
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from minillm.comm.errors import MismatchError, PeerLostError, WaitedTooLongError, lost_partner
from minillm.comm.operands import Communicator
from minillm.comm.operation import Message, Work

STAMP = 1 << 24  # added to the tag of a message that carries a delivery time
GLANCE_S = 0.002  # how long `done` waits before it returns False


class Transfer(Work):
    """Messages under way. tag: that of the collective they belong to, 0 for none."""

    def __init__(self, group: Communicator, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> None:
        self.group = group
        self._deliver_at, self._waited = 0.0, False
        self._waiter: threading.Thread | None = None
        self._error: Exception | None = None
        self._stamps: list[torch.Tensor] = []
        self._unstage: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Both sides know the sizes, so both skip empty tensors.
        sends = [(x.detach().contiguous(), dst) for x, dst in sends if x.numel()]
        with gloo_errors(group):
            self._works = self._post(sends, [(x.detach(), src) for x, src in recvs if x.numel()], tag)

    def _post(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> list[dist.Work]:
        pg, works, egress = self.group.process_group, [], self.group.world.egress
        here, ranks = self.group.world.rank, self.group.ranks
        for x, src in recvs:
            works.append(pg.recv([self._landing(x)], src, tag))
            if egress and egress.paces(ranks[src], here):
                self._stamps.append(torch.zeros(1, dtype=torch.float64))
                works.append(pg.recv([self._stamps[-1]], src, tag + STAMP))
        stamps = [egress and egress.deliver_at(here, ranks[dst], x.nbytes) for x, dst in sends]
        self._deliver_at = max([0.0, *(stamp for stamp in stamps if stamp is not None)])
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

    def done(self) -> bool:
        """Whether `wait` would return at once. gloo can tell only by waiting, so another thread waits."""
        if self._waited:
            return True
        if self._waiter is None:
            self._waiter = threading.Thread(target=self._watch, name="minillm-transfer", daemon=True)
            self._waiter.start()
        self._waiter.join(GLANCE_S)
        if self._waiter.is_alive():
            return False
        return self._error is not None or time.monotonic() >= self._delivered_at()

    def wait(self) -> None:
        """Return when every message has been delivered. PeerLostError: the other side died meanwhile."""
        if self._waited:
            return
        if self._waiter is None:
            self._arrive()
        else:
            self._waiter.join()
        if self._error is not None:
            raise self._error
        for x, landed in self._unstage:
            x.copy_(landed)
        late = self._delivered_at() - time.monotonic()
        if late > 0:
            time.sleep(late)
        self._waited = True

    def _watch(self) -> None:
        try:
            self._arrive()
        except (PeerLostError, WaitedTooLongError) as error:
            self._error = error

    def _arrive(self) -> None:
        for work in self._works:
            with gloo_errors(self.group):
                work.wait(self.group.world.timeout)

    def _delivered_at(self) -> float:
        return max([self._deliver_at, *(float(stamp) for stamp in self._stamps)])


@contextlib.contextmanager
def gloo_errors(group: Communicator) -> Iterator[None]:
    """Around a call that waits for other ranks. gloo's errors have one type: how long the call took tells too long a
    wait from a lost rank."""
    start = time.monotonic()
    try:
        yield
    except (PeerLostError, WaitedTooLongError, MismatchError):
        raise
    except RuntimeError as error:
        if time.monotonic() - start > 0.95 * group.world.timeout.total_seconds():
            raise WaitedTooLongError(str(error)) from error
        raise lost_partner(group.world.rank, group.name, error) from error
