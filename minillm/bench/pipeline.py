"""minillm's pipeline runtime against torch.distributed.pipelining: the same schedules over the same parts of a model.

    gpipe, 1f1b      ScheduleGPipe, Schedule1F1B                         one part per rank
    interleaved      ScheduleInterleaved1F1B                             two parts per rank
    zero_bubble_v    ScheduleZBVZeroBubble                               two parts per rank, backward split

Both sides run in the same ranks on the same backend, one thread per rank, the same parts of a transformer from the same
weights on the same microbatches. Before anything is timed, a step has to give the same gradients on every rank. Then
seconds per step, of the slowest rank: forward and backward of all microbatches, no optimizer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minillm.bench.comm import slowest
from minillm.bench.counts import settling
from minillm.bench.harness import BenchRow, Comparison, bench_row, check_repeats, seconds_per_call, side_by_side
from minillm.comm import Group, launch
from minillm.model import ModelConfig
from minillm.parallel.pipeline_parallel.runtime import Pipeline
from minillm.parallel.pipeline_parallel.schedule.schedules import SCHEDULES, Schedule
from minillm.parallel.pipeline_parallel.stages import ModelPart, build_parts
from minillm.train import preset

VOCAB, SEQ_LEN, ROWS, LAYERS, MICROBATCHES = 512, 32, 2, 8, 8  # small actions: the runtime's own time shows
SHAPES = ("draft", "target")
WORLD_SIZES = (2, 4)
PEERS = {  # schedule -> torch's
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero_bubble_v": "ScheduleZBVZeroBubble",
}
TOLERANCE = 1e-4  # of a gradient's norm: the order of sums differs


@dataclass
class Contestant:
    """A pipeline and how to run a step of it."""

    parts: Sequence[ModelPart]
    step: Callable[[], object]

    def clear(self) -> None:
        for part in self.parts:
            part.zero_grad()


def run(
    world_sizes: Sequence[int] = WORLD_SIZES,
    shapes: Sequence[str] = SHAPES,
    schedules: Sequence[str] = tuple(PEERS),
    repeats: int = 15,
    timeout: float = 300.0,
) -> list[BenchRow]:
    """A row for each schedule, shape and number of ranks: seconds per step."""
    check_repeats(repeats)
    for world_size in world_sizes:
        if world_size < 2 or MICROBATCHES % world_size or 2 * world_size > LAYERS:
            raise ValueError(
                f"world size {world_size} does not fit {LAYERS} layers and {MICROBATCHES} microbatches: use 2 or 4"
            )
    rows = []
    for world_size in world_sizes:
        for shape in shapes:
            ranks = launch(measure, world_size, shape, tuple(schedules), repeats, timeout=timeout, device=None)
            for name, *found in zip(schedules, *ranks, strict=True):
                label = f"{name}, {shape}, {world_size} ranks, {MICROBATCHES} microbatches: step"
                rows.append(bench_row(label, f"torch {PEERS[name]}", slowest(found), "ms", scale=1e3))
    return rows


def measure(group: Group, shape: str, schedules: Sequence[str], repeats: int) -> list[Comparison]:
    """On each rank, for every schedule: seconds per step."""
    torch.set_num_threads(1)
    config = replace(preset(shape, VOCAB, SEQ_LEN), num_layers=LAYERS, tie_embeddings=False)
    return [_compare(name, config, group, repeats) for name in schedules]


def _compare(name: str, config: ModelConfig, group: Group, repeats: int) -> Comparison:
    schedule = SCHEDULES[name](group.world_size, MICROBATCHES)
    mine, other = _ours(schedule, config, group), _torchs(name, schedule, config, group)
    settle = settling(group.device)

    def sample(contestant: Contestant) -> Callable[[], float]:
        def before() -> None:
            contestant.clear()
            group.barrier()

        return seconds_per_call(contestant.step, before=before, after=settle)

    return side_by_side(lambda: _same_gradients(mine, other, group), sample(mine), sample(other), repeats=repeats)


def _same_gradients(mine: Contestant, other: Contestant, group: Group) -> bool:
    """Whether a step of both gives every parameter the same gradient, on every rank."""
    for each in (mine, other):
        each.clear()
        each.step()
    pairs = [
        (a.grad, b.grad)
        for one, two in zip(mine.parts, other.parts, strict=True)
        for a, b in zip(one.parameters(), two.parameters(), strict=True)
    ]
    same = all(bool(b.norm() > 0) and bool((a - b).norm() <= TOLERANCE * b.norm()) for a, b in pairs)
    return all(group.gather_objects(same))


def _batch(group: Group) -> tuple[Tensor, Tensor]:
    """Tokens and targets: [microbatches * rows, seq]."""
    draw = torch.Generator().manual_seed(0)
    both = torch.randint(VOCAB, (2, MICROBATCHES * ROWS, SEQ_LEN), generator=draw)
    return tuple(both.to(group.device))


def _ours(schedule: Schedule, config: ModelConfig, group: Group) -> Contestant:
    parts = build_parts(config, schedule, group.rank, device=group.device)
    pipeline = Pipeline(parts, schedule, group)
    tokens, targets = (each.chunk(MICROBATCHES) for each in _batch(group))
    size = torch.Size((ROWS, SEQ_LEN, config.hidden_size)), torch.get_default_dtype()

    def loss(part: ModelPart, y: Tensor, microbatch: int) -> Tensor:
        return part.loss(y, targets[microbatch])[0]

    return Contestant(parts, lambda: pipeline.step(tokens, lambda microbatch: size, loss))


def _torchs(name: str, schedule: Schedule, config: ModelConfig, group: Group) -> Contestant:
    from torch.distributed import pipelining

    parts = build_parts(config, schedule, group.rank, device=group.device)
    indices = sorted((place.chunk, part) for place, part in schedule.part_of.items() if place.rank == group.rank)
    stages = [
        pipelining.PipelineStage(module, part, schedule.num_parts, group.device, group=group.process_group)
        for module, (_, part) in zip(parts, indices, strict=True)
    ]
    last = next((part for part in parts if part.last), None)
    make = getattr(pipelining, PEERS[name], None) or getattr(pipelining.schedules, PEERS[name])
    options = {"loss_fn": lambda y, targets: last.loss(y, targets)[0], "scale_grads": False}
    runtime = make(stages if len(stages) > 1 else stages[0], MICROBATCHES, **options)
    tokens, targets = _batch(group)
    given = (tokens,) if any(part.first for part in parts) else ()
    wanted = {"target": targets} if last else {}
    return Contestant(parts, lambda: runtime.step(*given, **wanted, return_outputs=False))
