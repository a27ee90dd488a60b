"""Lab 16's figures: the grid of a row, noise by bits, what each format costs and gains, and where the speedup ends."""

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from course.lab16_quantization import experiments, formulas
from course.lab16_quantization.experiments import Measured, Spectrum
from minillm.drawing import headline, log_ticks, subplots
from minillm.palette import MUTED, PALETTE, look
from minillm.predict.serving import quantization as predict

GROUPS = (256, 128, 64, 32, 16)
SHOWN = 128  # weights of the row that is drawn
LABELS = {  # of points that lie close together: offset and alignment
    "float32": ((0, 12), "center"),
    "int4, groups of 128": ((-2, 16), "center"),
    "int4, groups of 32": ((10, -3), "left"),
    "int8": ((10, 4), "left"),
    "NF4": ((-4, -14), "center"),
}
RIGHT_LABELS = LABELS | {"int4, groups of 32": ((-14, -16), "center")}  # of the panel on the right


# Pure functions of parameters, for sliders.


def grid_of_a_row(bits: int = 4, group: int = 32, outlier: float = 5.0) -> Figure:
    """128 weights of one output, the values that their codes can stand for, and the error that is left: groups with an
    outlier have coarse steps, the others fine ones."""
    weight = np.random.default_rng(0).normal(0, 1, SHOWN).astype(np.float32)
    weight[40] = outlier
    parts = weight.reshape(-1, group)
    steps = 2 * np.abs(parts).max(1, keepdims=True) / (2**bits - 1)
    codes = np.clip(np.round(parts / steps), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    rounded = (codes * steps).reshape(-1)
    figure, (upper, lower) = subplots(2, 1, width=8.5, height=4.4, sharex=True, height_ratios=(2, 1))
    for number, step in enumerate(steps[:, 0]):
        values = step * np.arange(-(2 ** (bits - 1)), 2 ** (bits - 1))
        upper.hlines(values, number * group - 0.5, (number + 1) * group - 0.5, color="#C9C9C9", linewidth=0.7)
    for axes in (upper, lower):
        axes.grid(False)
        for edge in range(group, SHOWN, group):
            axes.axvline(edge - 0.5, color=MUTED, linewidth=0.7, linestyle=":")
    upper.plot(weight, linestyle="", marker="o", markersize=3.5, color=look(0).color)
    upper.plot(40, outlier, linestyle="", marker="D", color=PALETTE["vermillion"], label="the outlier")
    upper.set_ylabel("weight")
    upper.legend(loc="upper right")
    reach = max(1.2, 1.1 * float(np.abs(rounded - weight).max()))
    lower.bar(range(SHOWN), rounded - weight, width=0.9, color=PALETTE["orange"])
    lower.set(ylabel="error", xlabel="input of one output", ylim=(-reach, reach), xlim=(-1, SHOWN))
    snr = 10 * math.log10(float((weight**2).sum() / max(((rounded - weight) ** 2).sum(), 1e-12)))
    setting = f"{predict.bits_per_weight(bits, group):g} bits per weight, signal to noise {snr:.1f} dB"
    headline(upper, "An outlier coarsens the steps of its own group", setting)
    return figure


def speedup_by_batch(bits: float = 4.125, batch: int = 16, context: int = 0) -> Figure:
    """Times faster than 16-bit weights by batch, for the 8B model on one H100, with a mark at the chosen batch."""
    cost = formulas.with_bits(bits)
    knees = [formulas.knee(each, context) for each in (formulas.PLAIN, cost, formulas.EIGHT)]
    corners = [int(knee) + more for knee in knees if knee < 1024 for more in (0, 1)]
    batches = np.unique(np.append(np.geomspace(1, 1024, 60).round().astype(int), corners))

    def faster(count: int, small) -> float:
        work = [(context, 1)] * int(count)
        return formulas.PLAIN.step(work) / small.step(work)

    figure, axes = subplots(width=8, height=3.5)
    axes.plot(batches, [faster(b, cost) for b in batches], color=look(0).color, marker="",
              label=f"{bits:g}-bit weights, 16-bit products")  # fmt: skip
    axes.plot(batches, [faster(b, formulas.EIGHT) for b in batches], color=look(1).color, linestyle="--", marker="",
              label="8-bit weights and inputs, 8-bit products")  # fmt: skip
    axes.plot(batch, faster(batch, cost), linestyle="", marker="D", markersize=7, color=PALETTE["vermillion"])
    axes.annotate(f"batch {batch}: {faster(batch, cost):.2f} times", (batch, faster(batch, cost)), xytext=(8, 8),
                  textcoords="offset points", fontsize=9)  # fmt: skip
    axes.axhline(1, color=PALETTE["black"], linewidth=0.8)
    axes.set(xscale="log", xlabel="sequences in a step", ylabel="times faster", ylim=(0.8, max(4.4, 16 / bits * 1.12)))
    log_ticks(axes.xaxis)
    headline(
        axes, "Small weights speed up small batches", f"8B on one H100, contexts of {context:,} tokens, by formula"
    )
    axes.legend(loc="upper right")
    return figure


# Drawn from measurements.


def draw_noise(found: dict[str, list[tuple[float, float]]]) -> Figure:
    """Signal to noise by bits per weight; the points of a line are groups of several sizes."""
    figure, axes = subplots(width=8, height=3.5)
    for index, (name, points) in enumerate(found.items()):
        drawn = look(index)
        axes.plot(*zip(*points, strict=True), color=drawn.color, marker=drawn.marker, label=f"{name}, groups of "
                  f"{GROUPS[0]} (left) to {GROUPS[-1]}")  # fmt: skip
        for place, (group, point) in enumerate(zip(GROUPS, points, strict=True)):
            offset = (-12, 2) if place == 0 else (8, -12) if place == 1 else (0, 8 if group > 16 else -15)
            axes.annotate(str(group), point, xytext=offset, textcoords="offset points", fontsize=9, ha="center")
    bits, start = np.array((4.0, 9.2)), found["int4"][0]
    axes.plot(bits, start[1] + 6.02 * (bits - start[0]), color=MUTED, linestyle=":", marker="", label="6.02 dB a bit")
    axes.set(xlabel="bits per weight, scales included", ylabel="signal to noise (dB)")
    axes.margins(y=0.12)
    message = "Smaller groups pay down to about 64 weights; below, bits belong in the codes"
    headline(axes, message, "All layers of the committed target")
    axes.legend(loc="lower right")
    return figure


def draw_spectrum(found: Spectrum) -> Figure:
    """Relative error of the best matrix of each rank by its bits per weight, beside those of int8 and int4."""
    figure, axes = subplots(width=8, height=3.5)
    whole, (outputs, inputs) = math.hypot(*found.values), found.shape
    ranks = range(1, len(found.values) + 1)
    bits = [16 * rank * (outputs + inputs) / (outputs * inputs) for rank in ranks]
    errors = [predict.low_rank_error(found.values, rank) / whole for rank in ranks]
    axes.plot(bits, errors, color=look(0).color, marker="", label=f"rank 1 to {len(found.values)}, factors in 16 bits")
    for index, (name, (each_bits, error)) in enumerate(found.points.items(), 1):
        drawn = look(index)
        axes.plot(each_bits, error, linestyle="", marker=drawn.marker, markersize=8, color=drawn.color, label=name)
    axes.axvline(16, color=MUTED, linewidth=0.8, linestyle=":")
    axes.annotate("the matrix in 16 bits", (16, 0.92), xytext=(5, 0), textcoords="offset points", fontsize=9)
    axes.set(xlabel="bits per weight of the matrix", ylabel="relative error ‖W - Ŵ‖ / ‖W‖", ylim=(-0.03, 1.02))
    setting = f"{found.name} of the target, {outputs} x {inputs}"
    headline(axes, "At the same bytes rounding loses far less than cutting the rank", setting)
    axes.legend(loc="upper center", bbox_to_anchor=(0.48, 1))
    return figure


def draw_formats(found: list[Measured]) -> Figure:
    """KL to the original and tokens per second of each format, by the model's bytes; the draft as a smaller model."""
    figure, (left, right) = subplots(1, 2, width=9, height=3.9)
    for index, each in enumerate(found):
        drawn = look(index)
        place = {"linestyle": "", "color": drawn.color, "marker": drawn.marker, "markersize": 7}
        points = [(right, 1 / each.seconds, RIGHT_LABELS)]
        if index:  # the original is no distance from itself
            points.append((left, each.kl, LABELS))
        for axes, height, labels in points:
            axes.plot(each.bytes / 1e6, height, **place)
            offset, side = labels.get(each.name, ((10, 0), "left"))
            axes.annotate(each.name, (each.bytes / 1e6, height), xytext=offset, textcoords="offset points",
                          fontsize=9, ha=side, va="center")  # fmt: skip
    left.set(ylabel="KL to the original (nats)", yscale="log")
    right.set(ylabel="tokens per second", yscale="log")
    left.set_title("Error on held-out text: lower is better")
    right.set_title("One sequence on one thread: higher is better")
    for axes in (left, right):
        axes.set(xlabel="the model's bytes (MB)", xlim=(0, 1.1 * max(each.bytes for each in found) / 1e6))
        axes.margins(y=0.12)
        axes.grid(False, which="minor")
    log_ticks(left.yaxis)
    log_ticks(right.yaxis)
    headline(figure, "Rounding costs little error, and gains speed only where a kernel reads the codes")
    return figure


# The committed figures: how each is made, with its numbers.


def _formats() -> tuple[Figure, dict[str, Any]]:
    found = experiments.formats()
    rows = {
        each.name: {"bytes": each.bytes, "bits_per_byte": each.bits_per_byte, "tokens_per_s": 1 / each.seconds}
        | {"kl": each.kl, "kernel": each.kernel}
        for each in found
    }
    return draw_formats(found), rows


def _noise() -> tuple[Figure, dict[str, Any]]:
    found = experiments.noise_by_group(GROUPS)
    return draw_noise(found), {"groups": GROUPS, "bits_and_db": found}


def _batch() -> tuple[Figure, dict[str, Any]]:
    batches = (1, 16, 64, 128, 256, 512)
    work = {count: [(0, 1)] * count for count in batches}
    rows = {
        count: {"four": formulas.PLAIN.step(each) / formulas.FOUR.step(each),
                "eight": formulas.PLAIN.step(each) / formulas.EIGHT.step(each)}
        for count, each in work.items()
    }  # fmt: skip
    return speedup_by_batch(), {"times_faster_by_batch": rows}


def _spectrum() -> tuple[Figure, dict[str, Any]]:
    found = experiments.spectrum()
    return draw_spectrum(found), {"layer": found.name, "singular_values": found.values, "formats": found.points}


FIGURES = {"formats": _formats, "noise": _noise, "batch": _batch, "spectrum": _spectrum}
