"""Lab 09's figures: a mesh on nodes, all layouts of 70B, FSDP beside tensor parallelism; seatings and scaling."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from course.lab09_four_dimensions import experiments, experiments_plan
from course.lab09_four_dimensions.experiments import LAYOUTS, PLACED, LayoutRun, Point
from minillm.drawing import headline, subplots
from minillm.palette import PALETTE, look
from minillm.predict.planner.clusters import GIB
from minillm.predict.planner.layout import Layout

# Pure functions of parameters, for sliders.


def mesh_on_nodes(
    order: str = "dp pp cp tp", tp: int = 4, cp: int = 1, pp: int = 2, dp: int = 2, per_node: int = 8, axis: str = "tp"
) -> Figure:
    """Ranks on their nodes, coloured and numbered by their group along one axis; order: outermost axis first."""
    sizes = {"tp": tp, "cp": cp, "pp": pp, "dp": dp}
    layout = Layout(**sizes, order=tuple(reversed(order.split())))
    count, size, stride = layout.world_size, sizes[axis], layout.stride(axis)
    per_node = min(per_node, count)
    nodes = -(-count // per_node)
    figure, axes = subplots(width=min(9.0, 2 + 0.9 * per_node), height=0.9 + 1.2 * nodes)
    for rank in range(count):
        group = rank // (stride * size) * stride + rank % stride
        _seat(axes, rank, group, rank % per_node, rank // per_node, layout)
    for node in range(nodes):
        seats = min(per_node, count - node * per_node)
        frame = {"fill": False, "edgecolor": "#777777"}
        axes.add_patch(FancyBboxPatch((0.0, node + 0.06), seats - 0.14, 0.88, "round,pad=0.04", **frame))
        axes.text(-0.15, node + 0.5, f"node {node}", ha="right", va="center")
    nodes_of = {rank // per_node for rank in range(0, stride * size, stride)}
    where = "have one rank each" if size == 1 else "cross nodes" if len(nodes_of) > 1 else "stay inside a node"
    setting = f"Order {order.replace(' ', ', ')}: the last varies fastest from rank to rank"
    headline(axes, f"The groups of {axis} {where}", setting)
    axes.set(xlim=(-0.9, per_node), ylim=(nodes + 0.02, 0))
    axes.axis("off")
    return figure


def _seat(axes: Axes, rank: int, group: int, column: int, node: int, layout: Layout) -> None:
    drawn = look(group)
    face = {"facecolor": drawn.color, "hatch": drawn.hatch, "edgecolor": "white", "alpha": 0.35}
    axes.add_patch(Rectangle((column, node + 0.1), 0.86, 0.8, **face))
    held = [
        f"{axis} {rank // layout.stride(axis) % layout.size(axis)}"
        for axis in reversed(layout.order)
        if layout.size(axis) > 1
    ]
    axes.text(column + 0.43, node + 0.22, f"rank {rank}", ha="center", va="center", fontsize=9, weight="bold")
    axes.text(column + 0.43, node + 0.51, "\n".join(held), ha="center", va="center", fontsize=9, linespacing=1.0)
    axes.text(column + 0.43, node + 0.81, f"group {group}", ha="center", va="center", fontsize=9, style="italic")


def fsdp_or_tensor(hidden: int = 8192, ranks: int = 8, squares: int = 12) -> Figure:
    """Bytes that a rank sends for one layer and microbatch, by its tokens: fully sharded, tensor parallel (formula)."""
    equal = experiments_plan.equal_tokens(hidden, squares)
    tokens = [2**power for power in range(10, 19)]
    found = [experiments_plan.layer_traffic(hidden, count, ranks, squares) for count in tokens]
    figure, axes = subplots(width=8, height=3.4)
    for index, name in enumerate(("fully sharded (FSDP)", "tensor parallel")):
        drawn = look(index)
        sent = [each[index] / 1e9 for each in found]
        axes.plot(tokens, sent, color=drawn.color, marker=drawn.marker, linestyle=drawn.linestyle, label=name)
    label = f"equal at {equal:,.0f} tokens"
    axes.axvline(equal, color=PALETTE["vermillion"], linestyle=":", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tokens, [f"{count // 1024}k" for count in tokens])
    axes.set(xlabel="tokens of the group's microbatch", ylabel="sent per rank (GB)")
    setting = f"Formula: one layer of {squares} H², H {hidden:,}, {ranks} ranks, 16 bits"
    headline(axes, "Few tokens favour tensor parallelism, many favour fully sharded weights", setting)
    axes.legend()
    return figure


def all_layouts(most_gib: float = 60.0) -> Figure:
    """Layouts of 70B on 64 GPUs that hold at most so much, by bytes and seconds, and the memory (formula)."""
    everything, best = experiments_plan.everything(), experiments_plan.best()
    usable = experiments_plan.SIXTY_FOUR.usable / GIB
    figure, axes = subplots(width=8, height=3.8)
    for index, kind in enumerate(("none", "light", "full")):
        some = [each for each in everything if each.layout.recompute == kind and each.held / GIB <= most_gib]
        drawn = look(index)
        axes.plot(
            [each.held / GIB for each in some],
            [each.seconds for each in some],
            linestyle="",
            marker=drawn.marker,
            color=drawn.color,
            alpha=0.35,
            markersize=3.5,
            label=f"recompute {kind}",
        )
    axes.axvline(usable, color=PALETTE["black"], linestyle="--", linewidth=1, label=f"{usable:.0f} GiB usable")
    held = best.memory.total / GIB
    axes.plot(
        held,
        best.step.seconds,
        marker="*",
        markersize=13,
        linestyle="",
        color=PALETTE["vermillion"],
        label="best that fits",
    )
    axes.set_yscale("log")
    axes.set_yticks([60, 80, 100, 200, 400], ["60", "80", "100", "200", "400"])
    axes.set(xlabel="held by the fullest GPU (GiB)", ylabel="step (s)", xlim=(15, most_gib), ylim=(60, 600))
    axes.minorticks_off()
    shown = sum(each.held / GIB <= most_gib for each in everything)
    setting = f"Formula: 70B on 64 GPUs of 40 GB, the {shown:,} of {len(everything):,} layouts up to {most_gib:.0f} GiB"
    headline(axes, "Faster layouts do not fit: memory picks the best one", setting)
    axes.legend(loc="upper right", markerscale=1.3)
    return figure


# Drawn from measurements.


def draw_placement(runs: dict[str, list[LayoutRun]]) -> Figure:
    """Seconds of a step with the inner axis inside a node and across nodes: predicted and measured, emulated links."""
    figure, axes = subplots(width=8, height=3.2)
    for index, (state, label) in enumerate((("inner inside", "inside a node"), ("inner across", "across nodes"))):
        drawn = look(index)
        for place, name in enumerate(PLACED):
            times, layout = runs[name][0].seconds, LAYOUTS[name]
            left = place + 0.42 * index - 0.4
            due = times["no link"] + experiments.link_seconds(layout, state)
            axes.bar(left, due, 0.18, fill=False, hatch="//", edgecolor=drawn.color, align="edge")
            shown = f"inner axis {label}" if place == 0 else None
            axes.bar(left + 0.19, times[state], 0.18, color=drawn.color, align="edge", label=shown)
    names = [f"{name}\n(inner axis: {experiments.inner_axis(name)})" for name in PLACED]
    axes.set_xticks(range(len(PLACED)), names)
    axes.set(ylabel="step (s)")
    axes.margins(y=0.28)
    setting = "The same ranks and bytes, placed in two ways; links emulated; hatched: predicted"
    headline(axes, "What every layer waits for belongs inside a node", setting)
    axes.grid(False, axis="x")
    axes.legend(loc="upper left", ncols=2)
    return figure


def draw_scaling(points: Sequence[Point]) -> Figure:
    """Weak and strong scaling of data parallelism: time of a step by ranks, predicted and measured, emulated links."""
    figure, panels = subplots(1, 2, width=9, height=3.4)
    times = [each for point in points for each in (point.seconds, point.measured_seconds) if each is not None]
    low, high = min(times), max(times)
    for axes, mode in zip(panels, ("weak", "strong"), strict=True):
        some = [point for point in points if point.mode == mode and point.seconds is not None]
        ranks, drawn = [point.ranks for point in some], look(0)
        axes.plot(
            ranks,
            [point.seconds for point in some],
            color=look(1).color,
            linestyle="--",
            marker="",
            label="predicted",
        )
        real = [(point.ranks, point.measured_seconds) for point in some if point.measured_seconds is not None]
        axes.plot(
            *zip(*real, strict=True), color=drawn.color, linestyle="", marker="D", label="measured, emulated links"
        )
        axes.axvline(experiments.PER_NODE, color=PALETTE["black"], linestyle=":", linewidth=1, label="one node is full")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ranks, ranks)
        ticks = [tick for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2) if low / 1.3 < tick < 1.3 * high]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set(xlabel="ranks", ylabel="step (s)", title=f"{mode.capitalize()} scaling", ylim=(low / 1.3, 1.3 * high))
    panels[0].legend()
    return figure


# Committed figures.


def _figure_mesh() -> tuple[Figure, dict[str, Any]]:
    return mesh_on_nodes(), {"order": "dp pp cp tp", "tp": 4, "pp": 2, "dp": 2, "per_node": 8}


def _figure_placement() -> tuple[Figure, dict[str, Any]]:
    found = experiments.on_links()
    times = {name: found[name][0].seconds for name in PLACED}
    return draw_placement(found), {"emulated": True, "seconds": times}


def _figure_layouts() -> tuple[Figure, dict[str, Any]]:
    best = experiments_plan.best()
    return all_layouts(), {"best": str(best.layout), "seconds": best.step.seconds, "bytes": best.memory.total}


FIGURES = {"mesh": _figure_mesh, "placement": _figure_placement, "layouts": _figure_layouts}
