"""Lab 00's figures: measured matmuls under this machine's roof, messages on their line, ranks in a crowd."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from course.lab00_start_here import experiments
from course.shared.diagnose import expect_number
from course.shared.ladder import draw_ladder
from minillm.drawing import bars, headline, subplots
from minillm.measure import machine
from minillm.measure.rates import LinkFit
from minillm.palette import PALETTE, look
from minillm.predict import roofline


def draw_roofline(
    rates: dict[int, list[tuple[int, float]]],
    edge: int,
    peak_flops: float,
    bandwidth: float,
    attainable: Callable[[float, float, float], float] = roofline.attainable,
) -> Figure:
    """Measured FLOP/s of [tokens, edge] @ [edge, edge] over intensity, under the predicted roof."""
    ridge = peak_flops / bandwidth
    figure, axes = subplots(width=7.2, height=4.0)
    intensities = [roofline.matmul_intensity(tokens, edge, edge, 4) for tokens, _ in rates[edge]]
    reach = np.geomspace(0.3, max(100, *intensities) * 1.4, 200)
    roof = [expect_number(attainable(intensity, peak_flops, bandwidth), "FLOP/s") for intensity in reach]
    axes.plot(reach, roof, color=look(1).color, linestyle="--", marker="", label="predicted roof")
    axes.axvline(ridge, color="#999999", linewidth=0.8, linestyle=":")
    axes.text(ridge * 1.06, 0.02, f"ridge {ridge:.1f}", transform=axes.get_xaxis_transform(), fontsize=9)
    axes.plot(intensities, [rate for _, rate in rates[edge]], color=look(0).color, marker="o", label="measured")
    for (tokens, rate), intensity in zip(rates[edge], intensities, strict=True):
        axes.annotate(f"{tokens}", (intensity, rate), xytext=(4, -11), textcoords="offset points", fontsize=9)
    axes.set_xscale("log")
    axes.set_yscale("log")
    speeds = [rate for _, rate in rates[edge]]  # weights that stay in a cache climb over the roof
    axes.set_ylim(min(*speeds, roof[0]) / 1.6, max(*speeds, peak_flops) * 1.6)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter(EngFormatter(unit="FLOP/s", sep=" "))
    axes.set(xlabel="arithmetic intensity (FLOP per byte)", ylabel="speed")
    matmul = f"[tokens, {edge}] @ [{edge}, {edge}] in fp32, weights of {edge * edge * 4 / 1e6:.0f} MB"
    headline(axes, "Left of the ridge memory limits a matmul, right of it arithmetic", matmul)
    axes.legend(title="numbers at points: tokens", loc="lower right")
    return figure


def draw_link(links: dict[int, LinkFit], world_size: int) -> Figure:
    """Median seconds of one ring round by message size, and the line latency + bytes / bandwidth through them."""
    fit = links[world_size]
    sizes = [size for size, _ in fit.samples]
    figure, axes = subplots(width=7.2, height=4.0)
    reach = np.geomspace(sizes[0], sizes[-1], 100)
    axes.plot(sizes, [seconds for _, seconds in fit.samples], "o", color=look(0).color, label="measured, median")
    axes.plot(
        reach,
        [fit.seconds(size) for size in reach],
        "--",
        color=look(1).color,
        marker="",
        label="fitted: α + bytes/β",
    )
    axes.axhline(fit.latency_s, color=PALETTE["green"], linewidth=0.9, linestyle=":", label="α alone")
    axes.plot(reach, reach / fit.bandwidth_bytes_per_s, color=PALETTE["purple"], linewidth=0.9, linestyle="-.",
              marker="", label="bytes/β alone")  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(min(fit.latency_s, min(seconds for _, seconds in fit.samples)) / 3)
    axes.xaxis.set_major_formatter(EngFormatter(unit="B", sep=" "))
    axes.yaxis.set_major_formatter(EngFormatter(unit="s", sep=" "))
    axes.set(xlabel="message", ylabel="time of one round")
    alpha = EngFormatter(unit="s", places=1)(fit.latency_s)
    beta = EngFormatter(unit="B/s", places=1)(fit.bandwidth_bytes_per_s)
    fitted = f"One round of a ring of {world_size} ranks: α = {alpha}, β = {beta}, typically within {fit.error:.0%}"
    headline(axes, "Small messages cost the latency, large ones bytes over bandwidth", fitted)
    axes.legend(loc="upper left")
    return figure


def draw_crowd(layouts: Sequence[tuple[int, int]], predicted: Sequence[float], measured: Sequence[float]) -> Figure:
    """FLOP/s of all ranks together for each (ranks, threads per rank): by counting cores, and measured."""
    figure, axes = subplots(width=7.2, height=3.4)
    labels = [f"{ranks} × {threads}" for ranks, threads in layouts]
    title = "Together the ranks compute no faster than the cores allow"
    bars(labels, predicted, measured, quantity="speed", unit="FLOP/s", title=title, ax=axes)
    axes.set_xlabel("ranks × threads per rank")
    axes.set_ylabel("speed")
    axes.set_ylim(top=1.25 * max(*predicted, *measured))
    axes.legend(loc="upper right", ncols=2)
    return figure


def ladder() -> Figure:
    """Bytes per second and size of each memory of an H100, and of what connects it to others."""
    return draw_ladder("The further away a number is, the slower it comes")


# The committed ones: measured anew by `python -m minillm figures`.


def _roofline() -> tuple[Figure, dict[str, Any]]:
    card, edge = machine(), 4096
    rates = experiments.matmul_rates([edge], sweeps=60)
    peak, bandwidth = card.peak_flops, card.memory_bandwidth_bytes_per_s
    numbers = {"peak_flops": peak, "memory_bandwidth_bytes_per_s": bandwidth, "edge": edge, "tokens_flops": rates[edge]}
    return draw_roofline(rates, edge, peak, bandwidth), numbers


def _link() -> tuple[Figure, dict[str, Any]]:
    card = machine()
    return draw_link(card.links, max(card.links)), {"links": card.to_json()["links"]}


FIGURES = {"roofline": _roofline, "link": _link}
