"""Lab 03, the same in production: torch's DDP, its communication hooks and accelerate beside ours, on one wire."""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from course.lab03_data_parallel.experiments import CAP_MB, accumulated, model, relative, tokens
from minillm import measure
from minillm.comm import Group
from minillm.model import cross_entropy
from minillm.parallel import BucketedDDP
from minillm.parallel.data_parallel import compression as compress

Step = Callable[[Tensor, Tensor], None]


def libraries(group: Group) -> tuple[dict, dict]:
    """(torch's buckets, one step of each library)."""
    return torch_buckets(group), side_by_side(group)


def torch_buckets(group: Group, num_tensors: int = 12, cap_mb: float = 5) -> dict[str, list[list[int]]]:
    """Bytes of each bucket of torch's DDP in the first and in the second iteration, `num_tensors` tensors of 1 MiB."""
    layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(num_tensors)))
    found = {}
    for cap in (1, cap_mb):
        ddp, seen = DistributedDataParallel(layers, bucket_cap_mb=cap, process_group=group.process_group), []
        ddp.register_comm_hook(group.process_group, _noting(seen))
        for _ in range(2):
            seen.append([])
            ddp(torch.ones(1, 512)).sum().backward()
        found[str(cap)] = seen
    return found


def _noting(seen: list[list[int]]) -> Callable:
    def hook(process_group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        seen[-1].append(bucket.buffer().nbytes)
        return default_hooks.allreduce_hook(process_group, bucket)

    return hook


# A trace.

LAYERS, WIDTH, ROWS = 8, 1024, 128  # two matmuls of a layer take about as long as 4 MiB on the loopback


def traced_step(group: Group) -> list[dict[str, Any]]:
    """Events of one step of torch's DDP on this rank, from the trace that torch.profiler writes for Perfetto.

    8 layers of 1024 x 1024 and buckets of one layer; the steps before it connect the ranks and pack the buckets. An
    event has its name, thread (`tid`), `start` and `end` in seconds since the first one.
    """
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    ddp = DistributedDataParallel(layers, bucket_cap_mb=4, process_group=group.process_group)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(group.rank))
    for _ in range(3):
        ddp(x).square().mean().backward()
    dist.barrier(group.process_group)
    with _quiet(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ddp(x).square().mean().backward()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event.get("ph") == "X" and event["name"] in TRACED]
    first = min(event["ts"] for event in spans)
    return [
        {
            "name": event["name"],
            "tid": event["tid"],
            "start": (event["ts"] - first) * 1e-6,
            "end": (event["ts"] + event["dur"] - first) * 1e-6,
        }
        for event in sorted(spans, key=lambda event: event["ts"])
    ]


TRACED = ("DistributedDataParallel.forward", "aten::mm", "c10d::allreduce_", "gloo:all_reduce")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The profiler's own notices go to file descriptor 2, whatever its log level; not here."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def trace_times(events: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds in all-reduces, and how many of them lie beside a matmul or behind the last one, by the trace's spans."""
    reductions = [(e["start"], e["end"]) for e in events if e["name"] == "gloo:all_reduce"]
    matmuls = [(e["start"], e["end"]) for e in events if e["name"] == "aten::mm"]
    edges = sorted({edge for span in reductions + matmuls for edge in span})
    found = {"all-reduce": 0.0, "beside a matmul": 0.0, "after the last matmul": 0.0}
    for start, end in pairwise(edges):
        if any(a <= start and end <= b for a, b in reductions):
            found["all-reduce"] += end - start
            found["beside a matmul"] += (end - start) * any(a <= start and end <= b for a, b in matmuls)
            found["after the last matmul"] += (end - start) * (start >= matmuls[-1][1])
    return found


def side_by_side(group: Group, batch: int = 4) -> dict[str, dict[str, Any]]:
    """One step each of torch's DDP, accelerate's and ours, plain, sparing and compressed: wire bytes, gradient error.

    The wire belongs to the machine, so the least of three steps counts, and only rank 0's answer is used.
    """
    parts = [tokens(rank, batch) for rank in range(group.world_size)]
    alone = model()
    x, y = (torch.cat(both) for both in zip(*parts, strict=True))
    cross_entropy(alone(x), y).backward()
    right = torch.cat([p.grad.flatten() for p in alone.parameters()])
    found = {}
    for name, make in _forms(group).items():
        module, step = make()
        sent = []
        for _ in range(5):  # the first packs buckets anew, PowerSGD compresses from the third on
            module.zero_grad()
            dist.barrier(group.process_group)
            with measure.wire() as counter:
                dist.barrier(group.process_group)
                step(*parts[group.rank])
                dist.barrier(group.process_group)
            sent.append(counter.sent)
        gradient = torch.cat([p.grad.flatten() for p in module.parameters()])
        found[name] = {"wire": min(sent[2:]), "error": relative(gradient, right)}
    return found


def _forms(group: Group) -> dict[str, Callable[[], tuple[nn.Module, Step]]]:
    def torch_ddp(
        hook: Callable | None = None, state: Any = None, cap_mb: float = CAP_MB
    ) -> tuple[nn.Module, Callable]:
        ddp = DistributedDataParallel(model(), bucket_cap_mb=cap_mb, process_group=group.process_group)
        if hook:
            ddp.register_comm_hook(state, hook)
        return ddp, plain(ddp)

    def ours(hook: Callable | None = None) -> tuple[nn.Module, Callable]:
        ddp = BucketedDDP(model(), group, bucket_cap_mb=CAP_MB, hook=hook)
        return ddp, plain(ddp)

    def plain(ddp: nn.Module) -> Step:
        return lambda x, y: cross_entropy(ddp(x), y).backward()

    def sparing(made: tuple[nn.Module, Callable]) -> tuple[nn.Module, Callable]:
        ddp = made[0]

        return ddp, lambda x, y: accumulated(ddp, x, y, 2)

    def power_sgd() -> tuple[nn.Module, Callable]:
        state = powerSGD_hook.PowerSGDState(group.process_group, 2, start_powerSGD_iter=2, warm_start=True)
        # One bucket: on gloo the hook's steps of several buckets can overtake each other, differently on each rank.
        return torch_ddp(powerSGD_hook.powerSGD_hook, state, cap_mb=25)

    def accelerated() -> tuple[nn.Module, Callable]:
        from accelerate import Accelerator

        os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # or it warns that it does so itself
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        ddp = accelerator.prepare(model())

        def step(x: Tensor, y: Tensor) -> None:
            for half, targets in zip(x.chunk(2), y.chunk(2), strict=True):
                with accelerator.accumulate(ddp):
                    accelerator.backward(cross_entropy(ddp(half), targets))

        return ddp, step

    return {
        "torch DDP": torch_ddp,
        "minillm BucketedDDP": ours,
        "torch DDP, 2 microbatches, no_sync": lambda: sparing(torch_ddp()),
        "minillm, 2 microbatches, no_sync": lambda: sparing(ours()),
        "accelerate, 2 microbatches": accelerated,
        "torch DDP, fp16 hook": lambda: torch_ddp(default_hooks.fp16_compress_hook, group.process_group),
        "minillm, fp16 hook": lambda: ours(compress.fp16),
        "torch DDP, PowerSGD rank 2": power_sgd,
        "minillm, power_sgd(2)": lambda: ours(compress.power_sgd(2)),
    }
