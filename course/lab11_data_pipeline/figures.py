"""Lab 11's figures: tokens by vocabulary, what padding wastes, and a step that waits for its input."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from course.kit.answers import answers_of
from course.lab11_data_pipeline import experiments
from course.lab11_data_pipeline import formulas as predict
from course.lab11_data_pipeline.padding import length_batches
from minillm.drawing import headline, lines, subplots
from minillm.measure import Ledger, timeline
from minillm.palette import PALETTE, SPANS, look

FILL = {"facecolor": "white", "edgecolor": PALETTE["vermillion"], "hatch": "xxxx", "linewidth": 0.4}


def draw_tokens(numbers: dict[str, Any]) -> Figure:
    """Tokens per character of held-out code, and parameters of an embedding, by size of the vocabulary."""
    sizes = numbers["vocab_size"]
    share = [tokens / numbers["characters"] for tokens in numbers["tokens"]]
    figure, (left, right) = subplots(1, 2, width=9, height=3.4)
    lines(
        sizes,
        {"byte-level BPE": share},
        x_axis=("vocabulary", ""),
        y_axis=("tokens per character", ""),
        title="More merges make the text shorter …",
        log="x",
        ax=left,
    )
    lines(
        sizes,
        {
            "attention and MLP, 8 layers": [8 * 12 * 256**2] * len(sizes),
            "embedding and head": [2 * n * 256 for n in sizes],
        },
        x_axis=("vocabulary", ""),
        y_axis=("parameters (millions)", ""),
        title="… and the embedding larger",
        log="x",
        ax=right,
    )
    left.axhline(1, color=PALETTE["vermillion"], linestyle=":", linewidth=1.2, label="characters")
    left.set_ylim(0, 1.08)
    left.legend()
    right.legend(title="hidden size 256")
    right.yaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}")
    for axes in (left, right):
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=9)
        axes.minorticks_off()
    return figure


def draw_padding(lengths: Sequence[int], batch_size: int = 8) -> Figure:
    """A random and a sorted batch with their padding, and the waste of all batches by batch size."""
    figure, panels = subplots(1, 3, width=9, height=3.5, width_ratios=(3, 3, 4))
    for axes, (name, by_length) in zip(panels, (("random", False), ("sorted by length", True)), strict=False):
        batches = length_batches(lengths, batch_size, 0, by_length)
        batch = [lengths[i] for i in _typical(batches, lengths)]
        _draw_batch(axes, batch, f"{name.capitalize()}: {predict.padding_waste([batch]):.0%} padding")
    numbers = experiments.padding(lengths)
    names = list(numbers["waste"])
    lines(
        numbers["batch_sizes"],
        {**numbers["waste"], "packed": [numbers["packed"]] * len(numbers["batch_sizes"])},
        x_axis=("documents per batch", ""),
        y_axis=("padding, of all positions", ""),
        title="All batches of the corpus",
        log="x",
        ax=panels[2],
    )
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=2)
    panels[2].axvline(batch_size, color="#999999", linestyle=":", linewidth=1)
    panels[2].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    panels[2].set_ylim(-0.03, 1)
    panels[2].legend([*names, "packed"], loc="upper left")
    figure.get_layout_engine().set(wspace=0.06)
    headline(figure, "Random batches pad the most; sorting by length helps, packing leaves almost none")
    return figure


def _typical(batches: Sequence[np.ndarray], lengths: Sequence[int]) -> np.ndarray:
    """The batch whose waste is the median of the full ones."""
    full = [batch for batch in batches if len(batch) == len(batches[0]) or len(batches) == 1]
    return sorted(full, key=lambda batch: predict.padding_waste([[lengths[i] for i in batch]]))[len(full) // 2]


def _draw_batch(axes: Axes, batch: Sequence[int], title: str) -> None:
    rows, longest = np.arange(len(batch)), max(batch)
    axes.barh(rows, batch, 0.8, color=PALETTE["blue"], label="tokens")
    axes.barh(rows, [longest - length for length in batch], 0.8, left=batch, label="padding", **FILL)
    axes.set(xlabel="position", ylabel="row of the batch", xlim=(0, longest * 1.01), ylim=(len(batch) - 0.4, -0.6))
    axes.set_yticks([])
    axes.grid(False)
    axes.set_title(title)


def draw_starvation(found: dict[str, Any], seconds: float | None = None) -> Figure:
    """Timeline of the same training with batches loaded on demand and prefetched: the loader above, the step below."""
    ledgers = [_from_zero(numbers["ledger"], seconds) for numbers in found.values()]
    figure = timeline(ledgers)
    axes = figure.axes[0]
    axes.set_yticks(range(len(found)), list(found), fontweight="bold")
    for label in axes.get_yticklabels(minor=True):
        label.set_visible(False)
    axes.tick_params(axis="y", pad=8)
    headline(axes, "Prefetching loads the next batch while a step computes")
    return figure


def _from_zero(led: Ledger, seconds: float | None) -> Ledger:
    """A ledger whose first span starts at 0, cut after `seconds`."""
    zero = min(span.start for span in led.spans)
    moved = [replace(span, start=span.start - zero, end=span.end - zero) for span in led.spans]
    return Ledger(spans=[span for span in moved if seconds is None or span.end <= seconds])


def step_time(load_ms: float = 32.0, compute_ms: float = 20.0, workers: int = 1) -> Figure:
    """Time of a step over the time to load a batch: the sum on demand, the larger one with prefetching (predicted)."""
    figure, axes = subplots(width=7.2, height=3.4)
    loads = np.linspace(0, 100, 201)
    curves = {"on demand: load + compute": False, f"prefetched by {workers}: max(load / {workers}, compute)": True}
    for index, (name, ahead) in enumerate(curves.items()):
        drawn = look(index)
        times = [predict.step_seconds(load, compute_ms, ahead, workers) for load in loads]
        axes.plot(loads, times, color=drawn.color, linestyle=drawn.linestyle, marker="", label=name)
        here = predict.step_seconds(load_ms, compute_ms, ahead, workers)
        axes.plot([load_ms], [here], color=drawn.color, marker=drawn.marker, linestyle="")
        axes.annotate(f"{here:.0f} ms", (load_ms, here), xytext=(6, -12), textcoords="offset points", fontsize=9)
    if compute_ms * workers < 100:
        axes.axvspan(compute_ms * workers, 100, color=SPANS["input"][0], alpha=0.12, label="starved in spite of it")
    axes.set(xlim=(0, 100), ylim=(0, 100 + compute_ms), xlabel="load one batch (ms)", ylabel="one step (ms)")
    setting = f"Predicted: compute {compute_ms:g} ms per step"
    headline(axes, "Prefetching hides the loader until it is slower than the step", setting)
    axes.legend(loc="upper left")
    return figure


def ride_out(depth: int = 2, slow_ms: float = 80.0, every: int = 10) -> Figure:
    """Waits of a training whose loader is quick but for a batch now and then, by prefetch depth (predicted)."""
    steps, compute = 60, 20.0
    loads = [slow_ms if k % every == every - 1 else 12.0 for k in range(steps)]
    waits = predict.waits(loads, [compute] * steps, depth)
    figure, axes = subplots(width=8.5, height=2.9)
    axes.bar(range(steps), [compute] * steps, 0.8, color=PALETTE["blue"], label="compute")
    axes.bar(range(steps), waits, 0.8, bottom=compute, label="wait for input", **FILL)
    axes.set(xlabel="step", ylabel="time (ms)", ylim=(0, compute + max(slow_ms, 40) * 1.35))
    axes.grid(False, axis="x")
    mean = compute + sum(waits) / steps
    bound = max(sum(loads) / steps, compute)
    axes.set_title(f"Depth {depth}: {mean:.1f} ms per step; max(mean load, compute) is {bound:.1f} ms")
    axes.legend(loc="upper right", ncols=2)
    return figure


# The committed ones: measured anew by `python -m minillm figures`.


def _tokens() -> tuple[Figure, dict[str, Any]]:
    numbers = experiments.tokens_by_vocabulary()
    return draw_tokens(numbers), numbers


def _padding() -> tuple[Figure, dict[str, Any]]:
    lengths = experiments.lengths()
    return draw_padding(lengths), experiments.padding(lengths) | {"documents": len(lengths)}


def _starvation() -> tuple[Figure, dict[str, Any]]:
    found = experiments.starve(answers_of("11_data_pipeline").prefetch)
    numbers = {name: {key: value for key, value in one.items() if key != "ledger"} for name, one in found.items()}
    return draw_starvation(found), numbers | {"load": "an emulated remote read"}


FIGURES = {"tokens": _tokens, "padding": _padding, "starvation": _starvation}
