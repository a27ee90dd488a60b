"""Batches of one rank, endless, shuffled, prefetched, and resumable at the exact sample.

with Loader(TokenDataset(tokens, seq_len=256), batch_size=8, rank=group.rank, world_size=group.world_size) as loader:
    for batch in loader:
        ...
        state = loader.state_dict()     # after the batch just taken, however far the workers have run ahead
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from minillm.data.dataset import TokenDataset
from minillm.data.prefetch import Prefetcher
from minillm.data.sampler import ShardedSampler


class Batch(NamedTuple):
    """`inputs`, `targets`: int64 [batch_size, seq_len]; `indices`: which samples; `epoch`: of the first of them."""

    inputs: torch.Tensor
    targets: torch.Tensor
    indices: np.ndarray
    epoch: int


class Loader:
    """Iterates `Batch`es of this rank. The stream of samples depends on `seed` alone (see sampler.py)."""

    def __init__(
        self,
        dataset: TokenDataset,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        workers: int = 1,
        depth: int = 2,
    ):
        self.dataset = dataset
        self.sampler = ShardedSampler(len(dataset), batch_size, rank, world_size, seed, shuffle)
        self.position = 0  # samples of the stream taken by all ranks so far
        self._workers, self._depth = workers, depth
        self._prefetcher: Prefetcher[Batch] | None = None
        self._earlier = (0.0, 0.0)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        step = self.sampler.global_batch
        if self._prefetcher is None:
            load, start = self.load, self.position
            self._prefetcher = Prefetcher(lambda k: load(start + k * step), None, self._workers, self._depth)
        try:
            batch = next(self._prefetcher)
        except BaseException:  # also Ctrl-C: the batch was not taken, the next call starts again from it
            self.close()
            raise
        self.position += step
        return batch

    def load(self, position: int) -> Batch:
        """This rank's batch of the step that begins at `position`, a pure function of it."""
        indices = self.sampler.indices(position)
        return Batch(*self.dataset.batch(indices), indices, position // self.sampler.num_samples)

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self.position / self.sampler.num_samples

    @property
    def waited_s(self) -> float:
        """Seconds the consumer waited for batches."""
        return self._earlier[0] + (self._prefetcher.waited_s if self._prefetcher else 0.0)

    @property
    def worked_s(self) -> float:
        """Seconds spent making the batches handed out, which prefetching can hide."""
        return self._earlier[1] + (self._prefetcher.worked_s if self._prefetcher else 0.0)

    def state_dict(self) -> dict[str, int]:
        """The position in the data: equal on all ranks, valid for any world_size, batch_size and number of workers."""
        return {"position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues after the last batch taken when `state` was saved. Raises ValueError if the data differ."""
        for name, ours in self._identity().items():
            if state.get(name) != ours:
                raise ValueError(
                    f"cannot resume: saved with {name} {state.get(name)}, this run has {ours}; use the same"
                )
        self.close()
        self.position = state["position"]

    def close(self) -> None:
        """Ends the worker threads; iterating again continues where this stopped."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._earlier = (self.waited_s, self.worked_s)
            self._prefetcher = None

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _identity(self) -> dict[str, int]:
        sampler = self.sampler
        names = {"samples": sampler.num_samples, "seq_len": self.dataset.seq_len, "crc32": self.dataset.crc32}
        return names | {"seed": sampler.seed, "shuffle": int(sampler.shuffle)}
