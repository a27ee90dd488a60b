"""Lab 06's measurements: every schedule on real ranks, on devices that are emulated by sleeping and on this machine's.

Emulated: each action lasts as long as a device of known speed would take; what is left after computing is slept. So two
cores behave like four devices, and times can be predicted. The computing is real: gradients are compared with those of
one process, messages are counted.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from course.shared.groups import first_ranks
from minillm import measure
from minillm.comm import Group, launch
from minillm.model import ModelConfig, Transformer
from minillm.parallel.pipeline_parallel.runtime import Pipeline
from minillm.parallel.pipeline_parallel.schedule import schedules
from minillm.parallel.pipeline_parallel.schedule.actions import NAME
from minillm.parallel.pipeline_parallel.schedule.schedules import (
    Action,
    Durations,
    Schedule,
    Timeline,
    observed,
    simulate,
)
from minillm.parallel.pipeline_parallel.stages import balance, build_parts, layer_costs
from minillm.predict.training import pipeline as predict

MODEL = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=8, num_heads=2, num_kv_heads=1, max_seq_len=32
)
SEQ, ROWS = 8, 1  # tokens and rows of a microbatch
DISTURBED = 1.15  # times the planned duration
FORWARD_S = 0.04  # of an emulated stage; a whole backward takes twice that, half of it for the weights
PRINTED_CHART = """
Stage 0: F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7
Stage 1:    F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
Stage 2:       F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
Stage 3:          F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
"""  # 1F1B as it is often printed


@dataclass(frozen=True)
class Job:
    """One step of one schedule. speed: seconds of each stage's forward on an emulated device; None: not emulated.

    census: also follow the bytes of activations, which slows the ranks down.
    """

    schedule: str
    stages: int = 4
    microbatches: int = 8
    speed: tuple[float, ...] | None = (FORWARD_S,) * 4
    config: ModelConfig = MODEL
    seq: int = SEQ
    rows: int = ROWS
    census: bool = False

    @property
    def built(self) -> Schedule:
        return schedules.SCHEDULES[self.schedule](self.stages, self.microbatches)

    @property
    def durations(self) -> Durations | None:
        """Of each part; a chunk that is one of several of a stage takes its share."""
        if self.speed is None:
            return None
        schedule = self.built
        share = self.stages / schedule.num_parts
        rank_of = {part: place.rank for place, part in schedule.part_of.items()}
        forward = [self.speed[rank_of[part]] * share for part in range(schedule.num_parts)]
        return Durations(F=forward, B=[2 * f for f in forward], W=forward)


@dataclass(frozen=True)
class PipelineRecord:
    """What one rank saw. error: of its gradients, relative to one process; parameters: elements it holds;
    activation: bytes of them at the fullest moment (0 without a census)."""

    ledger: measure.Ledger
    peak_in_flight: float
    messages: int
    bytes: int
    error: float
    loss: float
    parameters: int
    activation: int = 0


# Rank programs.


def tokens(job: Job) -> Tensor:
    """[microbatches, rows, seq + 1] of the global batch."""
    draw = torch.Generator().manual_seed(7)
    return torch.randint(job.config.vocab_size, (job.microbatches, job.rows, job.seq + 1), generator=draw)


def one_process(job: Job) -> dict[str, Tensor]:
    """The gradients that one process has, by name."""
    return _one_process(replace(job, schedule="gpipe", speed=None, stages=1, census=False))


@functools.cache
def _one_process(job: Job) -> dict[str, Tensor]:
    batch = tokens(job)
    model = Transformer(job.config, seed=0, dtype=torch.float64)
    loss, count = model(batch[..., :-1].flatten(0, 1), targets=batch[..., 1:].flatten(0, 1))
    (loss / count).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def step(group: Group, job: Job, ranges: Sequence[range] | None = None) -> PipelineRecord:
    """One step of a job; the model is float64, so that another order of additions is all that is left of an error."""
    schedule, batch = job.built, tokens(job)
    parts = build_parts(job.config, schedule, group.rank, ranges or even(job, schedule), seed=0, dtype=torch.float64)
    pipeline = Pipeline(parts, schedule, group, pace=pace(job, schedule, group.rank))
    count = batch[..., 1:].numel()

    def loss(part: Any, y: Tensor, m: int) -> Tensor:
        return part.loss(y, batch[m, :, 1:])[0] / count

    shape = torch.Size((job.rows, job.seq, job.config.hidden_size)), torch.float64
    group.barrier()
    held = measure.memory(nn.ModuleList(parts))
    with measure.ledger() as led, held if job.census else contextlib.nullcontext():
        total = pipeline.step([x[:, :-1] for x in batch], lambda m: shape, loss)
    pipeline.finish()
    right = one_process(job)
    error = max(
        relative(p.grad, right[name]) if p.grad is not None else float("inf")
        for part in parts
        for name, p in part.named_parameters()
    )
    sent = [event for event in led.events if event.op in ("send", "exchange", "recv")]
    numel = sum(p.numel() for part in parts for p in part.parameters())
    return PipelineRecord(
        led,
        pipeline.peak_in_flight,
        sum(event.messages for event in sent),
        sum(event.bytes for event in sent),
        error,
        total.item(),
        numel,
        held.peak.activation if job.census else 0,
    )


def even(job: Job, schedule: Schedule) -> list[range]:
    """As many layers in every part."""
    layers = job.config.num_layers
    edges = [part * layers // schedule.num_parts for part in range(schedule.num_parts + 1)]
    return [range(*pair) for pair in itertools.pairwise(edges)]


def pace(job: Job, schedule: Schedule, rank: int) -> Callable[[Action], float] | None:
    """Seconds that each action of this rank should last on an emulated device."""
    if (durations := job.durations) is None:
        return None
    return lambda action: durations.of(action.kind, schedule.part_of[schedules.Place(rank, action.chunk)])


def relative(found: Tensor, right: Tensor) -> float:
    return ((found - right).norm() / right.norm()).item()


def all_steps(group: Group, jobs: Sequence[Job]) -> list[PipelineRecord | None]:
    """Every job on the first `stages` ranks; one step without a clock first, which connects the ranks."""
    groups = first_ranks(group, (job.stages for job in jobs))
    for own in groups.values():
        if own.rank >= 0:
            step(own, Job("gpipe", own.world_size, 2, None))
    return [best_of_two(groups[job.stages], job) if groups[job.stages].rank >= 0 else None for job in jobs]


def best_of_two(group: Group, job: Job) -> PipelineRecord:
    """A step; on emulated devices the quicker of two if something else on this machine got in the way."""
    first = step(group, job)
    if job.speed is None or took(group, first) <= DISTURBED * planned(job).makespan:
        return first
    return min(first, step(group, job), key=lambda found: took(group, found))


def took(group: Group, found: PipelineRecord) -> float:
    """Seconds from the first action of any rank to the last; the same number on every rank."""
    spans = [span for span in found.ledger.spans if NAME.fullmatch(span.name)]
    ends = group.gather_objects((min(span.start for span in spans), max(span.end for span in spans)))
    return max(end for _, end in ends) - min(start for start, _ in ends)


def run(jobs: Sequence[Job]) -> dict[Job, list[PipelineRecord]]:
    """Each job's findings by rank, in one launch."""
    ranks = launch(all_steps, max(job.stages for job in jobs), list(jobs), device="cpu")
    return {job: [rank[i] for rank in ranks[: job.stages]] for i, job in enumerate(jobs)}


# What is made of it.


def measured(job: Job, ranks: Sequence[PipelineRecord]) -> Timeline:
    """The bars that the ranks measured, in seconds."""
    return observed(job.built, [rank.ledger for rank in ranks])


def planned(job: Job, line: Timeline | None = None) -> Timeline:
    """The bars of the plan: for an emulated device, or with the mean durations of a measured `line`."""
    if line is None:
        return simulate(job.built, job.durations)
    schedule = line.schedule
    took: dict[tuple[str, int], list[float]] = {}
    for rank, bars in enumerate(line.bars):
        for bar in bars:
            part = schedule.part_of[schedules.Place(rank, bar.action.chunk)]
            took.setdefault((bar.action.kind, part), []).append(bar.end - bar.start)
    mean = {key: sum(seconds) / len(seconds) for key, seconds in took.items()}
    parts = range(schedule.num_parts)
    forward, weight = ([mean.get((kind, part), 0.0) for part in parts] for kind in "FW")
    backward = [mean.get(("B", part), mean.get(("I", part), 0.0) + weight[part]) for part in parts]
    return simulate(schedule, Durations(F=forward, B=backward, W=weight))


def idle_formula(job: Job) -> float | None:
    """The closed form of the idle share where there is one, all stages alike."""
    n, m, f = job.stages, job.microbatches, FORWARD_S
    if job.schedule in ("gpipe", "1f1b"):
        return predict.idle_share(n, m)
    if job.schedule == "interleaved":
        return predict.idle_share(n, m, chunks=2)
    work = 3 * m * f
    if job.schedule == "zero_bubble" and m >= n:
        idle = predict.zero_bubble_idle(n, f, 2 * f, f)
        return idle / (work + idle)
    if job.schedule == "zero_bubble_v" and m >= 2 * n - 1:
        idle = predict.zero_bubble_v_idle(n, f / 2)
        return idle / (work + idle)
    return None


def rows_of(found: dict[Job, list[PipelineRecord]]) -> list[dict[str, Any]]:
    """One row per job: predicted and measured, ready for JSON."""
    rows = []
    for job, ranks in found.items():
        line, plan = measured(job, ranks), planned(job)
        rows.append(
            {"schedule": job.schedule, "stages": job.stages, "microbatches": job.microbatches, "emulated": True}
            | {"planned_s": plan.makespan, "measured_s": line.makespan}
            | {"planned_idle": plan.idle_share, "measured_idle": line.idle_share}
            | {"formula_idle": idle_formula(job) if len(set(job.speed or ())) == 1 else None}
            | {"in_flight": [rank.peak_in_flight for rank in ranks], "messages": sum(rank.messages for rank in ranks)}
        )
    return rows


def uneven_stages(stages: int = 4) -> dict[str, tuple[float, ...]]:
    """Seconds of each emulated stage's forward, FORWARD_S on average, for a small model with a large vocabulary (its
    head costs 1.8 times as much as a layer): as many layers each, and balanced."""
    config = replace(MODEL, vocab_size=512)
    costs = layer_costs(config)
    costs[0] -= config.vocab_size * config.hidden_size  # an embedding is looked up, which takes no time
    size = len(costs) // stages
    cuts = {
        "as many layers each": [range(part * size, (part + 1) * size) for part in range(stages)],
        "balanced": balance(costs, stages),
    }
    scale = stages * FORWARD_S / sum(costs)
    return {
        name: tuple(scale * sum(costs[layer] for layer in stage) for stage in ranges) for name, ranges in cuts.items()
    }
