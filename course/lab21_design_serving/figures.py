"""Lab 21's figures: the frontier of throughput and latency, and the wall of a queue."""

from typing import Any

from matplotlib.figure import Figure

from minillm.drawing import headline, log_ticks, subplots
from minillm.palette import look
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import cluster
from minillm.predict.planner.serving import rank_serving
from minillm.predict.serving import queueing

LIMITS = tuple(0.008 * 1.35**step for step in range(14))  # seconds per output token


def frontier(
    model: str = "llama-3-70b", device: str = "h100", gpus: int = 8, prompt: int = 1000, output: int = 300
) -> Figure:
    """Formula: tokens per second and GPU against the limit on the time per output token."""
    points = _frontier(model, device, gpus, prompt, output)
    figure, axes = subplots(width=7.5, height=3.4)
    drawn = look(0)
    axes.plot(
        [1e3 * limit for limit, _, _ in points],
        [speed for _, speed, _ in points],
        color=drawn.color,
        marker=drawn.marker,
    )
    changes = [point for point, before in zip(points, [("", "", ""), *points], strict=False) if point[2] != before[2]]
    for place, (limit, speed, name) in enumerate(changes):  # by turns under and over the line
        offset, side = ((6, -12), "left") if place % 2 == 0 else ((-6, 6), "right")
        at = 1e3 * limit, speed
        axes.annotate(name, at, textcoords="offset points", xytext=offset, ha=side, fontsize=9)
    axes.set(xlabel="limit on the time per output token, ms", ylabel="tokens/s per GPU", xscale="log")
    most = max((speed for _, speed, _ in points), default=1.0)
    axes.set_ylim(-0.08 * most, 1.14 * most)  # room for the names of the first layout and the last
    log_ticks(axes.xaxis)
    headline(
        axes,
        "A looser limit on latency buys throughput",
        f"Formula: {gpus} x {cluster(device, gpus).device.name}, {model}, {prompt:,} tokens in, {output:,} out",
    )
    if not points:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "the weights do not fit", transform=axes.transAxes, ha="center")
    return figure


def wall(percentile: int = 99) -> Figure:
    """Formula: mean and tail of the wait against the load."""
    loads = [0.02 * step for step in range(5, 49)]
    figure, axes = subplots(width=7.0, height=3.2)
    series = {
        "mean": [queueing.mean_wait(load, 1.0) for load in loads],
        f"p{percentile}": [queueing.wait_quantile(load, 1.0, percentile / 100) for load in loads],
    }
    for place, (name, values) in enumerate(series.items()):
        drawn = look(place)
        axes.plot(
            loads,
            values,
            label=name,
            color=drawn.color,
            linestyle=drawn.linestyle,
            marker=drawn.marker,
            markevery=6,
        )
    axes.set(xlabel="load", ylabel="wait, service times", ylim=(0, 60))
    headline(
        axes,
        "Near full load the wait grows without bound",
        "Formula: random arrivals, exponential services, one server",
    )
    axes.legend()
    return figure


def _frontier(model: str, device: str, gpus: int, prompt: int, output: int) -> list[tuple[float, float, str]]:
    points = []
    for limit in LIMITS:
        try:
            best = rank_serving(architecture(model), cluster(device, gpus), prompt, output, tpot=limit)[0]
        except ValueError:
            continue
        points.append((limit, best.tokens_per_s_per_gpu, f"tp {best.tp}, pp {best.pp}"))
    return points


def _figure_frontier() -> tuple[Figure, dict[str, Any]]:
    points = _frontier("llama-3-70b", "h100", 8, 1000, 300)
    return frontier(), {"points": [{"tpot_s": t, "tokens_per_s_per_gpu": s, "layout": n} for t, s, n in points]}


FIGURES = {"frontier": _figure_frontier}
