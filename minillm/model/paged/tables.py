"""Block tables that stay from step to step, on the host and on the device: only what changes is written.

A decoding sequence's table changes once every block_size steps, by one number. On the CPU both are the same memory.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class BlockTables:
    """host: [rows, width], int64, at first 0; on_device: the same, as far as `write_on_device` has brought it there."""

    def __init__(self, rows: int, width: int, device: torch.device | str = "cpu"):
        self.host = np.zeros((rows, width), np.int64)
        self.shared = torch.device(device).type == "cpu"
        self.on_device = torch.from_numpy(self.host) if self.shared else torch.zeros(rows, width, dtype=torch.int64)
        self.on_device = self.on_device.to(device)

    def write_on_host(self, places: np.ndarray, blocks: np.ndarray) -> None:
        """places: [n], in the flattened table, each at most once; blocks: [n], what is written there."""
        if len(places):
            self.host.reshape(-1)[places] = blocks

    def write_on_device(self, places: Tensor, blocks: Tensor) -> None:
        if len(places) and not self.shared:
            self.on_device.view(-1)[places] = blocks


def slots_of_tokens(
    tables: np.ndarray, rows: np.ndarray, starts: np.ndarray, query_lens: np.ndarray, block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """(positions, slots), [tokens] each: where each token stands in its sequence, and where its keys go in the pool.

    tables: [any number, blocks]; rows: [sequences], the row of each sequence in them. Sequence s brings the
    query_lens[s] tokens from position starts[s] on.
    """
    stops = query_lens.cumsum()
    if len(query_lens) == stops[-1]:  # one token each
        positions, row_of = starts, rows
    else:
        sequence_of = np.arange(len(query_lens)).repeat(query_lens)
        positions = np.arange(len(sequence_of)) + (starts + query_lens - stops)[sequence_of]
        row_of = rows[sequence_of]
    return positions, tables[row_of, positions // block_size] * block_size + positions % block_size


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
