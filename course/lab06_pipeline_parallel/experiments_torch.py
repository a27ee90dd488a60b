"""Lab 06's peer: the same parts of the same model under torch.distributed.pipelining, on the same ranks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining

from course.lab06_pipeline_parallel import experiments as lab_06
from course.lab06_pipeline_parallel.experiments import MODEL, ROWS, Job, relative
from minillm.comm import Group, launch
from minillm.parallel.pipeline_parallel.stages import ModelPart, build_parts

SCHEDULES = {
    "ScheduleGPipe": ("gpipe", pipelining.ScheduleGPipe),
    "Schedule1F1B": ("1f1b", pipelining.Schedule1F1B),
    "ScheduleInterleaved1F1B": ("interleaved", pipelining.ScheduleInterleaved1F1B),
}


class WithHead(nn.Module):
    """A part that returns what torch's pipeline expects: logits from the last one."""

    def __init__(self, part: ModelPart):
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(x)
        return self.part.logits(y) if self.part.last else y


def torch_step(group: Group, name: str, scale_grads: bool = True) -> dict[str, Any]:
    """One step of one of torch's schedules; error: of this rank's gradients, relative to one process."""
    ours, schedule_class = SCHEDULES[name]
    job = Job(ours, group.world_size, 4, None)
    schedule, batch = job.built, lab_06.tokens(job)
    ranges = lab_06.even(job, schedule)
    parts = build_parts(MODEL, schedule, group.rank, ranges, seed=0, dtype=torch.float64)
    stages = [
        pipelining.PipelineStage(
            WithHead(part),
            group.rank + chunk * group.world_size,
            schedule.num_parts,
            group.device,
            group=group.process_group,
        )
        for chunk, part in enumerate(parts)
    ]

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    several = len(stages) > 1
    runner = schedule_class(stages if several else stages[0], job.microbatches, loss, scale_grads=scale_grads)
    inputs, targets, losses = batch[..., :-1].flatten(0, 1), batch[..., 1:].flatten(0, 1), []
    arguments = [inputs] if group.rank == 0 else []
    if group.rank == group.world_size - 1:
        runner.step(*arguments, target=targets, losses=losses)
    else:
        runner.step(*arguments)
    right = lab_06.one_process(job)
    named = [(n, p.grad) for part in parts for n, p in part.named_parameters()]
    ratio = max((g.norm() / right[n].norm()).item() for n, g in named)
    return {
        "error": max(relative(g, right[n]) for n, g in named),
        "ratio": ratio,
        "loss": sum(x.item() for x in losses) / len(losses) if losses else None,
        "rows": ROWS,
    }


def all_peers(group: Group) -> dict[str, Any]:
    """Three of torch's schedules, one of them told not to scale; and minillm's step on the same tokens."""
    found = {name: torch_step(group, name) for name in SCHEDULES}
    found["ScheduleGPipe, scale_grads=False"] = torch_step(group, "ScheduleGPipe", scale_grads=False)
    ours = lab_06.step(group, Job("1f1b", group.world_size, 4, None))
    return found | {"minillm": {"error": ours.error, "ratio": 1.0, "loss": ours.loss}}


def peers(nproc: int = 2) -> list[dict[str, Any]]:
    """By rank."""
    return launch(all_peers, nproc, device="cpu")
