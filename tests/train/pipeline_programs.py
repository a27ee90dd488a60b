"""What the ranks do in the tests of the pipeline, and what one process computes instead."""

import functools
import time
from collections.abc import Iterator

import torch

from minillm.measure import ledger
from minillm.model import ModelConfig, Transformer
from minillm.train import schedules
from minillm.train.pipeline import Pipeline
from minillm.train.schedules import Schedule
from minillm.train.stages import build_parts

VOCAB, HIDDEN, SEQ_LEN, LAYERS = 16, 8, 4, 8
MICROBATCHES = (1, 2, 4, 5, 8)
F64 = torch.float64


def config(tied: bool, layers: int = LAYERS) -> ModelConfig:
    return ModelConfig(VOCAB, HIDDEN, 12, layers, 2, 1, max_seq_len=SEQ_LEN, tie_embeddings=tied, qkv_bias=True)


def rows(microbatch: int) -> int:
    return 1 + microbatch % 2  # they may differ


@functools.cache
def batch(microbatches: int, replica: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(100 * replica + microbatches)
    both = [torch.randint(VOCAB, (2, rows(m), SEQ_LEN), generator=draw) for m in range(microbatches)]
    return [tokens for tokens, _ in both], [targets for _, targets in both]


def shape(microbatch: int) -> tuple[torch.Size, torch.dtype]:
    return torch.Size((rows(microbatch), SEQ_LEN, HIDDEN)), F64


def loss_of(targets: list[torch.Tensor]):
    count = sum(each.numel() for each in targets)
    return lambda part, y, m: part.loss(y, targets[m])[0] / count


@functools.cache
def alone(microbatches: int, tied: bool, replicas: int = 1) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one process; with replicas, their mean."""
    model = Transformer(config(tied), dtype=F64)
    total = 0.0
    for replica in range(replicas):
        tokens, targets = batch(microbatches, replica)
        count = sum(each.numel() for each in targets)
        for x, t in zip(tokens, targets, strict=True):
            loss = model(x, targets=t)[0] / count / replicas
            loss.backward()
            total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters()}


def possible(stages: int, microbatches: int) -> Iterator[Schedule]:
    """Every schedule of SCHEDULES that these numbers allow."""
    for name, make in schedules.SCHEDULES.items():
        if name == "interleaved":
            if microbatches % stages == 0:
                yield from (make(stages, microbatches, chunks) for chunks in (2, LAYERS // stages))
        elif name != "dualpipe" or (stages % 2 == 0 and microbatches >= 2):
            yield make(stages, microbatches)


def worst(pipeline: Pipeline, expected: dict[str, torch.Tensor]) -> float:
    """Largest difference of any of this rank's gradients, by name."""
    found = [
        (p.grad - expected[name]).abs().max().item()
        for part in pipeline.parts
        for name, p in getattr(part, "module", part).named_parameters()
    ]
    return max(found)


def run_all(group, microbatch_counts=MICROBATCHES):
    """Per schedule, number of microbatches and tying: errors, losses, peak in flight, messages and bytes sent."""
    torch.set_num_threads(1)
    found = []
    for tied in (False, True):
        for microbatches in microbatch_counts:
            tokens, targets = batch(microbatches)
            loss, gradients = alone(microbatches, tied)
            for schedule in possible(group.world_size, microbatches):
                pipeline = Pipeline(build_parts(config(tied), schedule, group.rank, dtype=F64), schedule, group)
                start = time.monotonic()
                with ledger() as led:
                    total = pipeline.step(tokens, shape, loss_of(targets))
                seconds = time.monotonic() - start
                pipeline.finish()
                sent = [event for event in led.events if event.op in ("send", "exchange")]
                found.append(
                    {
                        "case": (schedule.name, microbatches, tied, schedule.parts),
                        "error": worst(pipeline, gradients),
                        "loss": abs(total.item() - loss),
                        "peak": pipeline.peak_in_flight,
                        "messages": sum(event.messages for event in sent),
                        "bytes": sum(event.bytes for event in sent),
                        "seconds": seconds,
                        "names": sorted(name for part in pipeline.parts for name, _ in part.named_parameters()),
                        "owned": sorted(name for name, _ in pipeline.owned()),
                    }
                )
    return found
