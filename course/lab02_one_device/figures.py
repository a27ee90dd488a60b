"""Lab 02's figures: memory by kind, what recomputation buys, where a step's time goes, where 16 bits end."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from course.lab02_one_device import experiments
from minillm.drawing import headline, subplots
from minillm.measure import machine
from minillm.measure.memory_tracker import Bytes
from minillm.model import ModelConfig
from minillm.palette import PALETTE, SPANS, look
from minillm.predict.model import forward_flops, parameters
from minillm.predict.training.activations import block_activation_bytes
from minillm.predict.training.memory import training_step

COLOURS = {"parameter": "blue", "gradient": "orange", "optimizer": "green", "activation": "vermillion"}
NAMES = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer (with masters)",
    "activation": "activations",
}
MODELS = {
    "target": experiments.TARGET,
    "Llama 3.2 1B": ModelConfig(128256, 2048, 8192, 16, 32, 8, 64, tie_embeddings=True),
    "Llama 3 8B": ModelConfig(128256, 4096, 14336, 32, 32, 8),
}


# Memory.


def draw_memory(measured: Mapping[str, Bytes], predicted: Mapping[str, Bytes]) -> Figure:
    """The most bytes of each kind in a training step in three precisions, measured and by formula, and the peak."""
    figure, panels = subplots(1, len(measured), width=9, height=2.9, sharex=True, sharey=True, squeeze=False)
    for axes, name in zip(panels[0], measured, strict=True):
        _kinds(axes, measured[name], 2**20, predicted[name])
        axes.set(title=name, xlabel="memory (MiB)")
    tick = panels[0, 0].plot([], [], "k|", markersize=12, markeredgewidth=1.8, label="formula")
    bar = Patch(facecolor="#AAAAAA", label="measured on this machine")
    figure.legend(handles=[bar, *tick], loc="outside lower center", ncols=2)
    headline(figure, "The kinds peak at different moments, so the peak of the step is not their sum")
    return figure


def memory_plan(model: str = "Llama 3 8B", batch: int = 1, seq: int = 4096) -> Figure:
    """What one training step of a model takes, by kind and precision (formula), beside a GPU of 80 GB."""
    config = MODELS[model]
    recipes = {
        "fp32": ("fp32", False),
        "autocast bf16": ("bf16", False),
        "bf16 + masters": ("bf16-master", False),
        "the same, recomputed": ("bf16-master", True),
    }
    steps = [
        experiments.predicted_memory(config, batch, seq, name, recompute=again) for name, again in recipes.values()
    ]
    unit, size = ("GiB", 2**30) if steps[0].total > 2**31 else ("MiB", 2**20)
    figure, panels = subplots(1, len(recipes), width=9, height=2.7, sharex=True, sharey=True)
    for axes, name, step in zip(panels, recipes, steps, strict=True):
        _kinds(axes, step, size)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel(f"memory ({unit})")
        if steps[0].total > 20e9:
            axes.axvline(80e9 / size, color="#555555", linestyle=":", linewidth=1.5)
            axes.text(80e9 / size, 0, " 80 GB", va="center", fontsize=9, color="#555555")
    count = parameters(config).total
    named = f"{count / 1e9:.1f} billion" if count > 1e9 else f"{count / 1e6:.1f} million"
    headline(figure, f"Formula: one step of {model}, {named} parameters, on {batch} × {seq:,} tokens")
    return figure


def _kinds(axes: Axes, held: Bytes, size: int, predicted: Bytes | None = None) -> None:
    """A bar per kind (they peak at different moments, so their sum is no moment's), and the peak of all.

    predicted: drawn as a black tick on each bar.
    """
    peak = (PALETTE["purple"], "++", held.total, predicted and predicted.total)
    kinds = [
        (PALETTE[colour], look(index).hatch, held[kind], predicted and predicted[kind])
        for index, (kind, colour) in enumerate(COLOURS.items())
    ]
    for place, (colour, hatch, measured, formula) in enumerate([*kinds, peak]):
        axes.barh(place, measured / size, 0.7, color=colour, hatch=hatch, edgecolor="white")
        if formula:
            axes.vlines(formula / size, place - 0.42, place + 0.42, color="black", linewidth=1.8)
    axes.set_yticks(range(len(kinds) + 1), [*NAMES.values(), "peak of the step"])
    axes.set_ylim(len(kinds) + 0.6, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")


# Recomputation.

_SHORT = {
    "none": "nothing",
    "every 2nd block": "every 2nd block",
    "selective": "all but matmuls,\nattention",
    "full": "every block",
}


def draw_recompute(found: Mapping[str, Mapping[str, float]]) -> Figure:
    """Activations against FLOPs, and against time, for four ways to recompute: measured, FLOPs by formula too."""
    figure, (left, right) = subplots(1, 2, width=9, height=3.5, sharey=True)
    plain = found["none"]
    for index, (mode, numbers) in enumerate(found.items()):
        drawn, kept = look(index), numbers["activation"] / 2**20
        marks = {"color": drawn.color, "marker": drawn.marker, "linestyle": "", "markersize": 9}
        left.plot([numbers["flops"] / plain["flops"]], [kept], label=_SHORT[mode], **marks)
        predicted = numbers["predicted_flops"] / plain["predicted_flops"]
        ring = {"marker": "o", "markersize": 16, "fillstyle": "none", "linestyle": "", "color": "#777777"}
        left.plot([predicted], [kept], label="formula" if index == 3 else None, **ring)
        right.plot([numbers["seconds"] / plain["seconds"]], [kept], **marks)
    left.set(xlabel="FLOPs, as a multiple", ylabel="activations at their peak (MiB)", xlim=(0.95, 1.38))
    right.set_xlabel("time of forward and backward, as a multiple")
    left.set_ylim(0, plain["activation"] / 2**20 * 1.15)
    left.set_title("FLOPs, counted and by formula")
    right.set_title("Time, measured on this machine")
    figure.legend(loc="outside right center", title="recomputed")
    headline(figure, "Recomputing trades time for memory: fewer activations, slower steps")
    return figure


def recompute_plan(seq: int = 4096, batch: int = 1, layers: int = 32) -> Figure:
    """Activations and FLOPs as more blocks of an 8B-shaped model are recomputed (formula, bf16)."""
    config = ModelConfig(128256, 4096, 14336, layers, 32, 8)
    block = block_activation_bytes(config, batch, seq, 2)
    stream = batch * seq * config.hidden_size * 2
    again = np.arange(layers + 1)
    kept = again * stream + (layers - again) * block + (again > 0) * block
    forward, head = forward_flops(config, (seq + 1) / 2).total, 2 * config.vocab_size * config.hidden_size
    flops = 1 + again / layers * (forward - head) / (3 * forward)
    figure, axes = subplots(width=7.4, height=3.3)
    axes.plot(again, kept / 2**30, color=PALETTE["vermillion"], marker="", label="activations")
    axes.set(xlabel="blocks recomputed", ylabel="activations (GiB)", ylim=(0, kept.max() / 2**30 * 1.1))
    saved = f"{kept[0] / 2**30:.0f} → {kept[-1] / 2**30:.1f} GiB"
    headline(axes, f"Every block recomputed: {saved}", f"Formula: {layers} blocks, {batch} × {seq:,} tokens")
    other = axes.twinx()
    other.plot(again, flops, color=PALETTE["blue"], marker="", linestyle="--", label="FLOPs")
    other.set(ylabel="FLOPs, as a multiple", ylim=(0.95, 1.4))
    other.grid(False)
    other.spines["right"].set_visible(True)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


# Time.


def draw_split(splits: Mapping[str, Mapping[str, float]]) -> Figure:
    """Where the time of a training step goes, with and without recomputation, and the MFU; parts too thin to be seen
    have no label."""
    figure, axes = subplots(width=8.6, height=1.0 + 0.62 * len(splits))
    parts = {
        "input": SPANS["input"],
        "forward": (PALETTE["sky"], ""),
        "backward": SPANS["compute"],
        "optimizer": SPANS["optimizer"],
        "idle": SPANS["idle"],
    }
    for place, split in enumerate(splits.values()):
        left, whole = 0.0, sum(split[part] for part in parts)
        for part, (colour, hatch) in parts.items():
            label = part if place == 0 and split[part] > 0.005 * whole else None  # else too thin to be seen
            axes.barh(place, split[part] * 1e3, 0.6, left, color=colour, hatch=hatch, edgecolor="white", label=label)
            left += split[part] * 1e3
        axes.text(left, place, f"  MFU {split['mfu']:.0%}", va="center", fontsize=9)
    axes.set_yticks(range(len(splits)), list(splits))
    axes.set(xlabel="time of a step (ms)", ylim=(len(splits) - 0.5, -0.5))
    axes.set_xlim(0, axes.get_xlim()[1] * 1.12)
    axes.grid(False, axis="y")
    figure.legend(loc="outside lower center", ncols=len(parts))
    headline(axes, "Recomputing lengthens the backward pass and lowers the MFU")
    return figure


def a_trace() -> Figure:
    """One training step as torch's profiler saw it: operations by kind along time."""
    found, kinds = experiments.profiled(), experiments.KINDS_OF_OPERATION
    figure, axes = subplots(width=9, height=2.6)
    for index, kind in enumerate(kinds):
        spans = [(1e3 * each["start"], 1e3 * each["seconds"]) for each in found if each["kind"] == kind]
        axes.broken_barh(spans, (index - 0.4, 0.8), color=look(index).color)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set(xlabel="time in the step (ms)", ylim=(len(kinds) - 0.5, -0.5))
    headline(axes, "One step of the target model on one core", "From the trace of torch.profiler")
    axes.grid(False, axis="y")
    return figure


# Sixteen bits.


def draw_underflow(gradients: Tensor, scale_log2: int = 0, tokens: int = 512, batch_tokens: int = 4_000_000) -> Figure:
    """Gradients, as small as a batch of millions of tokens makes them, in the range of float16 after scaling."""
    scaled = gradients[gradients != 0].abs().double() * (tokens / batch_tokens) * 2.0**scale_log2
    exponents = torch.log2(scaled).numpy()
    lost, over = (scaled < 2.0**-25).double().mean().item(), (scaled > 65504).double().mean().item()
    figure, axes = subplots(width=8.2, height=3.2)
    axes.hist(
        exponents,
        bins=np.arange(-60, 24),
        color=PALETTE["blue"],
        weights=np.full(len(exponents), 1 / len(exponents)),
    )
    axes.axvspan(-60, -25, color=PALETTE["vermillion"], alpha=0.15, label="becomes 0")
    axes.axvspan(-25, -14, color=PALETTE["yellow"], alpha=0.25, label="loses digits")
    axes.axvspan(16, 24, color=PALETTE["purple"], alpha=0.25, label="becomes infinite")
    axes.set(xlim=(-60, 24), xlabel="log2 of the gradient times the scale", ylabel="share of the gradients")
    axes.set_title(f"Scale 2^{scale_log2}: {lost:.1%} become zero" + (f", {over:.1%} infinite" if over else ""))
    figure.legend(loc="outside lower center", ncols=3)
    return figure


# Broken runs.


def draw_runs(runs: Mapping[str, Any]) -> Figure:
    """Loss of fine-tunings from the same weights."""
    figure, axes = subplots(width=7.4, height=3.2)
    for index, (name, run) in enumerate(runs.items()):
        drawn = look(index)
        axes.plot(run.loss, color=drawn.color, linestyle=drawn.linestyle, marker=drawn.marker, markevery=10, label=name)
    axes.set(xlabel="step", ylabel="loss (nats)")
    axes.legend()
    headline(axes, "Three fine-tunings from the same weights, on the same text")
    return figure


def three_losses() -> Figure:
    """Loss of three fine-tunings, two of which are broken."""
    return draw_runs(experiments.tunings())


# The committed ones: measured anew by `python -m minillm figures`.

PRECISIONS = {"fp32": "fp32", "autocast bf16": "bf16", "bf16 + masters": "bf16-master"}


def memories(precisions: Sequence[str] = tuple(PRECISIONS)) -> tuple[dict[str, Bytes], dict[str, Bytes]]:
    """(measured, predicted) bytes by kind of a step of the target model on 2 × 256 tokens."""
    measured = {name: experiments.step_memory(experiments.TARGET, PRECISIONS[name]) for name in precisions}
    return measured, {
        name: experiments.predicted_memory(experiments.TARGET, 2, 256, PRECISIONS[name]) for name in measured
    }


def splits() -> dict[str, dict[str, float]]:
    """Splits of the target model's step on one core: as it is, and with every block recomputed."""
    peak = machine().peak_flops_one_thread
    return {
        "nothing recomputed": experiments.step_split(peak),
        "every block recomputed": experiments.step_split(peak, activation_checkpointing="full"),
    }


def _memory() -> tuple[Figure, dict[str, Any]]:
    measured, predicted = memories()
    fullest = {name: training_step(experiments.TARGET, 2, 256, PRECISIONS[name]).fullest for name in measured}
    numbers = {name: {"predicted": asdict(predicted[name]), "measured": asdict(measured[name])} for name in measured}
    return draw_memory(measured, predicted), numbers | {"fullest moment": fullest}


def _split() -> tuple[Figure, dict[str, Any]]:
    found = splits()
    return draw_split(found), found


def _recompute() -> tuple[Figure, dict[str, Any]]:
    found = experiments.recompute_tradeoff()
    return draw_recompute(found), found


FIGURES = {"memory": _memory, "split": _split, "recompute": _recompute}
