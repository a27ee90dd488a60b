"""Which tokens a sequence has seen, for the repetition penalty: a row of truth values on the device for each.

[rows, vocab_size], one byte each: a penalty reads its row and no list of ids. What is new in a row comes with each
step, see `run/penalties.py`.
"""

import numpy as np
import torch
from torch import Tensor

from minillm.model.paged.tables import to_device
from minillm.serve.run.penalties import Penalties
from minillm.serve.run.step_inputs import fill_placeholders


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
