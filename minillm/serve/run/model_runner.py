"""What one step puts through the model: all its sequences' tokens in one flat row, read from and written to blocks."""

from contextlib import nullcontext
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from minillm.model import Transformer
from minillm.model.paged import Backend, PagedBatch, PagedCache
from minillm.model.paged.tables import BlockTables
from minillm.serve.schedule.sequence import Plan, Sequence


class SingleTokenSteps(Protocol):
    """What may compute a step in which every sequence brings one token: `decode_graphs.DecodeGraphs`."""

    def logits(self, tokens: list[int], rows: np.ndarray, starts: np.ndarray) -> Tensor | None: ...


def resolved(tokens: Tensor, sampled: Tensor | None) -> Tensor:
    """Token ids, where ~i (below 0) stands for sampled[i], which the step before sampled and the host has not read."""
    return tokens if sampled is None else torch.where(tokens < 0, sampled[(~tokens).clamp(min=0)], tokens)


class InputBuffers:
    """Rows of block tables for the running sequences, which stay from step to step.

    A decoding sequence's table changes once every block_size steps, so nearly all rows are only compared.
    graphs: what computes steps of single tokens; None = the model, as it does all others. sampled: what placeholders
    among the tokens stand for (`resolved`); None = there are none.
    """

    def __init__(self, cache: PagedCache, backend: Backend, rows: int, width: int):
        self.cache, self.backend = cache, backend
        self.tables = BlockTables(rows, width, cache.pool.device)
        self.graphs: SingleTokenSteps | None = None
        self.sampled: Tensor | None = None
        self.reset()

    def reset(self) -> None:
        """No row is known: all are written anew, where they are."""
        self.tables.changes()
        self._rows: dict[Sequence, int] = {}
        self._unused = list(range(len(self.tables.host)))
        # what row i holds, in lists that nothing changes later
        self.known: list[list[int]] = [[] for _ in self._unused]

    def update(self, sequences: list[Sequence]) -> list[int]:
        """The rows of these sequences, which have their blocks as they are now."""
        indexes, known, rows = self._rows, self.known, []
        for sequence in sequences:
            row, blocks = indexes.get(sequence), sequence.blocks
            if row is None:
                row = self._new_row(sequence, sequences)
            if (held := known[row]) != blocks:
                start = len(held) if blocks[: len(held)] == held else 0
                self.tables.write(row, start, blocks[start : self.tables.host.shape[1]])
                known[row] = list(blocks)
            rows.append(row)
        return rows

    def _new_row(self, sequence: Sequence, present: list[Sequence]) -> int:
        """A row that no sequence of this step has."""
        if not self._unused:
            kept = {each: self._rows[each] for each in present if each in self._rows}
            self._unused = sorted(set(self._rows.values()) - set(kept.values()))
            self._rows = kept
        row = self._rows[sequence] = self._unused.pop()
        return row


class ForwardPass:
    """The inputs of a step as they were when it was scheduled. starts: tokens computed before, of each of the plan;
    tables: the blocks that each has in this pass, whatever becomes of it later.

    drafts: by place in the plan, draft tokens to compute after its sequence's own, to be set before `logits`. After it:
    counts, tokens of each sequence in the pass; rows, logits of each whose last token is computed (1 and its draft
    tokens); hidden, [tokens, hidden_size] after the last block, if asked for.
    """

    def __init__(self, plan: Plan, buffers: InputBuffers):
        self.plan, self.buffers = plan, buffers
        sequences = [sequence for sequence, _ in plan.batch]
        self.starts = [sequence.num_computed for sequence in sequences]
        self._rows = buffers.update(sequences)
        self.tables = [buffers.known[row] for row in self._rows]
        self.drafts: dict[int, list[int]] = {}
        self.hidden: Tensor | None = None

    def logits(self, model: Transformer, *, hidden: bool = False) -> Tensor:
        """[rows, vocab_size], float32 on the model's device, of sequences whose last token this step computes."""
        flat, wanted = self.tokens()
        buffers, rows, starts = self.buffers, np.array(self._rows), np.array(self.starts)
        if len(flat) == len(wanted) == len(rows) and not hidden and buffers.graphs is not None:
            found = buffers.graphs.logits(flat, rows, starts)
            if found is not None:
                return found
        tokens, wanted, paged = self.inputs(flat, wanted, rows, starts)
        with model.blocks[-1].register_forward_hook(self._keep) if hidden else nullcontext():
            return model(tokens, paged.positions, attention=paged, rows=wanted)[0].float()

    def tokens(self) -> tuple[list[int], list[int]]:
        """The tokens of the pass in one row, and the places in it whose logits are wanted."""
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
        return flat, wanted

    def inputs(
        self, flat: list[int], wanted: list[int], rows: np.ndarray, starts: np.ndarray
    ) -> tuple[Tensor, Tensor, PagedBatch]:
        """Tokens [1, n] and the rows that are wanted on the device, and the attention function of the pass."""
        buffers, more = self.buffers, (np.array(flat, np.int64), np.array(wanted, np.int64))
        paged = PagedBatch(buffers.cache, buffers.tables, rows, starts, self.counts, buffers.backend, more)
        return resolved(paged.more[0], buffers.sampled)[None], paged.more[1], paged

    def table(self, sequence: Sequence) -> list[int]:
        """The blocks of one; none if the pass did not have it, as a fork that was made after it."""
        tables = (table for (each, _), table in zip(self.plan.batch, self.tables, strict=True) if each is sequence)
        return next(tables, [])

    def _keep(self, block, inputs, output: Tensor) -> None:
        self.hidden = output[0]
