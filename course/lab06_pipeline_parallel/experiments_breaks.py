"""Lab 06's accidents: losses scaled by microbatches, copies that drift, sends that wait, a norm that misses a stage;
and a stage with a bug to find.

All of them are real bugs: gradients too large by the number of microbatches (pytorch#144352, torchtitan#800), tied
embeddings whose gradients are not summed (piper#13), gradient norms that miss a pipeline stage (torchtitan#596).
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from course.lab06_pipeline_parallel import rank_programs
from course.lab06_pipeline_parallel.experiments import MODEL, relative
from minillm.comm import Group, HangError, launch
from minillm.model import Transformer
from minillm.parallel.pipeline_parallel.runtime import Pipeline
from minillm.parallel.pipeline_parallel.schedule.schedules import Action, Schedule, gpipe, messages_as_used, one_f_one_b
from minillm.parallel.pipeline_parallel.stages import ModelPart, build_parts, layer_costs

TIED = replace(MODEL, num_layers=4, tie_embeddings=True)
MICROBATCHES, ROWS, SEQ, STEPS = 4, 2, 8, 6
SGD_LR, ADAM_LR = 0.25, 3e-3


def batch(step: int) -> Tensor:
    """[microbatches, rows, seq + 1]: tokens that count up, so that there is something to learn."""
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(TIED.vocab_size, (MICROBATCHES, ROWS, 1), generator=draw)
    return (starts + torch.arange(SEQ + 1)) % TIED.vocab_size


class Trained:
    """A two-stage 1F1B pipeline under an optimizer. scale: what each microbatch's mean loss is divided by."""

    def __init__(self, group: Group, optimizer: str, scale: float = MICROBATCHES, finish: bool = True) -> None:
        self.schedule = one_f_one_b(group.world_size, MICROBATCHES)
        self.parts = build_parts(TIED, self.schedule, group.rank, seed=0, dtype=torch.float64)
        self.pipeline = Pipeline(self.parts, self.schedule, group)
        self.scale, self.finish, self.group = scale, finish, group
        make = {"SGD": (torch.optim.SGD, SGD_LR), "AdamW": (torch.optim.AdamW, ADAM_LR)}[optimizer]
        self.optimizer = make[0]([p for part in self.parts for p in part.parameters()], lr=make[1])

    def gradients(self, step: int) -> float:
        """Runs one batch; returns its mean loss, whatever it was scaled by."""
        tokens = batch(step)
        shape = torch.Size((ROWS, SEQ, TIED.hidden_size)), torch.float64
        self.optimizer.zero_grad()

        def loss(part: ModelPart, y: Tensor, m: int) -> Tensor:
            total, count = part.loss(y, tokens[m, :, 1:])
            return total / count / self.scale

        total = self.pipeline.step([x[:, :-1] for x in tokens], lambda m: shape, loss)
        if self.finish:
            self.pipeline.finish()
        return total.item() * self.scale / MICROBATCHES

    def train(self, steps: int = STEPS) -> list[float]:
        losses = []
        for step in range(steps):
            losses.append(self.gradients(step))
            self.optimizer.step()
        return losses

    def gradient(self) -> dict[str, Tensor]:
        return {name: p.grad for part in self.parts for name, p in part.named_parameters()}


def train_with(group: Group, balance, order, stage_class, sum_tied, steps: int = 3) -> list[float]:
    """Mean loss of each step with a learner's balance, order, stage and sum, one stage per rank of the group."""
    n, rank = group.world_size, group.rank
    part = ModelPart(TIED, balance(layer_costs(TIED), n)[rank], first=rank == 0, last=rank == n - 1, seed=0)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.3)
    losses = []
    for step in range(steps):
        tokens, seen = batch(step), []

        def loss(y: Tensor, m: int, tokens=tokens, seen=seen) -> Tensor:
            total, count = part.loss(y, tokens[m, :, 1:])
            seen.append((total / count).item())
            return total / count

        stage = stage_class(part, group, torch.empty(ROWS, SEQ, TIED.hidden_size), loss, MICROBATCHES)
        for action in order(rank, n, MICROBATCHES):
            m = int(action[1:])
            if action[0] == "F":
                stage.forward(m, tokens[m, :, :-1] if rank == 0 else None)
            else:
                stage.backward(m)
        for handle in stage.sent:
            handle.wait()
        sum_tied(part.embedding.weight if rank in (0, n - 1) else None, group)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(seen) / MICROBATCHES)
    return losses


def four_stages_and_one(*pieces) -> tuple[list[float], list[float]]:
    """Losses with a learner's pieces on 4 stages, and on one."""

    def both(group: Group) -> tuple:
        alone = group.subgroup([0], "alone")
        return train_with(group, *pieces), train_with(alone, *pieces) if alone.rank == 0 else None

    ranks = launch(both, 4, device="cpu")
    return ranks[-1][0], ranks[0][1]


def one_process(step: int) -> dict[str, Tensor]:
    tokens = batch(step).flatten(0, 1)
    model = Transformer(TIED, seed=0, dtype=torch.float64)
    loss, count = model(tokens[:, :-1], targets=tokens[:, 1:])
    (loss / count).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def all_accidents(group: Group) -> dict[str, Any]:
    """Everything that goes wrong without an error, on two stages."""
    return {"scale": _scaled(group), "tied": _tied(group), "norm": _norms(group)}


def _scaled(group: Group) -> dict[str, Any]:
    """The same training with losses divided by the number of microbatches, not divided, and divided twice."""
    found: dict[str, Any] = {}
    right = one_process(0)
    for name, scale in (("divided", MICROBATCHES), ("not divided", 1), ("divided twice", MICROBATCHES**2)):
        trained = Trained(group, "SGD", scale)
        trained.gradients(0)
        name_, gradient = next((n, g) for n, g in trained.gradient().items() if n.startswith("blocks"))
        found[name] = {"ratio": (gradient.norm() / right[name_].norm()).item()}
        found[name] |= {opt: Trained(group, opt, scale).train() for opt in ("SGD", "AdamW")}
    return found


def _tied(group: Group) -> dict[str, list[float]]:
    """By how much the two copies of the embedding differ after each step, with and without the sum."""
    found = {}
    for name, finish in (("summed", True), ("not summed", False)):
        trained, apart = Trained(group, "SGD", finish=finish), []
        for step in range(STEPS):
            trained.gradients(step)
            trained.optimizer.step()
            mine = trained.parts[0].embedding.weight.detach()
            both = group.all_gather(mine.unsqueeze(0))
            apart.append(relative(both[1], both[0]))
        found[name] = apart
    return found


def _norms(group: Group) -> dict[str, float]:
    """The norm of the whole gradient: of one process, of this stage alone, of all stages with the tied embedding twice
    (each stage adds what it holds), and with every parameter once."""
    whole = torch.stack([g.norm() for g in one_process(0).values()]).norm().item()
    trained = Trained(group, "SGD")
    trained.gradients(0)
    own = sum(p.grad.square().sum() for part in trained.parts for p in part.parameters())
    once = sum(p.grad.square().sum() for _, p in trained.pipeline.owned())
    found = {"one process": whole, "this stage": own.sqrt().item()}
    found["all stages hold"] = group.all_reduce(own.clone()).sqrt().item()
    return found | {"each parameter once": group.all_reduce(once).sqrt().item()}


# A bug to find.


class Suspect:
    """A stage of a pipeline. It saves allocations by receiving into two buffers in turn."""

    def __init__(self, module, group, like, loss, microbatches):
        self.module, self.group, self.loss, self.microbatches = module, group, loss, microbatches
        self.first, self.last = group.rank == 0, group.rank == group.world_size - 1
        self.inputs, self.gradients = ([torch.empty_like(like) for _ in range(2)] for _ in range(2))
        self.kept, self.sent = {}, []

    def forward(self, m, x=None):
        if not self.first:
            self.group.recv(self.inputs[m % 2], self.group.rank - 1)
            x = self.inputs[m % 2].data.requires_grad_()
        y = self.module(x)
        if self.last:
            y = self.loss(y, m) / self.microbatches
        else:
            self.sent.append(self.group.send(y.detach(), self.group.rank + 1, async_op=True))
        self.kept[m] = x, y

    def backward(self, m):
        x, y = self.kept.pop(m)
        if self.last:
            y.backward()
        else:
            self.group.recv(self.gradients[m % 2], self.group.rank + 1)
            y.backward(self.gradients[m % 2])
        if not self.first:
            self.sent.append(self.group.send(x.grad, self.group.rank - 1, async_op=True))


def bug_hunt(stage_class: type, stages: int = 4, microbatches: int = 6) -> dict[str, list[float]]:
    """By order of work: the relative error of every stage's gradient, beside one process."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int, *shape: int) -> list[Tensor]:
        return list(torch.randn(count, *shape, generator=generator, dtype=torch.float64))

    in_turn = [[f"{kind}{m}" for m in range(microbatches) for kind in "FB"]] * stages
    orders = {"one microbatch at a time": in_turn}
    for name, schedule in (("1F1B", one_f_one_b(stages, microbatches)), ("GPipe", gpipe(stages, microbatches))):
        orders[name] = [[str(action) for action in order] for order in schedule.orders]
    weights = draw(stages, rank_programs.WIDTH + 1, rank_programs.WIDTH)
    inputs, targets = (draw(microbatches, rank_programs.ROWS, rank_programs.WIDTH) for _ in range(2))
    cases = [rank_programs.StageCase(weights, inputs, targets, order, name) for name, order in orders.items()]
    ranks, right = launch(rank_programs.run_stage, stages, stage_class, cases), rank_programs.in_one_process(cases[0])
    return {
        case.name: [relative(ranks[stage][i].gradient, right[stage]) for stage in range(stages)]
        for i, case in enumerate(cases)
    }


# Sends that wait.


def deadlock(timeout: float = 2.0) -> str:
    """1F1B on two ranks, every message sent as soon as it is made and waited for: the table of who waits for whom."""
    try:
        launch(_blocking, 2, messages_as_used(one_f_one_b(2, 4)), timeout=timeout, device="cpu")
    except HangError as hang:
        return hang.table
    return ""


def _blocking(group: Group, schedule: Schedule) -> None:
    for step in schedule.orders[group.rank]:
        if isinstance(step, Action):
            continue
        if step.source.rank == group.rank:
            group.send(torch.ones(4), step.target.rank)
        else:
            group.recv(torch.empty(4), step.source.rank)
