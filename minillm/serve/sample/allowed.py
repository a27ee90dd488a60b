"""The first token of an answer is one of its request's `first_tokens`, where there are any (token healing)."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from minillm.serve.requests.request import Sample
from minillm.serve.sample.reference import RULED_OUT


def allowed_first(ready: Iterable[tuple[Sample, int, int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """(rows of the logits, token ids). ready: samples that get tokens, as of `Step.ready`."""
    rows: list[int] = []
    ids: list[int] = []
    for sample, _, first, _ in ready:
        allowed = sample.request.params.first_tokens
        if allowed and len(sample.tokens) == len(sample.request.prompt):
            rows += [first] * len(allowed)
            ids += allowed
    return np.array(rows, np.int64), np.array(ids, np.int64)


def rule_out_all_but(logits: Tensor, rows: np.ndarray, ids: np.ndarray) -> None:
    """In place: in each row that is named, only its ids keep their logits."""
    for row in np.unique(rows):
        allowed = torch.full(logits.shape[1:], RULED_OUT)
        allowed[ids[rows == row]] = 0
        logits[row] += allowed.to(logits.device, non_blocking=True)
