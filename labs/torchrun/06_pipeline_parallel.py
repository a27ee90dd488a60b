"""Runs lab 06's pipeline, one stage per rank, with the same receipt, on any number of processes.

python 06_pipeline_parallel.py                                  4 stages on this machine
torchrun --nproc-per-node 4 06_pipeline_parallel.py             the same under torchrun
torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d \\
    --rdzv-endpoint HOST:29500 06_pipeline_parallel.py          on each of two nodes

With a GPU for each rank the tensors live on the GPUs and NCCL carries the messages.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from course.kit import receipt, row
from minillm.comm import Group, is_root, launch
from minillm.measure import ledger
from minillm.parallel.pipeline_parallel.schedule.actions import straight
from minillm.parallel.pipeline_parallel.schedule.schedules import Action, Schedule, check
from minillm.predict.training import pipeline as predict

MICROBATCHES, ROWS, WIDTH, VOCAB = 8, 4, 16, 24


def one_f_one_b_order(stage: int, stages: int, microbatches: int) -> list[str]:
    """What the stage does, in order: "F0" is the forward of microbatch 0, "B0" its backward."""
    raise NotImplementedError


class Stage:
    """One stage. Forward: receive, compute, send.
    Backward: receive the gradient, backward, send."""

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        like: Tensor,
        loss: Callable,
        microbatches: int,
    ):
        """like: a tensor of the shape and dtype that travels;
        loss(y, m): mean loss of microbatch m."""
        self.module, self.group, self.like, self.loss, self.microbatches = (
            module,
            group,
            like,
            loss,
            microbatches,
        )
        self.first, self.last = group.rank == 0, group.rank == group.world_size - 1
        self.kept, self.sent = {}, []

    def forward(self, m: int, x: Tensor | None = None) -> None:
        """Microbatch m through this stage; x is given on the first stage only.
        Sends do not wait."""
        raise NotImplementedError

    def backward(self, m: int) -> None:
        """Adds the gradient of microbatch m to this stage's parameters."""
        raise NotImplementedError


def sum_tied(weight: nn.Parameter | None, group: Group) -> None:
    """weight: the embedding on the first and the last stage, None between.
    Both get the sum of its gradients."""
    raise NotImplementedError


# What follows runs and judges them.


class Part(nn.Module):
    """embedding (first stage) -> tanh(x @ weight) -> the embedding again, as head (last stage)."""

    def __init__(self, stage: int, stages: int, device: torch.device):
        super().__init__()
        ends = stage in (0, stages - 1)
        self.first, self.last = stage == 0, stage == stages - 1
        self.weight = nn.Parameter(draw(stage, WIDTH, WIDTH).to(device) / 2)
        self.embedding = nn.Parameter(draw(1000, VOCAB, WIDTH).to(device) / 4) if ends else None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh((self.embedding[x] if self.first else x) @ self.weight)
        return x @ self.embedding.T if self.last else x


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens() -> tuple[Tensor, Tensor]:
    """Inputs and targets: [microbatches, rows]."""
    generator = torch.Generator().manual_seed(3)
    inputs, targets = torch.randint(0, VOCAB, (2, MICROBATCHES, ROWS), generator=generator)
    return inputs, targets


def rank_program(group: Group) -> dict[str, Any]:
    """Each part once; None if it is not written yet."""
    return {name: attempt(part, group) for name, part in PARTS.items()}


def attempt(part: Callable[[Group], Any], group: Group) -> Any:
    try:
        return part(group)
    except NotImplementedError:
        return None


def try_order(group: Group) -> list[str]:
    return one_f_one_b_order(group.rank, group.world_size, MICROBATCHES)


def try_stage(group: Group) -> tuple[int, bool]:
    """A step under 1F1B: (messages sent,
    whether the gradient of this stage's weight is that of one process)."""
    order, module = try_order(group), Part(group.rank, group.world_size, group.device)
    inputs, targets = (x.to(group.device) for x in tokens())

    def loss(y: Tensor, m: int) -> Tensor:
        return nn.functional.cross_entropy(y, targets[m])

    stage = Stage(module, group, torch.empty(ROWS, WIDTH, device=group.device), loss, MICROBATCHES)
    with ledger() as led:
        for action in order:
            kind, m = action[0], int(action[1:])
            if kind == "F":
                stage.forward(m, inputs[m] if group.rank == 0 else None)
            else:
                stage.backward(m)
        for handle in stage.sent:
            handle.wait()
    alone, _ = one_process(group.world_size)
    found = module.weight.grad.cpu()
    return led.messages, torch.allclose(found, alone[group.rank], rtol=1e-3, atol=1e-6)


def try_tied(group: Group) -> bool:
    """Both copies' gradients, drawn at random."""
    part, last = Part(group.rank, group.world_size, group.device), group.world_size - 1
    if part.embedding is not None:
        part.embedding.grad = draw(2000 + group.rank, VOCAB, WIDTH).to(group.device)
    sum_tied(part.embedding, group)
    wanted = draw(2000, VOCAB, WIDTH) + (draw(2000 + last, VOCAB, WIDTH) if last else 0)
    return part.embedding is None or torch.allclose(part.embedding.grad.cpu(), wanted)


def one_process(stages: int) -> tuple[list[Tensor], Tensor]:
    """The gradients of every stage's weight and of the one embedding."""
    parts = [Part(stage, stages, torch.device("cpu")) for stage in range(stages)]
    parts[-1].embedding = parts[0].embedding
    inputs, targets = tokens()
    x = inputs.flatten()
    for part in parts:
        x = part(x)
    nn.functional.cross_entropy(x, targets.flatten()).backward()
    return [part.weight.grad for part in parts], parts[0].embedding.grad


PARTS = {"order": try_order, "stage": try_stage, "tied embedding": try_tied}


def judge(ranks: list[dict[str, Any]]) -> list:
    """The receipt's rows."""
    n, rows = len(ranks), []
    for name in PARTS:
        found = [rank[name] for rank in ranks]
        if None in found:
            rows.append(row(f"{name}: not written yet", None, None))
        elif name == "order":
            orders = tuple(tuple(Action.parse(step) for step in order) for order in found)
            report = check(Schedule("1F1B", orders, (straight(n),) * MICROBATCHES))
            due = tuple(predict.in_flight_1f1b(n, stage, MICROBATCHES) for stage in range(n))
            rows.append(
                row(
                    "order: microbatches in flight",
                    due,
                    tuple(int(peak) for peak in report.peak_in_flight),
                )
            )
        elif name == "stage":
            rows.append(
                row(
                    "stage: messages",
                    predict.sends(n, MICROBATCHES),
                    sum(sent for sent, _ in found),
                )
            )
            right = all(right for _, right in found)
            rows.append(row("stage: gradients of one process", True, right))
        else:
            rows.append(row("tied embedding: the sum on both ends", True, all(found)))
    return rows


if __name__ == "__main__":
    ranks = launch(rank_program, nproc=4)
    if is_root():
        result = receipt(f"lab 06 on {len(ranks)} stages", judge(ranks))
        print(result)
        raise SystemExit(0 if result.ok else 1)
