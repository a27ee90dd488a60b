"""Lab 10's measurements: what saves hold up, other layouts, a run whose ranks are killed, slow and corrupt ranks.

Every folder is temporary, and every rank is started by `launch`, which leaves none behind.
"""

import itertools
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from course.lab10_fault_tolerance.experiments_breaks import ANSWERS, left_out
from course.lab10_fault_tolerance.loop import PARTS
from minillm import measure
from minillm.comm import Group, RankError, launch
from minillm.data import Tokens
from minillm.model import ModelConfig
from minillm.predict import faults
from minillm.train import ParallelConfig, TrainConfig, Trainer, fit
from minillm.train.checkpoint.manifest import Manifest, committed
from minillm.train.checkpoint.reader import has_checkpoint, read_whole, restore
from minillm.train.checkpoint.writer import Checkpointer
from minillm.train.fault_tolerance.elastic import accumulate_for
from minillm.train.fault_tolerance.goodput import FILE, Goodput, read_goodput
from minillm.train.fault_tolerance.replica_check import check_replicas
from minillm.train.fault_tolerance.straggler import StragglerDetector
from minillm.train.metrics import read_metrics
from minillm.train.strategies.hybrid import make_strategy

TINY = ModelConfig(53, 16, 32, 2, 4, 2, max_seq_len=16)
WIDE = ModelConfig(512, 192, 512, 4, 4, 4, max_seq_len=16)  # 8 MB of float32 weights, 24 MB with Adam's moments
WINDOWS, STEPS, SAVE_EVERY, RANKS = 12, 24, 4, 3
KILLS = ((7, 3, 1), (14, 2, 1))  # after this step, of so many ranks, this one is killed
LAYOUTS = {
    "dp 2 x tp 2": ParallelConfig(dp=2, tp=2),
    "dp 3, ZeRO 1": ParallelConfig(dp=3, zero=1),
    "dp 2 x pp 2": ParallelConfig(dp=2, pp=2, accumulate=2),
}


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="minillm-lab10-") as place:
        yield Path(place)


def make(group: Group | None, layout: ParallelConfig, model: ModelConfig = TINY, **options: Any) -> Trainer:
    """A trainer whose steps have `WINDOWS` windows, whatever the layout."""
    torch.set_num_threads(1)
    text = Tokens((torch.arange(4000, device="cpu") ** 2 % 53).numpy().astype("uint16"), 53, 0, 1, 12000)
    options = {"seq_len": 16, "batch_size": 1, "accumulate": accumulate_for(WINDOWS, 1, layout.dp)} | options
    config = TrainConfig(model, **{"steps": STEPS, "warmup_steps": 4, "lr": 1e-2} | options)
    return Trainer(config, text, workers=0, parallel=make_strategy(group, layout) if group else None)


# Saves.


@dataclass(frozen=True)
class Save:
    """Of one rank: bytes it wrote, seconds that training stood still and that it copied in the save that was disturbed
    least, bytes of tensors at most."""

    nbytes: int
    stall_s: float
    copy_s: float
    peak: int


def save_both_ways(group: Group, place: Path) -> dict[str, Any]:
    """A save in the foreground and one in the background, of a ZeRO-3 trainer after a step."""
    trainer = make(group, ParallelConfig(dp=group.world_size, zero=3), WIDE)
    trainer.step()
    found: dict[str, Any] = {}
    for name, background in (("foreground", False), ("background", True)):
        saver = Checkpointer(place / name, group, keep=1, background=background)
        saver.save(trainer)  # files and buffers are there afterwards
        saver.finish()
        if background:  # the buffer is made by the first save; a second saver shows what it takes
            saver = Checkpointer(place / name, group, keep=1, background=True)
        group.barrier()
        with measure.memory() as seen:
            saver.save(trainer)
            saver.finish()
        stats = []
        for _ in range(5):
            group.barrier()
            saver.save(trainer)
            stats.append(saver.stats)
            saver.finish()
        least = min(stats, key=lambda each: each.stall_s)
        found[name] = Save(least.nbytes, least.stall_s, least.copy_s, seen.peak.total)
    total = Manifest.read(committed(place / "foreground")[-1]).nbytes
    trainer.close()
    return found | {"total": total}


def saves(ranks: int = 2) -> list[dict[str, Any]]:
    with folder() as place:
        return launch(save_both_ways, ranks, place, device="cpu", timeout=120)


# Another layout.


def through_layouts(group: Group, place: Path) -> list[tuple[str, int, int, int]]:
    """Saved by ZeRO 3 on all ranks, restored in each of `LAYOUTS`: name, tensors that differ, bytes read, held."""
    first = make(group, ParallelConfig(dp=group.world_size, zero=3))
    first.step()
    Checkpointer(place, group).save(first)
    first.close()
    _, whole = read_whole(committed(place)[-1])
    found = []
    for name, layout in LAYOUTS.items():
        part = group.subgroup(range(layout.world_size), name)
        if part.rank < 0:
            continue
        trainer = make(part, layout)
        done = restore(trainer, place)
        parts = trainer.local_state().parts()
        other = sum(not torch.equal(mine, at.cut(whole[key])) for key, (mine, at) in parts.items())
        found.append((name, other, done.bytes_read, done.bytes_held))
        trainer.close()
    return found


def reshard() -> list[list[tuple[str, int, int, int]]]:
    """By rank."""
    with folder() as place:
        return launch(through_layouts, 4, place, device="cpu", timeout=120)


# A run whose ranks are killed.


@dataclass(frozen=True)
class ElasticRun:
    """Of a run: loss and ranks by step, what each attempt did (rows of time.jsonl), seconds by use, attempts."""

    losses: list[float]
    ranks: list[int]
    positions: list[int]
    events: list[dict[str, Any]]
    spent: Goodput
    killed: list[str]


def train(group: Group, place: Path, kills: tuple[tuple[int, int, int], ...]) -> int:
    """One attempt, from the last checkpoint on. A rank of `kills` ends itself as the OOM killer would end it."""
    trainer = make(group, ParallelConfig(dp=group.world_size))

    def on_step(trainer: Trainer, step: Any) -> None:
        if (trainer.steps_done, group.world_size) in [kill[:2] for kill in kills]:
            group.barrier()  # rank 0 has noted the step
            if (trainer.steps_done, group.world_size, group.rank) in kills:
                os.kill(os.getpid(), signal.SIGKILL)

    how = {"resume": has_checkpoint(place), "save_every": SAVE_EVERY, "progress": False, "tensorboard": False}
    return fit(trainer, place, on_step=on_step, **how).steps_done


def supervise(place: Path, ranks: int, kills: tuple[tuple[int, int, int], ...] = ()) -> list[str]:
    """An elastic agent in eight lines: run, and after a failure run again with the ranks that are left."""
    failures = []
    while True:
        try:
            launch(train, ranks, place, kills, device="cpu", timeout=120)
            return failures
        except RankError as error:
            failures.append(str(error).splitlines()[0])
            ranks -= 1


def run(kills: tuple[tuple[int, int, int], ...] = KILLS) -> ElasticRun:
    """On `RANKS` at first; on one that nobody disturbs, if there are no kills."""
    with folder() as place:
        failures = supervise(place, RANKS if kills else 1, kills)
        rows = [row for row in read_metrics(place) if "loss" in row]
        events = [json.loads(line) for line in (place / FILE).read_text().splitlines() if line]
        columns = ([row[name] for row in rows] for name in ("loss", "ranks", "position"))
        return ElasticRun(*columns, events, read_goodput(place), failures)


# Intervals.

JOB_S, SAVE_S, RESTART_S, MTBF_S = 1e7, 30.0, 300.0, 3 * 3600.0
INTERVALS = tuple(100.0 * 2 ** (power / 2) for power in range(13))


def intervals(play: Callable[..., dict[str, float]] | None = None) -> dict[float, dict[str, float]]:
    """A job with the same failures at different intervals: seconds by use. play: the learner's, or the course's."""
    play = play or ANSWERS.play
    draw = random.Random(0)
    failures = tuple(itertools.accumulate(draw.expovariate(1 / MTBF_S) for _ in range(4000)))
    best = faults.young_interval(SAVE_S, MTBF_S)
    return {each: play(JOB_S, each, SAVE_S, RESTART_S, failures) for each in sorted({*INTERVALS, best})}


def forgotten() -> dict[str, tuple[int | None, float]]:
    """By what a resume leaves out: the first loss that differs, and the largest difference."""
    return {part or "nothing": left_out(part) for part in (None, *PARTS)}


# Slow, and silently wrong.


def work_and_meet(group: Group, slow: int | None, steps: int = 10) -> list[tuple[float, float]]:
    """(seconds of the step, seconds waited): each rank sleeps for its work, then all meet in an all-reduce."""
    found = []
    for _ in range(steps):
        start = time.perf_counter()
        with measure.ledger() as led:
            time.sleep(0.06 if group.rank == slow else 0.02)
            group.all_reduce(torch.ones(4))
        found.append((time.perf_counter() - start, led.waited))
    return found


def slow_rank(slow: int = 2) -> list[list[tuple[float, float]]]:
    """[steps][ranks] of 4 ranks, one of which takes three times as long for its own work."""
    ranks = launch(work_and_meet, 4, slow, device="cpu")
    return [list(step) for step in zip(*ranks, strict=True)]


def named(steps: list[list[tuple[float, float]]]) -> list[int]:
    """The slow ranks by minillm's detector."""
    detector = StragglerDetector(len(steps[0]), window=len(steps))
    for step in steps:
        for rank, (total, waited) in enumerate(step):
            detector.add(rank, (0.0, total - waited, 0.0, 0.0, 0.0))
    return [each.rank for each in detector.stragglers()]


def flip_a_bit(group: Group, at_step: int = 3) -> dict[str, Any]:
    """Replicas in training; in a second run a weight of rank 1 loses a bit. Losses of the step after, what is found."""
    found: dict[str, Any] = {}
    for flipped in (False, True):
        trainer = make(group, ParallelConfig(dp=group.world_size))
        for _ in range(at_step):
            trainer.step()
        name, weight = next(iter(trainer.model.named_parameters()))
        if flipped and group.rank == 1:
            weight.data.view(torch.int32).view(-1)[11 * 16] ^= 1 << 22  # of the 23 bits of the fraction
        found["loss", flipped] = trainer.step().loss
        found["named", flipped] = check_replicas(trainer.model.named_parameters(), group)
        found["name"] = name
        trainer.close()
    return found


def corruption() -> list[dict[str, Any]]:
    return launch(flip_a_bit, 3, device="cpu")


# Too many saves, and a disk that is too slow for them.


class SlowDisk(Checkpointer):
    """An emulated disk that takes `write_s` more for every file."""

    write_s = 0.08

    def _write_parts(self, *given: Any) -> Any:
        time.sleep(self.write_s)
        return super()._write_parts(*given)


def too_often(
    every: tuple[int, ...] = (1, 4, 16), steps: int = 16, step_s: float = 0.02
) -> dict[tuple[int, bool], float]:
    """Share of the time that training stands still, by steps between saves and whether they go on in the background."""
    found = {}
    for count in every:
        for background in (False, True):
            with folder() as place:
                trainer = make(None, ParallelConfig())
                saver, stalled, start = SlowDisk(place, background=background, keep=1), 0.0, time.perf_counter()
                for step in range(1, steps + 1):
                    time.sleep(step_s)
                    if step % count == 0:
                        saver.save(trainer)
                        stalled += saver.stats.stall_s
                found[count, background] = stalled / (time.perf_counter() - start)
                saver.finish()
                trainer.close()
    return found
