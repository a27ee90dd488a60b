"""What one step puts through the model: all its sequences' tokens in one flat row, read from and written to blocks."""

from collections.abc import Callable
from contextlib import nullcontext

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
        self.known: list[list[int]] = []  # what row i holds, in lists that nothing changes later

    def update(self, sequences: list[Sequence]) -> list[int]:
        """The rows of these sequences in `tables` and `known`, which have their blocks as they are now."""
        if len(self._rows) + len(sequences) > len(self.tables):
            self._make_room(sequences)
        indexes, known, rows = self._rows, self.known, []
        for sequence in sequences:
            row, blocks = indexes.get(sequence), sequence.blocks
            if row is None:
                row = indexes[sequence] = len(indexes)
            if known[row] != blocks:
                if len(blocks) > self.tables.shape[1]:
                    self.tables = np.pad(self.tables, ((0, 0), (0, 2 * len(blocks) - self.tables.shape[1])))
                self.tables[row, : len(blocks)] = blocks
                known[row] = list(blocks)
            rows.append(row)
        return rows

    def _make_room(self, sequences: list[Sequence]) -> None:
        """Rows for these sequences alone; all are written anew."""
        self._rows.clear()
        size = max(len(self.tables), 4 * len(sequences))
        self.tables = np.zeros((size, self.tables.shape[1]), np.int64)
        self.known = [[] for _ in range(size)]


class ForwardPass:
    """The inputs of a step as they were when it was scheduled. starts: tokens computed before, of each of the plan.

    drafts: by place in the plan, draft tokens to compute after its sequence's own, to be set before `logits`. After it:
    counts, tokens of each sequence in the pass; rows, logits of each whose last token is computed (1 and its draft
    tokens); hidden, [tokens, hidden_size] after the last block, if asked for.
    """

    def __init__(self, plan: Plan, buffers: InputBuffers):
        self.plan, self.buffers = plan, buffers
        sequences = [sequence for sequence, _ in plan.batch]
        self.starts = [sequence.num_computed for sequence in sequences]
        self._rows = buffers.update(sequences)
        self.drafts: dict[int, list[int]] = {}
        self.hidden: Tensor | None = None

    def logits(self, model: Transformer, *, hidden: bool = False) -> Tensor:
        """[rows, vocab_size], float32 on the model's device, of sequences whose last token this step computes."""
        flat, wanted, paged = self.inputs()
        with model.blocks[-1].register_forward_hook(self._keep) if hidden else nullcontext():
            return model(flat, paged.positions, attention=paged, rows=wanted)[0].float()

    def inputs(self) -> tuple[Tensor, Tensor, PagedBatch]:
        """Tokens [1, n], the rows whose logits are wanted, and the attention function of the pass."""
        flat, wanted, self.rows, self.counts = [], [], [], [tokens for _, tokens in self.plan.batch]
        for place, ((sequence, tokens), start) in enumerate(zip(self.plan.batch, self.starts, strict=True)):
            sequence.forwarded += tokens
            if tokens == 1:
                flat.append(sequence.tokens[start])
            else:
                flat += sequence.tokens[start : start + tokens]
                flat += self.drafts.get(place, ())
            over = start + tokens - len(sequence.tokens)  # its draft tokens
            if over == 0:
                self.rows.append(1)
                wanted.append(len(flat) - 1)
            elif over > 0:
                self.rows.append(1 + over)
                wanted += range(len(flat) - 1 - over, len(flat))
        buffers, widest = self.buffers, max([len(table) for table in self.tables])
        more = (np.array(flat, np.int64), np.array(wanted, np.int64))
        table = buffers.tables[self._rows, :widest]
        paged = PagedBatch(buffers.cache, table, self.starts, self.counts, buffers.backend, more)
        return paged.more[0][None], paged.more[1], paged

    @property
    def tables(self) -> list[list[int]]:
        """The blocks that each sequence of the plan had in this pass, whatever became of it since."""
        return [self.buffers.known[row] for row in self._rows]

    def table(self, sequence: Sequence) -> list[int]:
        """The blocks of one."""
        return next(table for (each, _), table in zip(self.plan.batch, self.tables, strict=True) if each is sequence)

    def _keep(self, block, inputs, output: Tensor) -> None:
        self.hidden = output[0]
