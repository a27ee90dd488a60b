"""What a step says of repetition penalties: which tokens are new to the rows of truth values on the device.

    host     which sequence's tokens each row holds, and how many of them: only what is new is sent, one id a step
    device   `SeenTokens` (`sample/seen.py`): [rows, vocab_size]

The rows are those of the block tables, where a sequence keeps its own from step to step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True, eq=False)
class Penalties:
    """The repetition penalty of p of the tokens, and what is new in the rows of `SeenTokens`; int64 but for penalty.

    rows, penalty (float64): [p], a row of the sampling and its penalty; seen_rows: [p], the row of `SeenTokens` that
    its sequence has. cleared: [c], rows that begin anew; new_rows, new_ids: [m], tokens that a row then gets, ~i as in
    `StepInputs.tokens`. extra_places, extra_ids: [e], tokens that count for one of the p alone, such as draft tokens.
    """

    rows: np.ndarray
    penalty: np.ndarray
    seen_rows: np.ndarray
    cleared: np.ndarray
    new_rows: np.ndarray
    new_ids: np.ndarray
    extra_places: np.ndarray
    extra_ids: np.ndarray

    @property
    def asked(self) -> bool:
        return bool(len(self.rows) or len(self.new_ids))


class Penalised(NamedTuple):
    """row: of the sampling. seen_row: of the device, the row of its sequence, which has these tokens so far."""

    row: int
    penalty: float
    seen_row: int
    sequence: object
    tokens: Sequence[int]


class SeenOnHost:
    """What the rows on the device hold, so that the next step's `Penalties` bring only what they lack."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[object, int]] = {}  # row -> the sequence, how many of its tokens

    def forget(self, sequence: object) -> None:
        """Some of its tokens on the device are wrong: they are written anew."""
        self._held = {row: held for row, held in self._held.items() if held[0] is not sequence}

    def penalties(
        self,
        wanted: Sequence[Penalised],
        extra: Sequence[tuple[int, int]] = (),
    ) -> Penalties:
        """extra: (place among the wanted, a token that it alone has seen)."""
        cleared: list[int] = []
        rows: list[int] = []
        ids: list[int] = []
        for each in wanted:
            row, sequence, tokens = each.seen_row, each.sequence, each.tokens
            holder, known = self._held.get(row, (None, 0))
            if holder is not sequence or known > len(tokens):
                known = 0
                cleared.append(row)
            rows += [row] * (len(tokens) - known)
            ids += tokens[known:]
            self._held[row] = sequence, len(tokens)
        return Penalties(
            np.array([each.row for each in wanted], np.int64),
            np.array([each.penalty for each in wanted], np.float64),
            np.array([each.seen_row for each in wanted], np.int64),
            np.array(cleared, np.int64),
            np.array(rows, np.int64),
            np.array(ids, np.int64),
            np.array([place for place, _ in extra], np.int64),
            np.array([token for _, token in extra], np.int64),
        )


def penalties_of(rows: Sequence[tuple]) -> Penalties:
    """Of rows (params, tokens, draw) that no step came before."""
    asked = [(row, params.repetition_penalty, tokens) for row, (params, tokens, _) in enumerate(rows)]
    wanted = [Penalised(row, penalty, row, row, tokens) for row, penalty, tokens in asked if penalty != 1]
    return SeenOnHost().penalties(wanted)
