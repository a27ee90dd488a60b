"""Which rank is slow: by the work of its own, because everybody's step takes as long as the slowest rank's.

    rank 0   work ████        waiting ░░░░░░░░          every rank waits for rank 2 in the all-reduce,
    rank 1   work ████        waiting ░░░░░░░░          so step times are equal and say nothing
    rank 2   work ████████████                          its own work does

A rank is compared with its peers: the ranks that hold the same parts of the model and compute other rows of the batch.
Stages of a pipeline may differ and are not compared. A rank is slow if the median of its last `window` steps is more
than `factor` times the median of its peers' medians; a median forgives single steps that something else disturbed.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from minillm.train.steptime import StepTime

PHASES = ("input", "forward", "backward", "optimizer", "idle")  # of a rank's own work; communication is waiting


@dataclass(frozen=True)
class Straggler:
    """A slow rank: how many times its peers' seconds a step of its own work takes, and the phase that stands out."""

    rank: int
    factor: float
    phase: str

    def __str__(self) -> str:
        return f"rank {self.rank} takes {self.factor:.1f} times as long as its peers, most of it in {self.phase}"


class StragglerDetector:
    """world_size ranks in lines of `count` peers, `stride` apart: the data-parallel axis of a mesh (`Mesh.stride`).

    count: None if that axis is the outermost, so that a line goes on to the last rank. ValueError for other sizes.
    """

    def __init__(
        self, world_size: int, stride: int = 1, window: int = 10, factor: float = 2.0, count: int | None = None
    ) -> None:
        if world_size < 1 or stride < 1 or world_size % stride:
            raise ValueError(f"stride {stride} does not divide the {world_size} ranks: use the ranks of one replica.")
        self.count = world_size // stride if count is None else count
        if self.count < 1 or world_size % (stride * self.count):
            raise ValueError(f"lines of {count} ranks, {stride} apart, do not divide the {world_size} ranks.")
        if window < 1 or factor <= 1:
            raise ValueError(f"window {window} and factor {factor}: use at least 1 step and a factor above 1.")
        self.world_size, self.stride, self.window, self.factor = world_size, stride, window, factor
        self._steps: list[deque[Sequence[float]]] = [deque(maxlen=window) for _ in range(world_size)]

    def add(self, rank: int, phases: Sequence[float]) -> None:
        """Records the seconds of a rank's own work in one step, by `PHASES`."""
        self._steps[rank].append(phases)

    def stragglers(self) -> list[Straggler]:
        """The slow ranks, slowest first; none before there are `window` steps of each."""
        if any(len(steps) < self.window for steps in self._steps):
            return []
        usual = [median(sum(step) for step in steps) for steps in self._steps]
        found = []
        for rank, own in enumerate(usual):
            first = rank - rank // self.stride % self.count * self.stride
            peers = [r for r in range(first, first + self.count * self.stride, self.stride) if r != rank]
            theirs = median(usual[r] for r in peers) if peers else 0.0
            if theirs > 0 and own > self.factor * theirs:
                found.append(Straggler(rank, own / theirs, self._phase(rank, peers)))
        return sorted(found, key=lambda each: -each.factor)

    def _phase(self, rank: int, peers: Sequence[int]) -> str:
        """Where the rank loses most seconds to its peers."""

        def usual(of: int, phase: int) -> float:
            return median(step[phase] for step in self._steps[of])

        excess = [usual(rank, i) - median(usual(peer, i) for peer in peers) for i in range(len(PHASES))]
        return PHASES[excess.index(max(excess))]


def own_work(time: StepTime) -> tuple[float, ...]:
    """A step's seconds by `PHASES`, without the waiting."""
    return tuple(getattr(time, phase) for phase in PHASES)
