"""Lab 25's figures: the ladder of memories, time by size, fusion measured, a decode step by batch."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from course.lab25_kernels import formulas
from course.lab25_kernels.experiments import Fusion
from course.shared.ladder import draw_ladder
from minillm.drawing import headline, log_ticks, subplots
from minillm.palette import MUTED, look
from minillm.predict.kernels import LADDER, elementwise

SIZES = tuple(2 ** (eighths / 8) for eighths in range(80, 225))
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def ladder() -> Figure:
    """Bytes per second and size of each memory of an H100, registers first."""
    return draw_ladder("Between two kernels, what L2 cannot hold goes down to HBM")


def time_by_size(launch_us: float = 5.0, passes: int = 3) -> Figure:
    """Time of an element-wise kernel on an H100 by its numbers, for a number of passes over memory: flat as long as the
    launch takes longer, then proportional to the bytes. Beside it two kernels, with two passes and a launch more."""
    figure, axes = subplots(width=8, height=3.4)
    for index, count in enumerate((passes, passes + 2)):
        drawn, launches_us = look(index), launch_us * (index + 1)
        sizes = sorted((*SIZES, launches_us * 1e-6 * formulas.BANDWIDTH / (2 * count)))  # the knee is one of them
        times = [max(launches_us, 1e6 * elementwise(n, count - 1, 2).seconds(formulas.BANDWIDTH)) for n in sizes]
        label = f"{count} passes over memory, " + ("two kernels: not fused" if index else "one kernel")
        axes.plot(sizes, times, color=drawn.color, linestyle=drawn.linestyle, marker="", label=label)
    knee = launch_us * 1e-6 * formulas.BANDWIDTH / (2 * passes)
    axes.axvline(knee, color=MUTED, linewidth=0.8, linestyle=":")
    axes.annotate(f"{knee / 1e6:.1f} million numbers", (knee, 0.9), xycoords=("data", "axes fraction"), xytext=(-6, 0),
                  textcoords="offset points", ha="right", fontsize=9)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="numbers, bfloat16", ylabel="time (µs)")
    log_ticks(axes.yaxis)
    headline(
        axes, "Small kernels take a launch, large ones their bytes", f"One H100, {launch_us:g} µs a launch, by formula"
    )
    axes.legend(loc="upper left", bbox_to_anchor=(0, 0.88))
    return figure


def step_by_batch(launch_us: float = 15.0, context: int = 1024) -> Figure:
    """Time of a decode step of an 8B model on an H100 by its sequences, in plain torch, fused, and fused and
    recorded as a
    graph: launches set the floor of the first two."""
    figure, axes = subplots(width=8, height=3.4)
    for index, how in enumerate((formulas.PLAIN, formulas.FUSED, formulas.RECORDED)):
        drawn = look(index)
        times = [1e3 * formulas.step_seconds(batch, context, how, launch_us * 1e-6) for batch in BATCHES]
        axes.plot(BATCHES, times, color=drawn.color, linestyle=drawn.linestyle, marker=drawn.marker, markersize=4,
                  label=how)  # fmt: skip
    axes.set(xscale="log", xlabel="sequences in the step", ylabel="a step (ms)", ylim=(0, None))
    log_ticks(axes.xaxis)
    setting = f"Llama 3 8B on one H100, contexts of {context:,}, {launch_us:g} µs a launch, by formula"
    headline(axes, "Few sequences wait for launches, unless the step is recorded", setting)
    axes.legend(loc="upper left")
    return figure


def draw_fusion(found: Fusion) -> Figure:
    """Times of relu(x + b) as two kernels and as one, beside the roof, for a bias as large as x and for one row."""
    figure, axes = subplots(width=8, height=3.2)
    kinds = (("two kernels", found.eager), ("one, compiled", found.compiled), ("roof: torch.add alone", found.roof))
    names = {"same": "b as large as x", "row": "b one row"}
    for index, (label, times) in enumerate(kinds):
        drawn = look(index)
        places = np.arange(len(names)) + 0.27 * (index - 1)
        heights = [1e3 * times.get(name, 0.0) for name in names]
        bars = axes.bar(places, heights, width=0.25, color=drawn.color, hatch=drawn.hatch, edgecolor="white",
                        label=label if times else f"{label}: no compiler here")  # fmt: skip
        if times:
            axes.bar_label(bars, fmt="%.1f", fontsize=9, padding=2)
    axes.set_xticks(range(len(names)), list(names.values()))
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.15)
    axes.set(ylabel="time (ms)", xlim=(-0.5, 2.1))
    headline(axes, "One kernel takes what its bytes take", "64 MB an array, one thread of this machine")
    axes.legend(loc="upper right")
    return figure


def _ladder() -> tuple[Figure, dict[str, Any]]:
    return ladder(), {rung.name: {"bytes": rung.bytes, "bytes_per_s": rung.rate} for rung in LADDER}


def _step() -> tuple[Figure, dict[str, Any]]:
    ways = (formulas.PLAIN, formulas.FUSED, formulas.RECORDED)
    return step_by_batch(), {how: {batch: formulas.step_seconds(batch, 1024, how) for batch in BATCHES} for how in ways}


FIGURES = {"ladder": _ladder, "step": _step}
