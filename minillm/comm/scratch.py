"""Memory in which partial sums arrive, kept from call to call: fresh memory costs more time than adding does."""

from collections.abc import Sequence

import torch

SCRATCH_BYTES = 2 << 20  # the largest piece of memory that is kept


class Scratch:
    """Pieces of memory that a group lends to its collectives."""

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
