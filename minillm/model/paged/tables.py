"""Block tables that stay from step to step, on the host and on the device: only what changes is written.

A decoding sequence's table changes once every block_size steps, by one number. On the CPU both are the same memory.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

NOTHING = np.zeros(0, np.int64)


class BlockTables:
    """host: [rows, width], int64; on_device: the same, as far as `apply` has brought it there. Padded with 0."""

    def __init__(self, rows: int, width: int, device: torch.device | str = "cpu"):
        self.host = np.zeros((rows, width), np.int64)
        self.shared = torch.device(device).type == "cpu"
        self.on_device = torch.from_numpy(self.host) if self.shared else torch.zeros(rows, width, dtype=torch.int64)
        self.on_device = self.on_device.to(device)
        self._changes: list[tuple[int, Sequence[int]]] = []  # (place in the flat array, blocks from there on)

    def write(self, row: int, start: int, blocks: Sequence[int]) -> None:
        """Writes the row's blocks from `start` on."""
        self.host[row, start : start + len(blocks)] = blocks
        if not self.shared and blocks:
            self._changes.append((row * self.host.shape[1] + start, blocks))

    def changes(self) -> tuple[np.ndarray, np.ndarray]:
        """(places in the flat array, blocks) written since the last call, each place once: copy them to the
        device with other inputs, then hand them to `apply`."""
        if not self._changes:
            return NOTHING, NOTHING
        written: dict[int, int] = {}
        for start, blocks in self._changes:
            written.update(enumerate(blocks, start))
        self._changes.clear()
        return np.fromiter(written.keys(), np.int64), np.fromiter(written.values(), np.int64)

    def apply(self, places: Tensor, blocks: Tensor) -> None:
        if len(places):
            self.on_device.view(-1)[places] = blocks


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Arrays of int64 as tensors on the device, in one copy that the host does not wait for.

    On a GPU from pinned memory, of which torch keeps what a finished copy has left: after the first steps there is
    nothing to allocate.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    flat = (flat.pin_memory() if device.type == "cuda" else flat).to(device, non_blocking=True)
    parts = flat.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
