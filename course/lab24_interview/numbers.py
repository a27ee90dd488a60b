"""The numbers of the cards: what {{ ... }} in an answer may call. Everything comes from `minillm.predict`."""

import math
from typing import Any

from minillm.predict import comms, faults, kernels, roofline
from minillm.predict.model import ADAM_MIXED_FP32_GRADIENTS as STATE
from minillm.predict.planner import published
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import DEVICES, HALF_WIDTH, Device
from minillm.predict.serving import queueing, speculation
from minillm.predict.training import context, moe, pipeline


def n(value: float, digits: int = 0) -> str:
    """A number with that many significant digits; 0: three of them, whole ones and thousands as they are.

    4.5 stays 4.5, 1,109.4 becomes 1,109; from 10^15 on as 5.9e23.
    """
    if abs(value) >= 1e15:
        return f"{value:.{max(digits, 2)}g}".replace("e+", "e")
    if digits:
        value = float(f"{value:.{digits}g}")
        return f"{value:,.0f}" if value == int(value) else f"{value:,.6g}"
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def si(value: float) -> str:
    """Three digits with a decimal prefix, for a unit that follows: 989 T, 3.35 T, 450 G."""
    if not value:
        return "0 "
    value = float(f"{value:.3g}")  # before the prefix is chosen: 999.9 G are 1 T
    power = min(6, max(0, int(math.log10(abs(value)) // 3)))
    return f"{value / 1000**power:.3g} {'kMGTPE'[power - 1] if power else ''}"


def data(value: float) -> str:
    return f"{si(value)}B"


def pct(share: float) -> str:
    return f"{100 * share:.3g} %" if share < 0.2 else f"{100 * share:.0f} %"


def dev(name: str) -> Device:
    return DEVICES[name]


def ridge(name: str) -> float:
    return roofline.ridge_point(dev(name).flops, dev(name).bandwidth)


def ring(num_bytes: float, ranks: int) -> float:
    """Bytes each rank sends in a ring all-reduce."""
    return comms.ring_all_reduce(int(num_bytes), 1, ranks).sent_per_rank[0]


def crossover(ranks: int, latency: float, bandwidth: float) -> float:
    return comms.crossover_bytes(comms.ring_all_reduce, comms.tree_all_reduce, ranks, latency, bandwidth)


def equal_context(name: str) -> float:
    """Sequence length at which causal attention takes as many FLOPs as the weights."""
    model = architecture(name)
    return 2 * 2 * model.active_layer / model.attention_flops(1)


def matmul_parameters(name: str) -> float:
    """Those that multiply every token: all but the embedding's, which are looked up; a tied head multiplies."""
    model = architecture(name)
    return model.active_parameters - (0 if model.tie_embeddings else model.vocab_size * model.hidden_size)


def harmonic(count: int) -> float:
    """The expected maximum of so many exponential lengths, in means."""
    return sum(1 / each for each in range(1, count + 1))


def run_named(start: str) -> published.Comparison:
    return published.compare(next(run for run in published.RUNS if run.name.startswith(start)))


def ulysses_over_ring(kv_heads: int) -> float:
    """Bytes that a rank sends forward: 64 heads, 8 ranks; the length and the size of a head cancel."""
    shape = context.AttentionShape(1, 8192, 64, kv_heads, 128, 2)
    return context.forward_traffic("ulysses", shape, 8).bytes / context.forward_traffic("ring", shape, 8).bytes


def goodput(gpus: int) -> float:
    """Of saves of 30 s and restarts of ten minutes, at the failure rate of Llama 3's GPUs."""
    return faults.best_goodput(30, 600, faults.job_mtbf(faults.LLAMA3_GPU_MTBF_S, gpus))


def lora(name: str, rank: int) -> float:
    """Bytes of an adapter on all seven matrices of a layer, in 16 bits: rank · (inputs + outputs) numbers of each."""
    model = architecture(name)
    hidden, kv = model.hidden_size, model.num_kv_heads * model.head_dim
    each = 2 * (hidden + hidden) + 2 * (hidden + kv) + 3 * (hidden + model.intermediate_size)
    return 2 * model.num_layers * rank * each


def launches(fused: bool) -> int:
    """Kernels of a decoding layer."""
    return sum(kernel.launches for kernel in kernels.decode_layer(architecture("llama-3-8b"), 1, 1, fused=fused))


def reported() -> list[float]:
    """Model FLOPs as a share of the peak, of the published runs that print it, ascending."""
    return sorted(run.reported for run in published.RUNS if run.basis == "model" and not run.stack.fp8)


NUMBERS: dict[str, Any] = {
    "abs": abs,
    "ceil": math.ceil,
    "n": n,
    "si": si,
    "data": data,
    "pct": pct,
    "dev": dev,
    "ridge": ridge,
    "ring": ring,
    "crossover": crossover,
    "equal_context": equal_context,
    "harmonic": harmonic,
    "published": run_named,
    "STATE": STATE,
    "HALF_WIDTH": HALF_WIDTH,
    "matmul": matmul_parameters,
    "P": lambda name: architecture(name).parameters,
    "active": lambda name: architecture(name).active_parameters,
    "kv": lambda name: architecture(name).kv_bytes(),
    "zero": lambda parameters, ranks, stage: STATE.per_rank(int(parameters), ranks, stage),
    "intensity": roofline.matmul_intensity,
    "idle": pipeline.idle_share,
    "microbatches": pipeline.microbatches_needed,
    "inflight": lambda stages, chunks: (
        pipeline.in_flight_interleaved(stages, chunks, 1000) if chunks > 1 else pipeline.in_flight_1f1b(stages, 0, 1000)
    ),
    "uneven": lambda times, m: pipeline.uneven_makespan([t / 3 for t in times], [2 * t / 3 for t in times], m),
    "young": faults.young_interval,
    "waste": lambda save, restart, mtbf: faults.wasted_share(faults.young_interval(save, mtbf), save, restart, mtbf),
    "goodput": goodput,
    "lora": lora,
    "launches": launches,
    "reported": reported,
    "save_rate": lambda parameters, mtbf, wasted: faults.checkpoint_bandwidth(
        faults.checkpoint_bytes(parameters), mtbf, wasted
    ),
    "ulysses_over_ring": ulysses_over_ring,
    "dropped": moe.expected_dropped_share,
    "nodes": moe.nodes_reached,
    "mean_wait": lambda load: queueing.mean_wait(load, 1.0),
    "tail": lambda load, share: queueing.wait_quantile(load, 1.0, share),
    "per_pass": speculation.tokens_per_pass,
    "spec": speculation.speedup,
    "spec_full": lambda alpha, c, k: speculation.speedup(alpha, c, k, verify=k + 1),
    "best_k": speculation.best_k,
}
