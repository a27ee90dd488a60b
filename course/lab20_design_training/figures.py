"""Lab 20's figures: where a step's time and a GPU's memory go, and what saving and failing cost."""

from dataclasses import asdict
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from minillm.drawing import headline, log_ticks, subplots
from minillm.palette import look
from minillm.predict import faults
from minillm.predict.planner import search
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import GIB, cluster


def where_it_goes(
    model: str = "llama-3-70b", device: str = "h100", nodes: int = 8, seq_k: int = 8, batch: int = 512
) -> Figure:
    """Formula: the best mesh for a model on so many nodes; seconds by cause and GiB by kind."""
    machine = cluster(device, 8 * nodes)
    figure, axes = subplots(2, 1, width=8.5, height=3.0)
    try:
        best = search.rank(architecture(model), machine, 1024 * seq_k, batch).best
    except ValueError as error:
        figure.suptitle(_wrapped(str(error)), fontsize=9, y=1.0)
        return figure
    _stack(axes[0], {name: value for name, value in asdict(best.step).items()}, "seconds of a step")
    _stack(axes[1], {name: value / GIB for name, value in asdict(best.memory).items()}, "GiB per GPU")
    usable = machine.usable / GIB
    axes[1].axvline(usable, color="#555555", linestyle="--")
    axes[1].annotate(
        f"usable: {usable:.0f} GiB", (usable, 0.3), (-4, 0), textcoords="offset points", ha="right", fontsize=9
    )
    where = f"{machine.gpus} x {machine.device.name}"
    headline(figure, f"The best layout of {model} on {where} reaches an MFU of {best.mfu:.0%}", str(best.layout))
    return figure


def waste(save_s: int = 30, restart_min: int = 10, gpus: int = 16384) -> Figure:
    """Formula: share of the time lost against the interval between saves, and Young's interval."""
    mtbf = faults.job_mtbf(faults.LLAMA3_GPU_MTBF_S, gpus)
    best = faults.young_interval(save_s, mtbf)
    intervals = best * np.logspace(-1.3, 1.3, 80)
    figure, axes = subplots(width=7.5, height=3.2)
    total = [faults.wasted_share(t, save_s, 60 * restart_min, mtbf) for t in intervals]
    parts = {
        "all three": total,
        "saves": [save_s / t for t in intervals],
        "work done twice": [t / 2 / mtbf for t in intervals],
        "restarts": [60 * restart_min / mtbf for _ in intervals],
    }
    for place, (name, values) in enumerate(parts.items()):
        drawn = look(place)
        axes.plot(
            intervals / 60,
            values,
            label=name,
            color=drawn.color,
            linestyle=drawn.linestyle,
            marker=drawn.marker,
            markevery=12,
        )
    axes.axvline(best / 60, color="#555555", linestyle="--")
    axes.annotate(f"Young: {best / 60:.0f} min", (best / 60, 0.9 * max(total[40] * 3, 0.05)), fontsize=9)
    axes.set(xscale="log", xlabel="minutes between saves", ylabel="share of the time lost")
    axes.set_ylim(0, max(0.05, min(1.0, 3 * min(total))))
    setting = f"Formula: {gpus:,} GPUs, a failure every {mtbf / 3600:.1f} hours"
    headline(axes, "Saving too often wastes time, and so does saving too rarely", setting)
    log_ticks(axes.xaxis)
    figure.legend(loc="outside lower center", ncols=len(parts), frameon=False)
    return figure


def _stack(axes, parts: dict[str, float], label: str) -> None:
    """One horizontal bar: the parts that are worth showing, at most one for each look, and the others together."""
    total = sum(parts.values())
    least = max(0.005 * total, sorted(parts.values(), reverse=True)[:7][-1])
    large = {name: value for name, value in parts.items() if value >= least}
    start = 0.0
    for place, (name, value) in enumerate(large.items()):
        drawn = look(place)
        axes.barh(0, value, 0.5, start, color=drawn.color, hatch=drawn.hatch, edgecolor="#555555", label=name)
        start += value
    if total - start > 0.001 * total:  # else nothing would be seen of it
        axes.barh(0, total - start, 0.5, start, color="#D9D9D9", edgecolor="#555555", label="other")
    axes.set(yticks=[], xlabel=label, ylim=(-0.6, 1.1))
    axes.legend(ncols=6, loc="upper left")


def _wrapped(text: str, width: int = 110) -> str:
    words, lines = text.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += f"{word} "
    return "\n".join(lines)


def _figure_where() -> tuple[Figure, dict[str, Any]]:
    best = search.rank(architecture("llama-3-70b"), cluster("h100", 64), 8192, 512).best
    return where_it_goes(), {"layout": str(best.layout), "seconds": asdict(best.step), "bytes": asdict(best.memory)}


FIGURES = {"where": _figure_where}
