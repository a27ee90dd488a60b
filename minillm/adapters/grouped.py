"""Adapters of different ranks in one batch: the base is computed once for all tokens, each adapter for its own.

    x, sorted by adapter   [a a a │ b b │ c c c c │ none none]
    y = base(x)             one product over all rows, whoever they belong to
    y[0:3] += scale_a · (x[0:3] A_aᵀ) B_aᵀ        rank 4
    y[3:5] += scale_b · (x[3:5] A_bᵀ) B_bᵀ        rank 64: no padding to the largest rank
    ...

Two thin products for each adapter that is in the batch, however many requests share it (Punica, Chen et al. 2023;
S-LoRA, Sheng et al. 2023). Tokens of one adapter lie side by side, so a group is a slice: nothing is gathered, and
nothing is read back from a GPU. `predict.training.adapters` has the bytes, FLOPs and products.

    order = adapter_of_token.argsort(kind="stable")                  # for tokens that are not sorted yet
    segments = segments_of(adapter_of_token[order])
    add_updates(y, x[order], segments, {number: Matrices(a, b, scale), ...})
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch.nn.functional as F
from torch import Tensor

NO_ADAPTER = -1  # the number of tokens that the base alone computes


class Matrices(NamedTuple):
    """Of one layer. a: [rank, in]; b: [out, rank]; scale: of their product, see `LoraConfig.scale`."""

    a: Tensor
    b: Tensor
    scale: float


class Segment(NamedTuple):
    """The rows start .. end - 1 belong to this adapter."""

    adapter: int
    start: int
    end: int


def segments_of(adapters: Sequence[int], counts: Sequence[int] | None = None) -> list[Segment]:
    """Where each adapter's rows lie. adapters: of each sequence, by number; counts: rows of each; None = one.

    Sequences without an adapter (`NO_ADAPTER`) are left out. Neighbours with one adapter share a segment: sorted by
    adapter there is one for each, in any other order there are more, and the result is the same.
    """
    adapters = np.asarray(adapters, np.int64)
    counts = np.ones_like(adapters) if counts is None else np.asarray(counts, np.int64)
    if not len(adapters):
        return []
    first = np.flatnonzero(np.diff(adapters, prepend=adapters[0] - 1))  # the sequence that each run begins with
    ends = counts.cumsum()
    starts = (ends - counts)[first].tolist()
    runs = zip(adapters[first].tolist(), starts, [*starts[1:], int(ends[-1])], strict=True)
    return [Segment(*run) for run in runs if run[0] != NO_ADAPTER]


def add_updates(y: Tensor, x: Tensor, segments: Sequence[Segment], matrices: Mapping[int, Matrices]) -> Tensor:
    """Adds to a layer's outputs, in place, what the adapters add; returns y.

    x: [..., in], y: [..., out], rows in the order of the segments. matrices: by number of the adapter; one that is
    missing has nothing for this layer.
    """
    rows, outputs = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
    for adapter, start, end in segments:
        if (found := matrices.get(adapter)) is not None:
            update = F.linear(F.linear(rows[start:end], found.a), found.b)
            outputs[start:end].add_(update, alpha=found.scale)
    return y
