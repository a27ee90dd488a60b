"""Which tokens a sequence has seen, for the repetition penalty: a row of truth values on the device for each.

    host     which sequence's tokens each row holds, and how many of them: only what is new is sent, one id a step
    device   [rows, vocab_size], one byte each; a penalty reads its row and no list of ids

The rows are those of the block tables, where a sequence keeps its own from step to step.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minillm.model.paged.tables import to_device
from minillm.serve.run.step_inputs import Penalties, fill_placeholders


class SeenOnHost:
    """What the rows on the device hold, so that the next step's `Penalties` bring only what they lack."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[object, int]] = {}  # row -> the sequence, how many of its tokens

    def forget(self, sequence: object) -> None:
        """Some of its tokens on the device are wrong: they are written anew."""
        self._held = {row: held for row, held in self._held.items() if held[0] is not sequence}

    def penalties(
        self,
        wanted: Sequence[tuple[int, float, int, object, Sequence[int]]],
        extra: Sequence[tuple[int, int]] = (),
    ) -> Penalties:
        """wanted: of each that has a penalty (row of the sampling, penalty, row of its sequence, the sequence, its
        tokens). extra: (place among these, a token that it alone has seen)."""
        cleared: list[int] = []
        rows: list[int] = []
        ids: list[int] = []
        for _, _, row, sequence, tokens in wanted:
            holder, known = self._held.get(row, (None, 0))
            if holder is not sequence or known > len(tokens):
                known = 0
                cleared.append(row)
            rows += [row] * (len(tokens) - known)
            ids += tokens[known:]
            self._held[row] = sequence, len(tokens)
        sampling_rows, penalties, seen_rows = zip(*[each[:3] for each in wanted], strict=True) if wanted else ((),) * 3
        return Penalties(
            np.array(sampling_rows, np.int64),
            np.array(penalties, np.float64),
            np.array(seen_rows, np.int64),
            np.array(cleared, np.int64),
            np.array(rows, np.int64),
            np.array(ids, np.int64),
            np.array([place for place, _ in extra], np.int64),
            np.array([token for _, token in extra], np.int64),
        )


class SeenTokens:
    """The rows on the device, as many as were ever needed."""

    def __init__(self) -> None:
        self._table: Tensor | None = None

    def penalised(
        self, logits: Tensor, penalties: Penalties, sampled: Tensor | None, drafted: Tensor | None = None
    ) -> Tensor:
        """logits: [rows of the sampling, vocab_size] -> the same after the penalties (`reference.penalised`), the very
        same tensor if there is none. Writes first what is new; doing so twice changes nothing.

        drafted: [rows of the sampling, n], ids that each has seen besides.
        """
        if not penalties.asked:
            return logits
        vocab_size = logits.shape[1]
        arrays = (penalties.rows, penalties.seen_rows, penalties.penalty.view(np.int64), penalties.cleared)
        arrays += (penalties.new_rows, penalties.new_ids, penalties.extra_places, penalties.extra_ids)
        rows, seen_rows, penalty, cleared, *new = to_device(arrays, logits.device)
        table = self._table_of(
            1 + max(each.max(initial=0) for each in (penalties.seen_rows, penalties.cleared)), logits
        )
        table.index_fill_(0, cleared, False)
        new_rows, new_ids, extra_places, extra_ids = new
        table.view(-1).index_fill_(0, new_rows * vocab_size + fill_placeholders(new_ids, sampled), True)
        if not len(rows):
            return logits
        seen = table.index_select(0, seen_rows)
        if len(extra_ids):
            seen.view(-1).index_fill_(0, extra_places * vocab_size + extra_ids, True)
        if drafted is not None:
            seen.scatter_(1, drafted.index_select(0, rows), True)
        values, penalty = logits.index_select(0, rows), penalty.view(torch.float64).float()[:, None]
        changed = torch.where(values > 0, values / penalty, values * penalty)
        return logits.index_copy(0, rows, torch.where(seen, changed, values))

    def _table_of(self, rows: int, logits: Tensor) -> Tensor:
        """The table, with so many rows at least."""
        if self._table is None or len(self._table) < rows:
            grown = logits.new_zeros(1 << (int(rows) - 1).bit_length(), logits.shape[1], dtype=torch.bool)
            if self._table is not None:
                grown[: len(self._table)] = self._table
            self._table = grown
        return self._table
