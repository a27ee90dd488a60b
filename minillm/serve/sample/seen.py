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

    def penalties(self, wanted: Sequence[tuple[int, float, int, object, Sequence[int]]]) -> Penalties:
        """wanted: of each that has a penalty (row of the sampling, penalty, row of its sequence, the sequence, its
        tokens)."""
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
        )


class SeenTokens:
    """The rows on the device. They are allocated when the first penalty is asked for."""

    def __init__(self, rows: int):
        self.rows = rows
        self._table: Tensor | None = None

    def penalised(self, logits: Tensor, penalties: Penalties, sampled: Tensor | None) -> Tensor:
        """logits: [rows of the sampling, vocab_size] -> the same after the penalties (`reference.penalised`), the very
        same tensor if there is none. Writes first what is new; doing so twice changes nothing."""
        if not penalties.asked:
            return logits
        if self._table is None:
            self._table = torch.zeros(self.rows, logits.shape[1], dtype=torch.bool, device=logits.device)
        arrays = (penalties.rows, penalties.seen_rows, penalties.penalty.view(np.int64))
        arrays += (penalties.cleared, penalties.new_rows, penalties.new_ids)
        rows, seen_rows, penalty, cleared, new_rows, new_ids = to_device(arrays, logits.device)
        if len(cleared):
            self._table.index_fill_(0, cleared, False)
        places = new_rows * logits.shape[1] + fill_placeholders(new_ids, sampled)
        self._table.view(-1).index_fill_(0, places, True)
        if not len(rows):
            return logits
        values, penalty = logits.index_select(0, rows), penalty.view(torch.float64).float()[:, None]
        changed = torch.where(values > 0, values / penalty, values * penalty)
        return logits.index_copy(0, rows, torch.where(self._table.index_select(0, seen_rows), changed, values))
