"""Which sample goes to which rank: a pure function of (seed, position), so resuming is an addition.

All epochs form one endless stream of samples; epoch e is the permutation drawn from (seed, e). A step takes the next
`world_size * batch_size` samples of the stream and deals them out like cards:

    stream    |-------- epoch 0 --------|-------- epoch 1 --------| ...       D = 10 samples, 4 ranks, batch 2
    step 0     0 1 2 3 0 1 2 3                                                 the number is the rank that gets it
    step 1                     0 1       2 3 0 1 2 3                           a step may span two epochs

Tail rule: nothing is dropped or repeated. Where an epoch does not fill its last step, the next epoch's first samples
do, so every sample is seen exactly once per epoch and all ranks make the same number of full steps. (torch's
DistributedSampler instead repeats N * ceil(D/N) - D samples per epoch, and repeats its order unless told the epoch.)

The stream knows nothing of ranks: the position reached is the whole state, valid for any later world_size or batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class ShardedSampler:
    """`batch_size` is per rank. Without `shuffle` every epoch is 0, 1, ..., num_samples - 1."""

    num_samples: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self):
        for name in ("num_samples", "batch_size", "world_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in a world of {self.world_size}: use 0..{self.world_size - 1}")
        if self.seed < 0:
            raise ValueError(f"seed {self.seed} must not be negative")

    @property
    def global_batch(self) -> int:
        """Samples all ranks together take per step: what a step adds to the position."""
        return self.batch_size * self.world_size

    def indices(self, position: int) -> np.ndarray:
        """[batch_size] this rank's samples of the step that begins at `position` of the stream."""
        mine = position + self.rank + self.world_size * np.arange(self.batch_size)
        epochs, offsets = np.divmod(mine, self.num_samples)
        if not self.shuffle:
            return offsets
        drawn = np.empty_like(offsets)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            drawn[here] = permutation(self.num_samples, self.seed, int(epoch))[offsets[here]]
        return drawn

    def one_pass(self) -> Iterator[np.ndarray]:
        """For evaluation: every sample exactly once over all ranks, unshuffled, in ceil(D / global_batch) batches.

        The last batches may differ by one sample between ranks and may be empty: weigh losses by tokens.
        """
        for start in range(0, self.num_samples, self.global_batch):
            yield np.arange(start + self.rank, min(start + self.global_batch, self.num_samples), self.world_size)


@lru_cache(maxsize=4)
def permutation(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """The order of an epoch, the same on every rank."""
    order = np.random.default_rng([seed, epoch]).permutation(num_samples)
    order.flags.writeable = False
    return order
