"""What one step puts through the model, as plain arrays: no request, no sequence and no tensor is in it.

    plan of the scheduler ──InputBuilder──▶ StepInputs ──Runner.execute──▶ logits ──▶ ids

So a step can be pickled and sent: every rank that holds a part of the model executes the same `StepInputs` and knows
all it needs, down to the blocks that are copied or swapped before the pass. Whatever else a pass should know of each
token or sequence is one more named array here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
import torch
from torch import Tensor

from minillm.model.draw import Draw
from minillm.serve.requests.params import SamplingParams
from minillm.serve.run.penalties import Penalties, penalties_of

NOTHING = np.zeros(0, np.int64)
Row = tuple[SamplingParams, Sequence[int], Draw]  # what a request asks for; its prompt and answer so far; its draws


@dataclass(eq=False)
class SamplingInputs:
    """How t tokens are sampled from the logits of a step. All arrays but logits_rows are None if every request is
    greedy (`SamplingParams.greedy_only`).

    logits_rows: [t] int64, the row of the logits that each token is sampled from; None = row i for token i.
    temperature, top_k (inf = all), top_p, min_p: [t] float64, see `SamplingParams`. uniform: [t] float64, the random
    number of each. logprobs: [t] int64, how many log-probabilities are wanted; -1 = none.
    penalties: the repetition penalties.
    """

    count: int
    logits_rows: np.ndarray | None = None
    temperature: np.ndarray | None = None
    top_k: np.ndarray | None = None
    top_p: np.ndarray | None = None
    min_p: np.ndarray | None = None
    uniform: np.ndarray | None = None
    logprobs: np.ndarray | None = None
    penalties: Penalties | None = None

    @property
    def greedy_only(self) -> bool:
        return self.temperature is None


def sampling_inputs(
    rows: Sequence[Row], logits_rows: Sequence[int] | None = None, penalties: Penalties | None = None
) -> SamplingInputs:
    """The arrays for these rows; penalties: None = from these rows alone.

    Takes one random number of every row's `Draw` whose temperature is above 0.
    """
    places = None if logits_rows is None else np.array(logits_rows, np.int64)
    if all([params.greedy_only for params, _, _ in rows]):
        return SamplingInputs(len(rows), places)
    return SamplingInputs(
        count=len(rows),
        logits_rows=places,
        temperature=np.array([params.temperature for params, _, _ in rows]),
        top_k=np.array([inf if params.top_k is None else params.top_k for params, _, _ in rows], np.float64),
        top_p=np.array([params.top_p for params, _, _ in rows]),
        min_p=np.array([params.min_p for params, _, _ in rows]),
        uniform=np.array([draw.uniform() if params.temperature > 0 else 0.0 for params, _, draw in rows]),
        logprobs=np.array([-1 if params.logprobs is None else params.logprobs for params, _, _ in rows], np.int64),
        penalties=penalties_of(rows) if penalties is None else penalties,
    )


@dataclass(eq=False)
class StepInputs:
    """One forward pass over the n tokens of s sequences, one sequence after the other. All arrays are int64.

    tokens: [n] ids; ~i (below 0) stands for the id that the step before sampled at place i, see `fill_placeholders`.
    starts: [s], position of each sequence's first token here, so how many of its tokens were computed before.
    counts: [s], its tokens in this pass. rows: [s], the row of the block tables that is its own.
    moves: [m, 3], blocks to copy or swap before the pass, in order: kind, source, target, see `BlockPool.moves`.
    table_places, table_blocks: [c], what changes in the block tables: places in the flattened table, block ids.
    wanted: [r], the tokens whose logits are wanted, as places in `tokens`.
    allowed_rows, allowed_ids: [a], rows of the wanted logits in which only these ids may be sampled; a row that is not
    mentioned may have any. hidden: whether the hidden states after the last block are wanted.
    sampling: how the next tokens are sampled; None = only logits are wanted. largest_only: of each row of them nothing
    but the largest is read, unless the row is mentioned in allowed_rows. adapters: [s], the number of the adapter of
    each sequence, -1 = none, those of one adapter side by side; None = no sequence has one. sends: what another engine
    gets of the step's keys, see `transfer/send.py`.
    """

    tokens: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    rows: np.ndarray
    moves: np.ndarray
    table_places: np.ndarray
    table_blocks: np.ndarray
    wanted: np.ndarray
    allowed_rows: np.ndarray
    allowed_ids: np.ndarray
    hidden: bool = False
    sampling: SamplingInputs | None = None
    largest_only: bool = False
    adapters: np.ndarray | None = None
    sends: np.ndarray = field(default_factory=lambda: NOTHING)


def fill_placeholders(tokens: Tensor, sampled: Tensor | None) -> Tensor:
    """Token ids, with sampled[i] in place of each ~i (below 0): what the step before sampled and no host has read."""
    return tokens if sampled is None else torch.where(tokens < 0, sampled[(~tokens).clamp(min=0)], tokens)
