"""What the ranks do in the tests of the pipeline, and what one process computes instead."""

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from minillm.comm import Mesh
from minillm.measure import ledger
from minillm.model import ModelConfig, Transformer
from minillm.parallel import BucketedDDP, ZeroOptimizer
from minillm.parallel.pipeline_parallel.runtime import Pipeline
from minillm.parallel.pipeline_parallel.schedule import schedules
from minillm.parallel.pipeline_parallel.schedule.schedules import Schedule
from minillm.parallel.pipeline_parallel.stages import build_parts

VOCAB, HIDDEN, SEQ_LEN = 16, 8, 4
MICROBATCHES = (1, 2, 4, 5, 8)
THREES = (6,)  # for 3 stages: else no number is a multiple, as interleaved needs it
F64 = torch.float64


def config(layers: int, tied: bool = False) -> ModelConfig:
    return ModelConfig(VOCAB, HIDDEN, 12, layers, 2, 1, max_seq_len=SEQ_LEN, tie_embeddings=tied, qkv_bias=True)


def rows(microbatch: int) -> int:
    return 1 + microbatch % 2  # they may differ


@functools.cache
def batch(microbatches: int, replica: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    draw = torch.Generator().manual_seed(100 * replica + microbatches)
    both = [torch.randint(VOCAB, (2, rows(m), SEQ_LEN), generator=draw) for m in range(microbatches)]
    return [tokens for tokens, _ in both], [targets for _, targets in both]


def shape(microbatch: int) -> tuple[torch.Size, torch.dtype]:
    return torch.Size((rows(microbatch), SEQ_LEN, HIDDEN)), F64


def loss_of(targets: list[Tensor]) -> Callable[[nn.Module, Tensor, int], Tensor]:
    count = sum(each.numel() for each in targets)
    return lambda part, y, m: part.loss(y, targets[m])[0] / count


@functools.cache
def alone(layers: int, microbatches: int, tied: bool, replicas: int = 1) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process; with replicas, their mean."""
    model = Transformer(config(layers, tied), dtype=F64)
    total = 0.0
    for replica in range(replicas):
        tokens, targets = batch(microbatches, replica)
        count = sum(each.numel() for each in targets)
        for x, t in zip(tokens, targets, strict=True):
            loss = model(x, targets=t)[0] / count / replicas
            loss.backward()
            total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters()}


def possible(stages: int, microbatches: int, layers: int) -> Iterator[Schedule]:
    """Every schedule of SCHEDULES that these numbers allow."""
    for name, make in schedules.SCHEDULES.items():
        if name == "interleaved":
            if microbatches % stages == 0:
                yield from (make(stages, microbatches, chunks) for chunks in (2, 3) if chunks * stages <= layers)
        elif name != "dualpipe" or (stages % 2 == 0 and microbatches >= 2):
            yield make(stages, microbatches)


def error(pipeline: Pipeline, expected: dict[str, Tensor]) -> float:
    """Largest difference of this rank's gradients, by name, each against the largest value of its kind."""
    return max(
        ((p.grad - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-6)).item()
        for part in pipeline.parts
        for name, p in getattr(part, "module", part).named_parameters()
    )


def every_schedule(group) -> list[dict]:
    """Per tying, number of microbatches and schedule: errors, losses, peak in flight, messages and bytes sent."""
    torch.set_num_threads(1)
    layers, found = max(2 * group.world_size, 3), []
    for tied in (False, True):
        for microbatches in (*MICROBATCHES, *(THREES if group.world_size == 3 else ())):
            tokens, targets = batch(microbatches)
            loss, gradients = alone(layers, microbatches, tied)
            for schedule in possible(group.world_size, microbatches, layers):
                parts = build_parts(config(layers, tied), schedule, group.rank, dtype=F64)
                pipeline = Pipeline(parts, schedule, group)
                with ledger() as led:
                    total = pipeline.step(tokens, shape, loss_of(targets))
                with ledger() as after:
                    pipeline.finish()
                sent = [event for event in led.events if event.op in ("send", "exchange")]
                found.append(
                    {
                        "schedule": schedule,
                        "tied": tied,
                        "error": error(pipeline, gradients),
                        "loss error": abs(total.item() - loss),
                        "peak": pipeline.peak_in_flight,
                        "messages": sum(event.messages for event in sent),
                        "bytes": sum(event.bytes for event in sent),
                        "finish": (dict(after.calls), after.messages),
                        "ledger": led,
                        "owned": [name for name, _ in pipeline.owned()],
                    }
                )
    return found


def replicas(group) -> dict:
    """dp 2 x pp 2: errors against the mean over replicas, and what was reduced when, per schedule."""
    torch.set_num_threads(1)
    mesh, layers, found = Mesh(group, dp=2, pp=2), 4, {}
    tokens, targets = batch(4, mesh.dp.rank)
    _, gradients = alone(layers, 4, True, replicas=2)
    for schedule in (schedules.one_f_one_b(2, 4), schedules.zero_bubble_v(2, 4), schedules.dualpipe(2, 4)):
        parts = build_parts(config(layers, True), schedule, mesh.pp.rank, dtype=F64)
        wrapped = [BucketedDDP(part, mesh.dp, first_bucket_mb=25) for part in parts]
        pipeline = Pipeline(wrapped, schedule, mesh.pp)
        for _ in range(2):  # the second step is the usual one: buckets have been packed in their final order
            for part in parts:
                part.zero_grad()
            with ledger() as led:
                pipeline.step(tokens, shape, loss_of(targets))
            pipeline.finish()
        reductions = led.select("all_reduce", mesh.dp.name)
        last = [str(action) for action in pipeline.last_gradient]
        inside = [span for span in led.spans if span.name in last]
        found[schedule.name] = {
            "error": error(pipeline, gradients),
            "reductions": len(reductions),
            "parts": len(parts),
            "inside": [any(span.start <= event.start <= span.end for span in inside) for event in reductions],
        }

        parts = build_parts(config(layers, True), schedule, mesh.pp.rank, dtype=F64)
        module = nn.ModuleList(parts)
        weights = [p.detach().clone() for p in module.parameters()]
        optimizer = ZeroOptimizer(module, mesh.dp, make=lambda named: torch.optim.SGD([p for _, p in named], lr=1.0))
        pipeline = Pipeline(parts, schedule, mesh.pp)
        with ledger() as led:
            with optimizer.no_sync():
                pipeline.step(tokens, shape, loss_of(targets))
            pipeline.finish()
            quiet = len(led.select(group=mesh.dp.name))
            optimizer.step()
        for p, before in zip(module.parameters(), weights, strict=True):
            p.grad = before - p.detach()  # what SGD took off
        found[schedule.name] |= {"zero": error(pipeline, gradients), "quiet": quiet, "zero calls": dict(led.calls)}
    return found


def other_modules(group) -> dict:
    """Parts that are no ModelParts: their equal names are no equal parameters. Frozen ones, and evaluation."""
    torch.set_num_threads(1)

    def layer(part: int) -> nn.Sequential:
        torch.manual_seed(part)
        return nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double()

    inputs = [torch.full((2, 6), 0.1 * m, dtype=F64) for m in range(3)]
    whole = nn.Sequential(*map(layer, range(group.world_size)))
    whole[0].requires_grad_(False)
    losses = [whole(x).square().sum() for x in inputs]
    sum(losses).backward()
    found = {}
    for schedule in (schedules.one_f_one_b(group.world_size, 3), schedules.zero_bubble(group.world_size, 3)):
        part = layer(group.rank).requires_grad_(group.rank > 0)
        pipeline = Pipeline([part], schedule, group)
        arguments = inputs, lambda m: (torch.Size((2, 6)), F64), lambda part, y, m: y.square().sum()
        with ledger() as led:
            evaluated = pipeline.evaluate(*arguments)
        untouched = all(p.grad is None for p in part.parameters())
        total = pipeline.step(*arguments)
        pipeline.finish()
        pairs = zip(part.parameters(), whole[group.rank].parameters(), strict=True)
        found[schedule.name] = {
            "same": all(torch.allclose(a.grad, b.grad, 1e-12) if b.requires_grad else a.grad is None for a, b in pairs),
            "losses": (evaluated.item(), total.item(), sum(losses).item()),
            "untouched": untouched,
            "spans": [span.name for span in led.spans],
        }
    return found
