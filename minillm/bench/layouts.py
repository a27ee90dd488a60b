"""A training step in each layout that fits the GPUs: what share of the peak it reaches, what it holds, what it hides.

    MFU         useful FLOP/s of each GPU beside the measured peak of its matrix products (recomputation is not useful)
    memory      bytes that the fullest GPU had allocated at most; on one GPU beside `predict`, which has no formula of
                other layouts in bfloat16
    hidden      time in which NCCL's kernels ran beside others of the same GPU, of all time in which they ran: from a
                profile of one more step

On GPUs the model has the shape of Llama 3.2 1B and computes in bfloat16; on a CPU it is tiny, and only shows that every
layout runs.
"""

import json
import math
import statistics
import tempfile
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from minillm.bench.harness import BenchRow, check_repeats
from minillm.bench.shapes import SHAPES
from minillm.comm import Group, launch
from minillm.data import Tokens
from minillm.measure import machine
from minillm.model import ModelConfig, MoEConfig
from minillm.predict.model import causal_context, training_flops
from minillm.predict.training.memory import training_step
from minillm.train import TrainConfig, Trainer
from minillm.train.job import peak_flops
from minillm.train.parallel_config import ParallelConfig
from minillm.train.precision import PRECISIONS
from minillm.train.strategies.hybrid import make_strategy

LAYOUTS = {
    1: {"one GPU": ParallelConfig()},
    2: {
        "dp": ParallelConfig(dp=2),
        "fsdp": ParallelConfig(dp=2, zero=3),
        "tp, sequence": ParallelConfig(tp=2, sequence=True),
        "pp": ParallelConfig(pp=2, accumulate=8),
        "cp, zigzag": ParallelConfig(cp=2),
        "ep": ParallelConfig(dp=2, ep=2),
    },
    8: {
        "dp": ParallelConfig(dp=8),
        "fsdp": ParallelConfig(dp=8, zero=3),
        "tp, sequence": ParallelConfig(tp=8, sequence=True),
        "pp": ParallelConfig(pp=8, accumulate=16),
        "cp, zigzag": ParallelConfig(cp=8),
        "ep": ParallelConfig(dp=8, ep=8),
        "fsdp, tp": ParallelConfig(dp=4, tp=2, sequence=True, zero=3),
        "dp, pp, tp": ParallelConfig(dp=2, pp=2, tp=2, sequence=True, accumulate=8),
    },
}
WARM_UP = 2
GPU, CPU = ("llama-1b", 4096, "bf16"), ("tiny-llama", 64, "fp32")  # shape, tokens of a sequence, precision
COMMUNICATION = ("nccl",)  # how the names of its kernels begin


@dataclass(frozen=True)
class Measured:
    """Of the slowest rank. seconds: of each step; tokens: of a step, all ranks'; peak_bytes, hidden: None on a CPU."""

    seconds: list[float]
    tokens: int
    loss: float
    peak_bytes: int | None
    hidden: float | None


def run(world_sizes: Sequence[int] | None = None, repeats: int = 5, timeout: float = 300.0) -> list[BenchRow]:
    """All layouts of as many ranks as there are GPUs. One that fails is a row that is not correct."""
    check_repeats(repeats)
    gpus = torch.cuda.device_count()
    sizes = tuple(world_sizes or [n for n in LAYOUTS if n <= max(gpus, 1)])
    if unknown := [n for n in sizes if n not in LAYOUTS]:
        raise ValueError(f"world sizes {unknown} have no layouts: choose among {', '.join(map(str, LAYOUTS))}")
    rows = []
    for world_size in sizes:
        device = "cuda" if gpus >= world_size else "cpu"
        for name, layout in LAYOUTS[world_size].items():
            model, seq_len, precision = setting(layout, device)
            try:
                found = launch(
                    measure, world_size, layout, model, seq_len, precision, repeats, timeout=timeout, device=device
                )
            except RuntimeError as error:  # of a rank: the others' rows are worth having
                rows.append(_failed(f"{name}, {world_size} ranks: {str(error).splitlines()[0][:200]}"))
                continue
            rows += rows_of(
                f"{name}, {world_size} ranks, {device}", slowest(found), model, seq_len, precision, world_size
            )
    return rows


def setting(layout: ParallelConfig, device: str) -> tuple[ModelConfig, int, str]:
    """The model with heads and experts that the layout can split, the length of its sequences, and the precision."""
    shape, seq_len, precision = GPU if device == "cuda" else CPU
    model = replace(SHAPES[shape], max_seq_len=seq_len)
    if device == "cpu":
        heads = max(model.num_heads, 2 * layout.tp)
        model = replace(model, hidden_size=16 * heads, num_heads=heads, num_kv_heads=heads, head_dim=16)
        model = replace(model, num_layers=max(2, layout.pp))
    if layout.ep > 1:
        model = replace(model, moe=MoEConfig(8, 2, model.intermediate_size // 2))
    return model, seq_len, precision


def measure(
    group: Group, layout: ParallelConfig, model: ModelConfig, seq_len: int, precision: str, repeats: int
) -> Measured:
    """On each rank: `repeats` steps, each timed, and one more that is profiled."""
    config = TrainConfig(
        model, seq_len=seq_len, batch_size=1, accumulate=layout.accumulate, precision=precision, spike_nats=None
    )
    on_gpu, device = group.device.type == "cuda", group.device
    seconds, tokens = [], random_tokens(model.vocab_size, seq_len)
    with (
        make_strategy(group, layout) as parallel,
        Trainer(config, tokens, device=device, parallel=parallel, workers=0, base=DrawnOn(device)) as trainer,
    ):
        for number in range(WARM_UP + repeats):
            group.barrier()
            if on_gpu and number == WARM_UP:
                torch.cuda.reset_peak_memory_stats(device)
            start = time.perf_counter()
            step = trainer.step()
            if on_gpu:
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated(device) if on_gpu else None
        hidden = hidden_share(profile(trainer.step)) if on_gpu and group.world_size > 1 else None
        group.barrier()
    return Measured(seconds[WARM_UP:], step.tokens, step.loss, peak, hidden)


@dataclass(frozen=True)
class DrawnOn:
    """A `base` that draws weights on the device: on the CPU, which draws them alike on every machine, a billion takes a
    rank half a minute. Ranks on GPUs of one kind still begin alike."""

    device: torch.device

    def draw(self, config: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self.device)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()) + seed)
        return torch.empty(shape, device=self.device).normal_(0, config.init_std, generator=generator)


def random_tokens(vocab_size: int, seq_len: int) -> Tokens:
    ids = np.random.default_rng(0).integers(0, vocab_size, 64 * (seq_len + 1)).astype(np.uint32)
    return Tokens(ids, vocab_size, 0, 1, len(ids))


def slowest(ranks: Sequence[Measured]) -> Measured:
    """Each step takes as long as on its slowest rank, the peak is the fullest one's; hidden: the least of all."""
    peaks = [each.peak_bytes for each in ranks if each.peak_bytes is not None]
    hidden = [each.hidden for each in ranks if each.hidden is not None]
    losses = {each.loss for each in ranks}
    return Measured(
        [max(times) for times in zip(*(each.seconds for each in ranks), strict=True)],
        ranks[0].tokens,
        losses.pop() if len(losses) == 1 else math.nan,  # every rank has the whole batch's loss
        max(peaks, default=None),
        min(hidden, default=None),
    )


def rows_of(
    label: str, found: Measured, model: ModelConfig, seq_len: int, precision: str, world_size: int
) -> list[BenchRow]:
    correct, runs = math.isfinite(found.loss), len(found.seconds)
    on_gpu = found.peak_bytes is not None
    device = torch.device("cuda" if on_gpu else "cpu")
    peak = peak_flops(machine(), device, PRECISIONS[precision].compute) or math.nan
    flops = training_flops(model, causal_context(seq_len)).total * found.tokens / world_size
    rates = [flops / each for each in found.seconds]
    rate = statistics.median(rates)
    spread = (max(rates) - min(rates)) / peak
    name = f"{label}: {found.tokens / statistics.median(found.seconds):,.0f} tokens/s"
    whose = "of a GPU" if on_gpu else "of the CPU, which the ranks share"
    unit = "TFLOP/s"
    rows = [BenchRow(name, f"peak {whose} (MFU)", rate / 1e12, peak / 1e12, unit, rate / peak, spread, runs, correct)]
    if on_gpu:
        held = found.peak_bytes / 2**30
        step = training_step(model, 1, seq_len, precision, device="cuda") if world_size == 1 else None
        expected = step.peak.total / 2**30 if step else None
        ratio = expected / held if expected else None
        rows.append(BenchRow(f"{label}: memory", "predicted", held, expected, "GiB", ratio, 0.0, 1, correct))
    if found.hidden is not None:
        share = found.hidden
        rows.append(BenchRow(f"{label}: hidden", "all of it", share, 1.0, "of NCCL's time", share, 0.0, 1, correct))
    return rows


def _failed(name: str) -> BenchRow:
    return BenchRow(name, "-", None, None, "TFLOP/s", None, None, 0, False)


def profile(work) -> list[dict]:
    """The events of a profile of one call, as Chrome's traces have them."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    with profiled(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="minillm-profile-") as folder:
        path = Path(folder, "trace.json")
        found.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def hidden_share(events: Iterable[dict]) -> float | None:
    """The share of the time in which kernels that communicate ran, in which others ran as well; None if none did."""
    kernels = [each for each in events if each.get("cat") == "kernel"]
    communicates = [each["name"].startswith(COMMUNICATION) for each in kernels]
    spans = [(float(each["ts"]), float(each["ts"]) + float(each["dur"])) for each in kernels]
    sending = _union(span for span, communicating in zip(spans, communicates, strict=True) if communicating)
    computing = _union(span for span, communicating in zip(spans, communicates, strict=True) if not communicating)
    total = sum(end - start for start, end in sending)
    both, place = 0.0, 0
    for start, end in sending:
        while place < len(computing) and computing[place][1] <= start:
            place += 1
        at = place
        while at < len(computing) and computing[at][0] < end:
            both += min(end, computing[at][1]) - max(start, computing[at][0])
            at += 1
    return both / total if total else None


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same stretches of time in order, none touching another."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found
