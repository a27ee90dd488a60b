"""Which row of the block tables each sequence has, and what of the rows changes from step to step.

A running sequence has the same row in each step, and its table changes once every block_size steps, so nearly all rows
are only compared. The tables themselves: `minillm/model/paged/tables.py`.
"""

import numpy as np

from minillm.serve.schedule.sequence import Sequence


class TableRows:
    """rows, width: size of the block tables; there are rows for all sequences of a step."""

    def __init__(self, rows: int, width: int):
        self.num_rows, self.width = rows, width
        self.reset()

    def reset(self) -> None:
        """Forgets what the tables hold: the next steps write every row anew."""
        self._row_of: dict[Sequence, int] = {}
        self._unused = list(range(self.num_rows))
        self._blocks_of_row: list[list[int]] = [[] for _ in self._unused]  # in lists that nothing changes later
        self._places: list[int] = []  # of the flattened tables, to be written with the next step
        self._blocks: list[int] = []

    def update(self, sequences: list[Sequence]) -> tuple[list[int], list[list[int]]]:
        """The rows of these sequences, and the blocks that they have in this step. Where those have changed, the next
        step writes them."""
        blocks_of_row, width, rows = self._blocks_of_row, self.width, []
        for sequence in sequences:
            row, blocks = self._row_of.get(sequence), sequence.blocks
            if row is None:
                row = self._new_row(sequence, sequences)
            if (held := blocks_of_row[row]) != blocks:
                start = len(held) if blocks[: len(held)] == held else 0
                stop = min(len(blocks), width)
                self._places += range(row * width + start, row * width + stop)
                self._blocks += blocks[start:stop]
                blocks_of_row[row] = list(blocks)
            rows.append(row)
        return rows, [blocks_of_row[row] for row in rows]

    def take_changes(self) -> tuple[np.ndarray, np.ndarray]:
        """`StepInputs.table_places` and `table_blocks`, for whoever writes them."""
        changes = np.array(self._places, np.int64), np.array(self._blocks, np.int64)
        self._places, self._blocks = [], []
        return changes

    def _new_row(self, sequence: Sequence, present: list[Sequence]) -> int:
        """A row that no sequence of this step has."""
        if not self._unused:
            kept = {each: self._row_of[each] for each in present if each in self._row_of}
            self._unused = sorted(set(self._row_of.values()) - set(kept.values()))
            self._row_of = kept
        row = self._row_of[sequence] = self._unused.pop()
        return row
