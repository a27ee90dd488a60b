"""What all groups of one rank share."""

import datetime

import torch

from minillm.comm.board import Board
from minillm.comm.links import Egress


class World:
    """What all groups of one rank share: its global rank, device, notice board, emulated links, longest wait."""

    def __init__(
        self, rank: int, device: torch.device, board: Board | None, egress: Egress | None, wait_s: float
    ) -> None:
        self.rank, self.device, self.board, self.egress = rank, device, board, egress
        self.timeout = datetime.timedelta(seconds=wait_s)
        self.groups = 0

    def next_ordinal(self) -> int:
        """The next group's number. Ranks create groups in the same order, so it means the same group everywhere."""
        self.groups += 1
        return 2 * self.groups  # even: collectives; the odd number after it: point-to-point messages
