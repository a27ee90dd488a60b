"""What packing saves: one document per row, short rows padded, the padding computed and thrown away.

    random batch of 4        sorted by length         packed
    a a a a a a . .          a a a a a a a a          a a a a a a b b
    b b . . . . . .          b b b b b b b .          b c c c c c c c
    c c c c c c c c          c c c c c c . .          c d d d d d d d
    d d d d d . . .          ...

Waste of a padded batch is 1 - mean / max of its lengths: 7/16 for batches of 8 with uniform lengths, near 0 once
documents are sorted by length (at a price: batches are no longer random draws of the corpus).
"""

from collections.abc import Sequence

import numpy as np
import torch

IGNORE = -100  # the target that torch's cross entropy leaves out


def length_batches(lengths: Sequence[int], batch_size: int, seed: int, by_length: bool = False) -> list[np.ndarray]:
    """Every document's index once, in batches of `batch_size` (the last may be smaller), in a random order of batches.

    `by_length` puts documents of similar length together; ties and the order of batches are drawn from `seed`.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size {batch_size} must be at least 1")
    random = np.random.default_rng(seed)
    order = random.permutation(len(lengths))
    if by_length:
        order = order[np.argsort(np.asarray(lengths)[order], kind="stable")]
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return [batches[i] for i in random.permutation(len(batches))]


def pad(documents: Sequence[Sequence[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets), each int64 [documents, longest - 1]; targets are `IGNORE` where there is only padding."""
    longest = max(map(len, documents))
    if longest < 2:
        raise ValueError(f"the longest document has {longest} tokens: predicting a next token needs 2")
    rows = torch.full((len(documents), longest), IGNORE)
    for row, document in zip(rows, documents, strict=True):
        row[: len(document)] = torch.as_tensor(document)
    return rows[:, :-1].masked_fill(rows[:, :-1] == IGNORE, pad_id), rows[:, 1:]
