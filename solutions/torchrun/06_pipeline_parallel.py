"""Runs lab 06's pipeline, one stage per rank, with the same receipt, on any number of processes.

python 06_pipeline_parallel.py                                  4 stages on this machine
torchrun --nproc-per-node 4 06_pipeline_parallel.py             the same under torchrun
torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d \\
    --rdzv-endpoint HOST:29500 06_pipeline_parallel.py          on each of two nodes

The tensors stay on the CPU, also where there are GPUs: a stage here sends before it asks for what
it needs, so a message has to wait at its receiver. gloo lets it. NCCL works a communicator's
messages off one after the other and may wait for the receiver in each, so two stages that send to
each other first would hang; `minillm`'s own pipeline pairs the messages of both directions.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from course.kit import Row, row
from course.kit.torchrun import attempt, run
from minillm.comm import Group
from minillm.measure import ledger
from minillm.parallel.pipeline_parallel.schedule.actions import straight
from minillm.parallel.pipeline_parallel.schedule.schedules import Action, Schedule, check
from minillm.predict.training import pipeline as predict

MICROBATCHES, ROWS, WIDTH, VOCAB = 8, 4, 16, 24


def one_f_one_b_order(stage: int, stages: int, microbatches: int) -> list[str]:
    """What the stage does, in order: "F0" is the forward of microbatch 0, "B0" its backward."""
    to_fill = min(stages - 1 - stage, microbatches)
    order = [f"F{m}" for m in range(to_fill)]
    for m in range(microbatches - to_fill):
        order += [f"F{to_fill + m}", f"B{m}"]
    return order + [f"B{m}" for m in range(microbatches - to_fill, microbatches)]


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
        if not self.first:
            x = torch.empty_like(self.like)
            self.group.recv(x, self.group.rank - 1)
            x.requires_grad_()
        y = self.module(x)
        if self.last:
            y = self.loss(y, m) / self.microbatches
        else:
            self.sent.append(self.group.send(y, self.group.rank + 1, async_op=True))
        self.kept[m] = x, y

    def backward(self, m: int) -> None:
        """Adds the gradient of microbatch m to this stage's parameters."""
        x, y = self.kept.pop(m)
        if self.last:
            y.backward()
        else:
            gradient = torch.empty_like(y)
            self.group.recv(gradient, self.group.rank + 1)
            y.backward(gradient)
        if not self.first:
            self.sent.append(self.group.send(x.grad, self.group.rank - 1, async_op=True))


def sum_tied(weight: nn.Parameter | None, group: Group) -> None:
    """weight: the embedding on the first and the last stage, None between.
    Both get the sum of its gradients."""
    if group.world_size == 1 or weight is None:
        return
    other, theirs = group.world_size - 1 - group.rank, torch.empty_like(weight.grad)
    group.exchange(send=(weight.grad, other), recv=(theirs, other))
    weight.grad += theirs


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
    return attempt(PARTS, group)


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


def judge_order(ranks: list[list[str]]) -> Iterator[Row]:
    n, orders = len(ranks), tuple(tuple(map(Action.parse, order)) for order in ranks)
    report = check(Schedule("1F1B", orders, (straight(n),) * MICROBATCHES))
    expected = tuple(predict.in_flight_1f1b(n, stage, MICROBATCHES) for stage in range(n))
    yield row("order: microbatches in flight", expected, tuple(map(int, report.peak_in_flight)))


def judge_stage(ranks: list[tuple[int, bool]]) -> Iterator[Row]:
    messages, right = zip(*ranks, strict=True)
    yield row("stage: messages", predict.sends(len(ranks), MICROBATCHES), sum(messages))
    yield row("stage: gradients of one process", True, all(right))


def judge_tied(ranks: list[bool]) -> Iterator[Row]:
    yield row("tied embedding: the sum on both ends", True, all(ranks))


JUDGES = dict(zip(PARTS, (judge_order, judge_stage, judge_tied), strict=True))


def judge(name: str, ranks: list[Any]) -> Iterator[Row]:
    return JUDGES[name](ranks)


if __name__ == "__main__":
    run("lab 06", rank_program, judge, device="cpu")
