"""Lab 04's rank programs, second part: clipping, saving and offloading shards.

`FileStore` is the slow memory of the offload exercise. It counts, so that a stream can be told from a bulk load.
"""

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from course.shared.groups import on_groups
from course.shared.sharding import BETAS, EPS, LR, RankRecord, Storages, make_adam
from minillm import measure
from minillm.comm import Group


@dataclass(frozen=True)
class Flat:
    """A flat gradient of `numel` elements, padded with whatever lay in memory, and the norm to clip to."""

    padded: Tensor
    numel: int
    world_size: int
    max_norm: float = math.inf

    def shard(self, rank: int) -> Tensor:
        return self.padded.chunk(self.world_size)[rank].clone()


def run_clip(group: Group, learner: Callable, cases: Sequence[Flat]) -> list[RankRecord | None]:
    """learner(gradient, numel, max_norm, group) -> norm; results: (norm, the gradient afterwards)."""

    def run(case: Flat, part: Group) -> RankRecord:
        shard = case.shard(part.rank)
        with measure.ledger() as led:
            norm = learner(shard, case.numel, case.max_norm, part)
        largest = max((math.prod(event.shape) for event in led.events), default=0)
        return RankRecord((norm, shard), [led.bytes()], led.calls, {"numbers": largest})

    return on_groups(group, cases, run)


def run_whole_state(group: Group, learner: Callable, cases: Sequence[Flat]) -> list[RankRecord | None]:
    """learner(state, numel, group) on the state of an AdamW over this rank's shard, after three steps."""

    def run(case: Flat, part: Group) -> RankRecord:
        shard = nn.Parameter(case.shard(part.rank))
        adam = make_adam([shard])
        for step in range(3):
            shard.grad = case.shard(part.rank).sin() * (step + 1)
            adam.step()
        state = {name: value.clone() for name, value in adam.state[shard].items()}
        with measure.ledger() as led:
            whole = learner(state, case.numel, part)
        return RankRecord(whole, [led.bytes()], led.calls)

    return on_groups(group, cases, run)


class FileStore:
    """Slow memory: one file of float32 per name. Whatever is read is a copy in RAM, and both ways are counted."""

    def __init__(self, folder: str | Path, size: int, names: Sequence[str] = ("m", "v")) -> None:
        self.maps = {n: np.memmap(Path(folder) / f"{n}.f32", np.float32, "w+", shape=(size,)) for n in names}
        self.bytes_read, self.bytes_written, self.copies, self.sources = 0, 0, Storages(), Storages()

    def read(self, name: str, part: slice) -> Tensor:
        """A copy of the numbers in `part`, as a tensor."""
        found = torch.from_numpy(np.array(self.maps[name][part]))
        self.bytes_read += found.nbytes
        self.copies.see(found)
        return found

    def write(self, name: str, part: slice, values: Tensor) -> None:
        """Put `values` where `part` is."""
        place = self.maps[name][part]
        place[:] = values.numpy()
        self.bytes_written += place.nbytes
        self.sources.see(values)

    @property
    def most_held(self) -> int:
        """Bytes at the fullest moment, of what was read or of what was written, with all that shares its memory."""
        return max(self.copies.most_bytes, self.sources.most_bytes)


@dataclass(frozen=True)
class Stream:
    """weights[r] and gradients[k][r]: rank r's shard and its gradient in step k; `chunk` elements fit into memory.

    lr, betas, eps: Adam's."""

    weights: list[Tensor]
    gradients: list[list[Tensor]]
    chunk: int
    lr: float = LR
    betas: tuple[float, float] = BETAS
    eps: float = EPS

    @property
    def world_size(self) -> int:
        return len(self.weights)


def run_stream(group: Group, learner: Callable, cases: Sequence[Stream]) -> list[RankRecord | None]:
    """learner(weights, gradient, store, step, chunk, lr, betas, eps) step by step, the moments in files."""

    def run(case: Stream, part: Group) -> RankRecord:
        weights, found = case.weights[part.rank].clone(), []
        with tempfile.TemporaryDirectory() as folder, measure.ledger() as led:
            store = FileStore(folder, len(weights))
            for step, ranks in enumerate(case.gradients, start=1):
                learner(weights, ranks[part.rank].clone(), store, step, case.chunk, case.lr, case.betas, case.eps)
                found.append(weights.clone())
        held = {"read": store.bytes_read, "written": store.bytes_written, "moments": store.most_held}
        return RankRecord(found, [led.bytes()], led.calls, held)

    return on_groups(group, cases, run)
