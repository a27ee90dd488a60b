"""Which row of the block tables each sequence has, and what of the rows changes from step to step.

A running sequence has the same row in each step, and its table changes once every block_size steps, so nearly all rows
are only compared. The tables themselves: `minillm/model/paged/tables.py`.
"""

import numpy as np

from minillm.serve.run.step_inputs import NOTHING
from minillm.serve.schedule.sequence import Sequence


class TableRows:
    """rows, width: size of the block tables; there are rows for all sequences of a step. kinds: 2 where the pool has
    windowed layers apart, whose blocks stand in a second half of the rows."""

    def __init__(self, rows: int, width: int, kinds: int = 1):
        self.num_rows, self.width, self.kinds = rows // kinds, width, kinds
        self.reset()

    def reset(self) -> None:
        """Forgets what the tables hold: the next steps write every row anew."""
        self._row_of: dict[Sequence, int] = {}
        self._unused = list(range(self.num_rows))
        # In lists that nothing changes later.
        self._blocks_of_row: list[list[int]] = [[] for _ in range(self.num_rows * self.kinds)]
        self._places: list[int] = []  # of the flattened tables, to be written with the next step
        self._blocks: list[int] = []

    def update(self, sequences: list[Sequence]) -> tuple[list[int], list[list[list[int]]]]:
        """The rows of these sequences, and of each kind the blocks that they have in this step. Where those have
        changed, the next step writes them."""
        held, rows, second = self._blocks_of_row, [], self.num_rows
        for sequence in sequences:
            row = self._row_of.get(sequence)
            if row is None:
                row = self._new_row(sequence, sequences)
            if held[row] != sequence.blocks:
                self._write(row, sequence.blocks)
            rows.append(row)
        for row, sequence in zip(rows, sequences, strict=True) if self.kinds == 2 else ():
            if held[second + row] != sequence.windowed.blocks:
                self._write(second + row, sequence.windowed.blocks)
        return rows, [[held[first + row] for row in rows] for first in range(0, len(held), second)]

    def _write(self, row: int, blocks: list[int]) -> None:
        """With the next step, as far as it is new."""
        held, width = self._blocks_of_row[row], self.width
        start = len(held) if blocks[: len(held)] == held else 0
        stop = min(len(blocks), width)
        self._places += range(row * width + start, row * width + stop)
        self._blocks += blocks[start:stop]
        self._blocks_of_row[row] = list(blocks)

    def take_changes(self) -> tuple[np.ndarray, np.ndarray]:
        """`StepInputs.table_places` and `table_blocks`, for whoever writes them."""
        if not self._places:
            return NOTHING, NOTHING
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
