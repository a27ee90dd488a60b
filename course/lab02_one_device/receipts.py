"""Lab 02's claims: bytes by kind, FLOPs, recomputation, precision, clipping; what depends on the machine is noisy."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from course.kit.answers import answers_of
from course.kit.receipts import Receipt, formula, receipt, row
from course.lab02_one_device import experiments, figures, watching
from course.lab02_one_device.experiments import CONFIG, SMALL, TARGET, flushed_share, repeated_update
from course.shared.table import Table, seconds, table
from minillm.measure import machine
from minillm.model import Transformer, dense
from minillm.predict import model as predict
from minillm.predict.training.activations import block_activation_bytes
from minillm.train import LossScaler

ANSWERS = answers_of("02_one_device")


def bytes_per_parameter(ledger: Callable | None = None, guess: float | None = None) -> Receipt:
    """16, in float32 and in 16 bits with masters, and what stays between steps; counted while a small stack trains, and
    by the ledger."""
    hidden, intermediate, layers = 64, 256, 3
    weights, found = 2 * hidden * intermediate * layers, {}
    for mixed in (False, True):
        held = watching.stack_memory(hidden, intermediate, layers, 16, mixed=mixed)
        stays = held["parameter"] + held["optimizer"]
        found[mixed] = (stays + held["gradient"]) / weights
    mine = (ledger or ANSWERS.memory_ledger)(1024, 4096, 24, 0, True)
    return receipt(
        "bytes per parameter when backward is done",
        [
            row("float32: 4 + 4 + 8", 16, found[False]),
            row("16 bits with masters: 2 + 2 + 4 + 8", 16, found[True]),
            row("    between steps, without gradients", 14, stays / weights, guess=guess),
            row("your ledger, 16 bits", 16, sum(mine.values()) / (2 * 1024 * 4096 * 24)),
        ],
    )


def memory_by_kind(found: tuple[Mapping, Mapping] | None = None) -> Receipt:
    """A step of the target model in three precisions: state, activations and peak by formula and by census."""
    measured, predicted = found or figures.memories()
    psi, rows = predict.parameters(TARGET).total, []
    for name, each in measured.items():
        state = (each.parameter + each.gradient + each.optimizer) / psi
        due = 18 if "masters" in name else 16
        rows.append(row(f"{name}: bytes per parameter while it steps", due, state, "", 1e-3))
        rows.append(row("    activations", predicted[name].activation, each.activation, "B", 0.02))
        rows.append(row("    peak of the step", predicted[name].total, each.total, "B", 0.02))
    return receipt(f"{psi:,} parameters, 2 × 256 tokens", rows, open_rows=3)


def saved_by_16_bits(measured: Mapping, guess: float) -> Table:
    """Peak saved and activations left."""
    plain, lines = measured["fp32"], []
    for name, each in measured.items():
        if name != "fp32":
            asked = f"{guess:.0%}" if name == "autocast bf16" else None
            saved, left = 1 - each.total / plain.total, each.activation / plain.activation
            lines.append((name, asked, f"{saved:.0%}", f"{left:.0%}"))
    columns = ("", "peak saved: your guess", "measured", "activations left, measured")
    return table("what 16 bits save", columns, lines)


def six_flops() -> Receipt:
    """FLOPs of a step, counted by torch, per weight and token; with attention's scores by the formula."""
    tokens = torch.randint(0, SMALL.vocab_size, (2, 65), generator=torch.Generator().manual_seed(0))
    fused, scores = (
        experiments.count_flops(partial(experiments.train_once, Transformer(SMALL, attention=attention), tokens))
        for attention in (Transformer(SMALL).attention, dense)
    )
    weights = predict.matmul_parameters(SMALL)
    flops = predict.training_flops(SMALL, 64).total
    shares = [predict.training_flops(SMALL, seq) for seq in (64, 256)]
    return receipt(
        f"one step on 128 tokens, {weights:,} weights in matmuls",
        [
            row("FLOPs per weight and token", 6, fused / (128 * weights)),
            row("FLOPs of the step with attention, all keys", 128 * flops, scores, "FLOP"),
            *(
                formula(f"share of attention at {seq} tokens", f"{each.attention / each.total:.1%}")
                for seq, each in zip((64, 256), shares, strict=True)
            ),
        ],
        open_rows=2,
    )


def step(splits: Mapping[str, Mapping[str, float]], mfu: Callable) -> Receipt:
    """Parts of a step on one core, and the learner's MFU beside the trainer's."""
    plain, peak = splits["nothing recomputed"], machine().peak_flops_one_thread
    width = TARGET.num_heads * TARGET.head_dim
    mine = mfu(predict.matmul_parameters(TARGET), TARGET.num_layers, width, 128, plain["tokens_per_s"], peak)
    return receipt(
        "one step of 4 × 128 tokens, one core",
        [
            row("your MFU (formula), and the trainer's", mine, plain["mfu"], "", 1e-6),
            row("tokens per second", None, plain["tokens_per_s"], "token/s"),
            row("peak of the core", None, peak, "FLOP/s"),
            row("backward / forward", None, plain["backward"] / plain["forward"]),
            row("optimizer, share of the step", None, f"{plain['optimizer'] / plain['step']:.1%}"),
        ],
        open_rows=3,
    )


def trace() -> Table:
    """One profiled step of the target model by kind of operation."""
    found = experiments.profiled()
    total, lines = sum(each["seconds"] for each in found), []
    for kind in experiments.KINDS_OF_OPERATION:
        own = [each for each in found if each["kind"] == kind]
        took = sum(each["seconds"] for each in own)
        lines.append((kind, len(own), seconds(took), f"{took / total:.0%}"))
    return table("one step of the target model, torch's profiler", ("", "calls", "measured", "share"), lines)


def accumulation(accumulate: Callable | None = None) -> Receipt:
    """Unequal pieces beside the whole batch: gradient, activations, gradients held."""
    accumulate = accumulate or ANSWERS.accumulate
    batches = experiments.unequal_batches(CONFIG)
    big, mean = experiments.big_batch_gradient(batches), experiments.mean_of_means_gradient(batches)
    pieces = Transformer(CONFIG, dtype=torch.float64)
    accumulate(pieces, batches)
    mine = experiments.gradient(pieces)
    off = {name: ((g - big).norm() / big.norm()).item() for name, g in (("yours", mine), ("means", mean))}
    one, four = (experiments.step_memory(SMALL, batch=1, accumulate=k) for k in (1, 4))
    at_once = experiments.step_memory(SMALL, batch=4)
    return receipt(
        "60, 9 and 30 tokens in three pieces; memory of 4 × 256 tokens",
        [
            row("yours: relative error of the gradient below 1e-12", True, off["yours"] < 1e-12),
            row("mean of means: relative error", None, f"{off['means']:.0%}"),
            row("activations of 4 pieces: those of one", one.activation, four.activation, "B", 0.02),
            row("    of 4 rows at once", None, at_once.activation, "B"),
            row("gradients of 4 pieces: those of one", one.gradient, four.gradient, "B"),
        ],
        open_rows=2,
    )


def sixteen_bits() -> Receipt:
    """What bfloat16 loses next to 1, and float16 near 0."""
    values = experiments.spread_values()
    share = math.log10(2**-25 / 1e-12) / 10
    return receipt(
        "what is lost",
        [
            row("bf16: 1 + 1,000 · 0.001", 1.0, repeated_update(torch.bfloat16)),
            row("fp32: 1 + 1,000 · 0.001", 2.0, repeated_update(torch.float32), "", 1e-4),
            row("fp16: log-uniform 1e-12 .. 1e-2, become zero", share, flushed_share(values, torch.float16), "", 0.02),
            row("    multiplied by 2^16 before", 0, flushed_share(values, torch.float16, 2.0**16)),
            row("bf16: the same values", 0, flushed_share(values, torch.bfloat16)),
        ],
        open_rows=2,
    )


def recomputation(ways: Mapping[str, Mapping[str, float]] | None = None, guess: float | None = None) -> Receipt:
    """FLOPs and activations with blocks recomputed."""
    ways = ways or experiments.recompute_tradeoff(repeats=1, modes=("none", "selective", "full"))
    head = 3 * 2 * 256 * 2 * SMALL.vocab_size * SMALL.hidden_size
    blocks = {mode: numbers["flops"] - head for mode, numbers in ways.items()}
    kept = [experiments.predicted_memory(SMALL, 2, 256, recompute=again).activation for again in (False, True)]
    return receipt(
        "4 blocks, 2 × 256 tokens",
        [
            row("FLOPs of the blocks, all recomputed", 4 / 3, blocks["full"] / blocks["none"], "", 1e-9, guess=guess),
            row("    all but matmuls and attention", 1, blocks["selective"] / blocks["none"]),
            row("FLOPs of the step, the head's included", None, ways["full"]["flops"] / ways["none"]["flops"]),
            row("activations, nothing recomputed", kept[0], ways["none"]["activation"], "B", 0.02),
            row("    every block: their inputs, and one block", kept[1], ways["full"]["activation"], "B", 0.02),
            row("time, every block recomputed", None, ways["full"]["seconds"] / ways["none"]["seconds"], noisy=True),
        ],
        open_rows=3,
    )


def core_attention() -> Table:
    """Korthikanti et al. 2022, §4: activations of a layer, s·b·h·(34 + 5·a·s/h) bytes in 16 bits, and what the two
    kinds of recomputation leave and cost. The MLP has 4h, no SwiGLU, and attention writes its scores."""
    lines = []
    for name, h, a, s in (("GPT-3 175B", 12288, 96, 2048), ("the same, 8,192 tokens", 12288, 96, 8192)):
        core, forward = 5 * a * s / h, 24 * h + 4 * s  # elements per s·b·h; forward FLOPs per token and h
        lines.append(
            (name, f"{34 + core:.0f}", f"{core / (34 + core):.0%}", f"{4 * s / (3 * forward):.1%}",
             f"{(32 + core) / (34 + core):.0%}", f"{1 / 3:.0%}")
        )  # fmt: skip
    columns = ("", "bytes per s·b·h", "core attention: saves", "more FLOPs", "whole layer: saves", "more FLOPs")
    title = "one layer, formula; more FLOPs is of a whole step, and of its forward pass three times as much"
    return table(title, columns, lines)


def clipping(clip: Callable | None = None) -> Receipt:
    """The norm of a shard, and what clipping each shard by its own does."""
    draw = torch.Generator().manual_seed(0)
    shards = [[torch.randn(20_000, generator=draw)] for _ in range(16)]
    local = [shard[0].norm().item() for shard in shards]
    norm = (clip or ANSWERS.clip)(shards, 1.0)
    wrong = math.sqrt(sum(min(1.0, value) ** 2 for value in local))
    return receipt(
        "a gradient in 16 shards, clipped to a norm of 1",
        [
            row("norm of one shard: global / √16", norm / 4, sum(local) / 16, "", 0.02),
            row("norm after your clipping", 1.0, torch.cat([shard[0] for shard in shards]).norm(), "", 1e-5),
            row("norm if each shard clips by its own: √16", 4.0, wrong, "", 0.01),
        ],
        open_rows=2,
    )


def witnesses(stands_still: str, never_zeroes: str) -> Table:
    """The reader's diagnosis of three fine-tunings, and the two numbers that show each fault."""
    said = {stands_still: "no masters", never_zeroes: "never zeroes"}
    truth = {"A": "no masters (bf16 weights)", "B": "never zeroes its gradients", "C": "healthy"}
    lines = [
        (name, said.get(name, "healthy"), truth[name], f"{run.moved:.0%}", run.grad_norm[-1] / run.grad_norm[0],
         run.loss[0] - run.loss[-1])
        for name, run in experiments.tunings().items()
    ]  # fmt: skip
    columns = ("", "you said", "it is", "weights that changed", "gradient norm, last / first", "fall of the loss")
    return table("three fine-tunings, 60 steps at a learning rate of 2e-5", columns, lines)


def higher_rate() -> Receipt:
    """At a larger learning rate a run that never clears its gradients falls behind."""
    fast = {zero: experiments.tune(zero_grad=zero, lr=1e-3).loss[-1] for zero in (True, False)}
    return receipt(
        "60 steps at a learning rate of 1e-3",
        [
            row("loss at the end, gradients cleared", None, fast[True], "nats"),
            row("    never cleared", None, fast[False], "nats"),
            row("the run that clears ends lower", True, fast[True] < fast[False]),
        ],
        open_rows=2,
    )


def price(ways: Mapping[str, Mapping[str, float]], splits: Mapping[str, Mapping[str, float]]) -> Table:
    """What the memory savers cost in time on this machine."""
    fixed = {k: experiments.step_split(None, batch=8 // k, seq=64, accumulate=k, steps=2)["step"] for k in (1, 8)}
    card, plain = machine(), ways["none"]["seconds"]
    lines = [
        ("every block recomputed: time, as a multiple", ways["full"]["seconds"] / plain),
        ("all but matmuls and attention recomputed", ways["selective"]["seconds"] / plain),
        ("MFU with nothing recomputed", f"{splits['nothing recomputed']['mfu']:.1%}"),
        ("    every block: the repeated FLOPs are not useful", f"{splits['every block recomputed']['mfu']:.1%}"),
        ("8 rows in 8 pieces: time of the step, as a multiple", fixed[8] / fixed[1]),
        ("bf16 matmul rate of this machine / fp32's", card.peak_flops_bf16 / card.peak_flops),
    ]
    return table("the price, on this machine", ("", "measured"), lines)


def torch_checkpoint() -> Receipt:
    """torch.utils.checkpoint: its early stop, and inputs without a gradient."""
    found, layer, x, outcome = experiments.early_stop(), nn.Linear(4, 4), torch.randn(2, 4), {}
    for reentrant in (True, False):
        with warnings.catch_warnings(action="ignore"):
            try:
                checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
                outcome[reentrant] = "trains"
            except RuntimeError:
                outcome[reentrant] = "RuntimeError"
    return receipt(
        "torch.utils.checkpoint",
        [
            row("block of two matmuls, default: FLOPs", 7 / 6, found["early stop"], "", 1e-9),
            row("    early_stop=False", 4 / 3, found["to the end"], "", 1e-9),
            row("input without gradient, use_reentrant=False", "trains", outcome[False]),
            row("    use_reentrant=True", "RuntimeError", outcome[True]),
        ],
        open_rows=2,
    )


def torch_and_accelerate() -> Receipt:
    """torch's GradScaler beside minillm's, and accelerate's documented loop on unequal pieces."""
    draw = torch.Generator().manual_seed(0)
    theirs, ours = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=5), LossScaler(interval=5)
    weight, same = nn.Parameter(torch.ones(3)), []
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for overflow in (torch.rand(40, generator=draw) < 0.2).tolist():
        optimizer.zero_grad()
        theirs.scale((weight * (math.inf if overflow else 1.0)).sum()).backward()
        theirs.step(optimizer)
        theirs.update()
        ours.update(not overflow)
        same.append(ours.value == theirs.get_scale())
    rows = [row("GradScaler: steps with the same scale, of 40", 40, sum(same))]
    batches = experiments.unequal_batches(CONFIG)
    try:
        library = experiments.accelerate_gradient(CONFIG, batches)
    except ImportError:
        return receipt("torch (accelerate is not installed: pip install accelerate to compare)", rows)
    mean, big = experiments.mean_of_means_gradient(batches), experiments.big_batch_gradient(batches)
    apart = ((library - mean).norm() / mean.norm()).item()
    rows.append(row("accelerate: equal to the mean of means, to 1e-12", True, apart < 1e-12))
    far = ((library - big).norm() / big.norm()).item()
    rows.append(row("    relative distance from the big batch", None, f"{far:.0%}"))
    return receipt("torch and accelerate", rows, open_rows=1)


def interview() -> Table:
    """Numbers that the questions rest on."""
    eight = figures.MODELS["Llama 3 8B"]
    flops = predict.training_flops(eight, predict.causal_context(4096))
    lines = [
        ("7B and 70B with Adam, without activations, GB", (round(16 * 7.0), round(16 * 70.6))),
        ("8B on 1 T tokens, 6·N·T, FLOP", 6 * 8.03e9 * 1e12),
        ("    days on 64 H100 at 40 % of 989 TFLOP/s", 6 * 8.03e9 * 1e12 / (64 * 0.4 * 989e12) / 86400),
        ("    share of attention at 4,096 tokens", f"{flops.attention / flops.total:.1%}"),
        ("one block of it, 4,096 tokens in bf16, MB", block_activation_bytes(eight, 1, 4096, 2) / 1e6),
        ("    its input, MB", 4096 * eight.hidden_size * 2 / 1e6),
        ("seconds to step 7B at 3.35 TB/s, 28 B each", seconds(28 * 7e9 / 3.35e12)),
    ]
    return table("numbers for the answers, by formula", ("quantity", "formula"), lines)


def design_memory(seqs: Sequence[int] = (3072, 16384, 40960)) -> Table:
    """D1: the peak of one step of an 8B model on one GPU, by length, precision and recomputation."""
    eight, lines = figures.MODELS["Llama 3 8B"], []
    for seq in seqs:
        peaks = [
            experiments.predicted_memory(eight, 1, seq, name, recompute=again).total / 1e9
            for name, again in (("fp32", False), ("bf16", True), ("bf16-master", False), ("bf16-master", True))
        ]
        lines.append((f"1 × {seq:,} tokens", *(f"{peak:,.0f} GB" for peak in peaks)))
    columns = (
        "",
        "fp32",
        "autocast bf16, every block recomputed",
        "bf16 + masters",
        "the same, every block recomputed",
    )
    return table("D1: peak of a step of Llama 3 8B, formula", columns, lines)


def design_time(parameters: float = 3e9, tokens: float = 4e11, gpus: int = 32) -> Table:
    """D2: days and GPU-hours of a pretraining run at three utilizations."""
    lines = []
    for name, mfu in (("MFU 45 %", 0.45), ("MFU 40 %", 0.4), ("40 % of the peak, all recomputed: MFU 30 %", 0.3)):
        took = 6 * parameters * tokens / (gpus * mfu * 989e12)
        lines.append((name, f"{took / 86400:.1f}", f"{gpus * took / 3600:,.0f}"))
    return table("D2: 3B parameters, 400 B tokens, 32 H100s, formula", ("", "days", "GPU-hours"), lines)


CLAIMS: tuple[Callable[[], Any], ...] = (
    bytes_per_parameter,
    memory_by_kind,
    six_flops,
    accumulation,
    sixteen_bits,
    recomputation,
    clipping,
    torch_checkpoint,
)
