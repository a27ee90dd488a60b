"""What one step puts through the model: all its sequences' tokens in one flat row, read from and written to blocks."""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from minillm.model import Transformer
from minillm.model.paged import PagedBatch, PagedCache
from minillm.serve.sequence import Plan, Sequence


class InputBuffers:
    """Block tables of the running sequences as rows of one array that stays from step to step.

    A decoding sequence's table changes once every block_size steps, so nearly all rows are only compared. What the
    device needs goes up in one copy (`PagedBatch`).
    """

    def __init__(self, cache: PagedCache, backend: Callable):
        self.cache, self.backend = cache, backend
        self.tables = np.zeros((0, 0), np.int64)
        self._rows: dict[Sequence, int] = {}
        self._known: list[list[int]] = []  # what row i holds

    def update(self, sequences: list[Sequence]) -> list[int]:
        """The row of each sequence, with its blocks as they are now."""
        if len(self._rows) + len(sequences) > len(self.tables):
            self._make_room(sequences)
        rows, widest = [], max(len(sequence.blocks) for sequence in sequences)
        if widest > self.tables.shape[1]:
            self.tables = np.pad(self.tables, ((0, 0), (0, 2 * widest - self.tables.shape[1])))
        for sequence in sequences:
            row = self._rows.get(sequence)
            if row is None:
                row = self._rows[sequence] = len(self._rows)
            if self._known[row] != sequence.blocks:
                self._known[row] = list(sequence.blocks)
                self.tables[row, : len(sequence.blocks)] = sequence.blocks
            rows.append(row)
        return rows

    def _make_room(self, sequences: list[Sequence]) -> None:
        """Rows for these sequences alone; all are written anew."""
        self._rows.clear()
        size = max(len(self.tables), 4 * len(sequences))
        self.tables = np.zeros((size, self.tables.shape[1]), np.int64)
        self._known = [[] for _ in range(size)]


class ForwardPass:
    """The inputs of a step as they were when it was scheduled. starts, tables: per sequence of the plan.

    guesses: tokens to compute after a sequence's own, to be set before `logits`. After it: counts, tokens of each
    sequence in the pass; rows, logits of each whose last token is computed (1 and its guesses); hidden, [tokens,
    hidden_size] after the last block, if asked for.
    """

    def __init__(self, plan: Plan, buffers: InputBuffers):
        self.plan, self.buffers = plan, buffers
        self.starts = [sequence.num_computed for sequence, _ in plan.batch]
        self.tables = [list(sequence.blocks) for sequence, _ in plan.batch]
        self.guesses: list[list[int]] = [[] for _ in plan.batch]
        self.hidden: Tensor | None = None
        rows = buffers.update([sequence for sequence, _ in plan.batch])
        self._table = buffers.tables[rows, : max(map(len, self.tables))]

    def logits(self, model: Transformer, *, hidden: bool = False) -> Tensor:
        """[rows, vocab_size], float32 on the model's device, of sequences whose last token this step computes."""
        flat, wanted, paged = self.inputs()
        hook = model.blocks[-1].register_forward_hook(self._keep) if hidden else None
        try:
            y = model(flat, paged.positions, attention=paged, rows=wanted)
        finally:
            if hook is not None:
                hook.remove()
        return y[0].float()

    def inputs(self) -> tuple[Tensor, Tensor, PagedBatch]:
        """Tokens [1, n], the rows whose logits are wanted, and the attention function of the pass."""
        flat, wanted, self.rows, self.counts = [], [], [], [tokens for _, tokens in self.plan.batch]
        for (sequence, tokens), start, guesses in zip(self.plan.batch, self.starts, self.guesses, strict=True):
            flat += sequence.tokens[start : start + tokens]
            flat += guesses
            if start + tokens >= sequence.num_tokens:
                self.rows.append(1 + len(guesses))
                wanted += range(len(flat) - self.rows[-1], len(flat))
        buffers = self.buffers
        more = (np.array(flat, np.int64), np.array(wanted, np.int64))
        paged = PagedBatch(buffers.cache, self._table, self.starts, self.counts, buffers.backend, more)
        return paged.more[0][None], paged.more[1], paged

    def table(self, sequence: Sequence) -> list[int]:
        """The blocks it had in this pass, whatever became of it since."""
        return next(table for (each, _), table in zip(self.plan.batch, self.tables, strict=True) if each is sequence)

    def _keep(self, block, inputs, output: Tensor) -> None:
        self.hidden = output[0]
