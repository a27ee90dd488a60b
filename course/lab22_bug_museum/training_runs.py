"""A short training run with patches planted on its ranks, beside the same run by one process with minillm's own code.

    record = Run(Scene(ParallelConfig(dp=2)))(patches, seed)
    record.steps[0].grad_norm, record.alone[0].grad_norm

Everything runs through `Trainer`, the strategies and the loader, as `python -m minillm train` does; the model and the
text are small enough for a run to take about a second.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
from torch import Tensor

from course.kit.receipts import Row, row
from course.shared.faults.patches import Patch, planted
from course.shared.faults.strategy import PlantedStrategy
from minillm.comm import Group, launch
from minillm.data import Tokens
from minillm.equivalence import cases_of, compare
from minillm.measure import Ledger, ledger
from minillm.model import ModelConfig
from minillm.parallel.sharding.placement import Partial, Placement
from minillm.train import TrainConfig, Trainer
from minillm.train.fault_tolerance.replica_check import hashes
from minillm.train.parallel_config import ParallelConfig
from minillm.train.steptime import Step
from minillm.train.strategies.hybrid import make_strategy
from minillm.train.strategies.single_device import SingleDevice

Job = tuple[Sequence[Patch], int]  # what is planted, and the seed
HANGS_AFTER_S = 20.0
SMALL = ModelConfig(64, 16, 32, 2, 4, 2, head_dim=4, max_seq_len=32)


@dataclass(frozen=True)
class Scene:
    """What is trained. windows: per rank and microbatch; settings: of `TrainConfig`, (name, value)."""

    layout: ParallelConfig
    model: ModelConfig = SMALL
    steps: int = 6
    windows: int = 2
    seq_len: int = 16
    settings: tuple[tuple[str, Any], ...] = ()

    def config(self, seed: int) -> TrainConfig:
        """Of each rank."""
        return self._config(seed, self.windows, self.layout.accumulate)

    def alone(self, seed: int) -> TrainConfig:
        """The same steps for one process: all windows of a step in one microbatch."""
        return self._config(seed, self.windows * self.layout.accumulate * self.layout.dp, 1)

    def _config(self, seed: int, windows: int, accumulate: int) -> TrainConfig:
        how = {"lr": 1e-2, "warmup_steps": 2, "steps": self.steps, "seed": seed % 1000} | dict(self.settings)
        return TrainConfig(self.model, self.seq_len, windows, accumulate, **how)


@dataclass(frozen=True)
class RankRecord:
    """What one rank returns. windows: indices of its windows in the first step, all microbatches'; gradients: whole, of
    that step.

    bits: a hash of each of its parameters after the last step, by its name and which part of it that is.
    """

    steps: tuple[Step, ...]
    ledger: Ledger
    windows: tuple[int, ...]
    gradients: dict[str, Tensor]
    norm: float
    bits: dict[tuple[str, str], int]


@dataclass(frozen=True)
class Record:
    """The run of all ranks, and of one process alone."""

    scene: Scene
    ranks: Sequence[RankRecord]
    alone: RankRecord

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.ranks[0].steps

    @property
    def details(self) -> list[float]:
        """Numbers in which two wrong runs differ, to three digits: multiples and errors of wrong gradients."""
        wrong = self.wrong_gradients()
        return [float(f"{value:.3g}") for value in (sum(map(self.ratio, wrong)), *list(wrong.values())[:2])]

    def wrong_gradients(self, tolerance: float = 2e-3) -> dict[str, float]:
        """Parameters whose gradient is not one process's, with |difference| / |gradient|, the worst first."""
        errors = {}
        for name, right in self.alone.gradients.items():
            found = self.ranks[0].gradients.get(name)
            errors[name] = float("inf") if found is None else float((found - right).norm() / right.norm().clamp(1e-12))
        worst = sorted(errors, key=errors.__getitem__, reverse=True)
        return {name: errors[name] for name in worst if not errors[name] <= tolerance}

    def ratio(self, name: str) -> float:
        """The gradient of a parameter as a multiple of one process's: <found, right> / <right, right>."""
        right, found = self.alone.gradients[name].flatten(), self.ranks[0].gradients[name].flatten()
        return float(found @ right / (right @ right))

    def drifted(self) -> list[str]:
        """Parameters that several ranks hold and in which they differ after the last step."""
        held = dict.fromkeys(key for rank in self.ranks for key in rank.bits)
        found = [key for key in held if len({rank.bits[key] for rank in self.ranks if key in rank.bits}) > 1]
        return list(dict.fromkeys(name for name, _ in found))

    @property
    def copies(self) -> int:
        """How many parameters, or slices of them, more than one rank holds."""
        held = Counter(key for rank in self.ranks for key in rank.bits)
        return sum(count > 1 for count in held.values())


@dataclass(frozen=True)
class Run:
    """The `run` of an exhibit: (patches, seed) -> Record. `many` has one launch for all that is to be run."""

    scene: Scene

    def __call__(self, patches: Sequence[Patch], seed: int) -> Record:
        return self.many([(patches, seed)])[0]

    def many(self, jobs: Sequence[Job]) -> list[Record]:
        """A record for each job."""
        return together([(self, *job) for job in jobs])


def together(jobs: Sequence[tuple[Run, Sequence[Patch], int]]) -> list[Record]:
    """A record for each (run, patches, seed), all of the same number of ranks, in one launch."""
    work = [(tuple(patches), run.scene, seed, text(seed)) for run, patches, seed in jobs]
    [ranks] = {scene.layout.world_size for _, scene, _, _ in work}
    by_rank = launch(_on_rank, ranks, work, timeout=HANGS_AFTER_S)
    return [
        Record(scene, found, _alone(scene.alone(seed), seed))
        for (_, scene, seed, _), *found in zip(work, *by_rank, strict=True)
    ]


@lru_cache(64)
def _alone(config: TrainConfig, seed: int) -> RankRecord:
    return _record(SingleDevice(), config, text(seed))


@lru_cache(64)
def text(seed: int, count: int = 4096, words: int = 64) -> Tokens:
    """A text in which the last word says a lot about the next one: a loss that falls within a few steps."""
    draw = np.random.default_rng(seed)
    after = draw.integers(words, size=(words, 2))
    found = np.zeros(count, dtype=np.uint16)
    for place in range(1, count):
        found[place] = after[found[place - 1], draw.integers(2)] if draw.random() < 0.9 else draw.integers(words)
    return Tokens(found, words, 0, 1, count)


@dataclass(frozen=True)
class Oracle:
    """A proof for `Exhibit`: each layout against one process in float64, with the patches on every rank."""

    layouts: Sequence[ParallelConfig]
    case: str = ""

    def __call__(self, patches: Sequence[Patch]) -> list[Row]:
        found = compare(list(self.layouts), self._cases, steps=2, strategy=PlantedStrategy(tuple(patches)))
        return [row(f"oracle, {each.layout}: within 1e-10", True, each.ok) for each in found]

    def _cases(self, layout: ParallelConfig) -> dict:
        known = cases_of(layout)
        name = self.case if self.case in known else next(iter(known))
        return {name: known[name]}


def _on_rank(group: Group, work: Sequence[tuple[tuple[Patch, ...], Scene, int, Tokens]]) -> list[RankRecord]:
    found = []
    for (patches, layout), jobs in groupby(work, key=lambda job: (job[0], job[1].layout)):
        with planted(patches), make_strategy(group, layout) as strategy:
            found += [_record(strategy, scene.config(seed), tokens) for _, scene, seed, tokens in jobs]
    return found


def _record(strategy: SingleDevice, config: TrainConfig, tokens: Tokens) -> RankRecord:
    trainer = Trainer(config, tokens, parallel=strategy)
    try:
        starts = (trainer.loader.sampler.global_batch * microbatch for microbatch in range(config.accumulate))
        windows = tuple(window for start in starts for window in trainer.loader.load(start).indices.tolist())
        start = trainer.loader.state_dict()
        trainer.backward()
        strategy.prepare_gradients()
        norm = float(strategy.grad_norm(trainer.updater.parameters))
        gradients = {name: gradient.clone() for name, gradient in strategy.gradients().items()}
        trainer.updater.zero_grad()
        trainer.loader.load_state_dict(start)
        with ledger() as led:
            steps = [trainer.step()]
        steps += [trainer.step() for _ in range(config.steps - 1)]
        placements, parts = strategy.weight_placements, strategy.parts()
        bits = hashes(((name, _part(placements[name])), part) for name, part in parts.items())
        return RankRecord(tuple(steps), led, windows, gradients, norm, bits)
    finally:
        trainer.loader.close()


def _part(placement: Placement) -> str:
    """Which part of a parameter it is, the same text for all ranks that hold that part."""
    inside = [part.of if isinstance(part, Partial) else part for part in placement.parts]
    return " ".join(str(replace(part, copy=0)) for part in inside)
