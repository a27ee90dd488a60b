"""What all groups of one rank share, and the memory that a group keeps."""

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from minillm.comm.diagnostics.flight_recorder import Board
from minillm.comm.emulation import Egress

if TYPE_CHECKING:
    from minillm.comm.group import Group
    from minillm.comm.mesh import Mesh

SCRATCH_BYTES = 2 << 20  # the largest piece of memory that is kept


class World:
    """What all groups of one rank share: its global rank, device, notice board, emulated links, longest wait."""

    def __init__(
        self, rank: int, device: torch.device, board: Board | None, egress: Egress | None, wait_s: float
    ) -> None:
        self.rank, self.device, self.board, self.egress = rank, device, board, egress
        self.timeout = datetime.timedelta(seconds=wait_s)
        self.groups = 0
        self.kept: list[Group | Mesh] = []  # their connections: others may still need what this rank has dropped

    def next_ordinal(self) -> int:
        """The next group's number. Ranks create groups in the same order, so it means the same group everywhere."""
        self.groups += 1
        return 2 * self.groups  # even: collectives; the odd number after it: point-to-point messages

    def close(self) -> None:
        """Let go of torch's process groups, which ends their threads, whoever still holds a `Group`. A thread of gloo
        that frees a tensor while Python shuts down would end the process ("terminate called ...")."""
        for each in self.kept:
            each.let_go()


class Scratch:
    """Memory in which partial sums arrive, kept from call to call: fresh memory costs more time than adding does."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """At least as many bytes as x has, on its device, with anything in them."""
        memory = self._free.pop() if self._free else x.new_empty(0, dtype=torch.uint8)
        fits = memory.numel() >= x.nbytes and memory.device == x.device
        return memory if fits else x.new_empty(x.nbytes, dtype=torch.uint8)

    def give(self, memory: Sequence[torch.Tensor]) -> None:
        """Hand back for the next call; what is large goes back to the system."""
        self._free += [piece for piece in memory if piece.numel() <= SCRATCH_BYTES]
