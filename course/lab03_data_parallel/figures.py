"""Lab 03's figures: steps on a clock, bucket sizes, compression; drawn from measurements or from closed forms alone."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, StrMethodFormatter

from course.lab03_data_parallel import experiments, formulas
from course.lab03_data_parallel import experiments_overlap as overlap
from course.lab03_data_parallel.experiments_overlap import Slow
from minillm.comm import Link
from minillm.drawing import bars, headline, subplots
from minillm.palette import SPANS, TEXT, look

Stretch = tuple[float, float]


def draw_steps(numbers: dict[str, Any]) -> Figure:
    """One row per form: backward above, reductions below, and where the step was predicted to end."""
    figure, axes = subplots(width=9, height=0.9 + 0.95 * len(numbers["forms"]))
    for row, form in enumerate(numbers["forms"].values()):
        _lane(axes, row, form["blocks"], form["reductions"], form["predicted_s"])
        text = f"  {form['step_s'] * 1e3:.0f} ms, {max(0.0, form['hidden']):.0%} hidden"
        axes.text(form["step_s"] * 1e3, row, text, va="center", fontsize=9)
    setting = f"One step on {numbers['world_size']} ranks; backward and link are emulated"
    _finish(figure, axes, list(numbers["forms"]), "Buckets hide the all-reduces behind the backward pass", setting)
    return figure


def step_on_a_clock(
    blocks: int = 8,
    blocks_per_bucket: int = 1,
    backward_ms: float = 30.0,
    mb_per_block: float = 0.26,
    mb_per_s: float = 10.0,
    latency_ms: float = 0.5,
    ranks: int = 2,
) -> Figure:
    """Predicted: one step with everything reduced after backward, and with buckets reduced during it."""
    shape = Slow(blocks, max(1, round(mb_per_block * 1e6 / 4)), backward_ms / 1e3)
    link = Link(latency_ms / 1e3, mb_per_s * 1e6)
    held = min(blocks_per_bucket, blocks)
    backward = [(i * shape.seconds, (i + 1) * shape.seconds) for i in range(blocks)]
    after = formulas.reduction_times([shape.backward_s] * blocks, shape.comm_s(link, 1, ranks))
    ready = [min(first + held, blocks) * shape.seconds for first in range(0, blocks, held)]
    during = formulas.reduction_times(ready, shape.comm_s(link, held, ranks))
    figure, axes = subplots(width=9, height=2.9)
    for row, reductions in enumerate((after, during)):
        _lane(axes, row, backward, reductions, None)
        end = reductions[-1][1]
        comm = sum(stop - start for start, stop in reductions)
        share = formulas.hidden_share(end, shape.backward_s, comm)
        axes.text(end * 1e3, row, f"  {end * 1e3:.0f} ms, {max(0.0, share):.0%} hidden", va="center", fontsize=9)
    setting = f"Predicted: {ranks} ranks, {blocks} blocks, buckets of {held}"
    _finish(figure, axes, ["naive", "bucketed"], "What buckets hide behind the backward pass", setting)
    return figure


def _lane(
    axes: Axes, row: int, backward: Sequence[Stretch], reductions: Sequence[Stretch], predicted_s: float | None
) -> None:
    """Backward in the upper half of the row, communication in the lower."""
    for stretches, kind, top in ((backward, "compute", row - 0.36), (reductions, "comm", row + 0.02)):
        color, hatch = SPANS[kind]
        boxes = [(start * 1e3, (stop - start) * 1e3) for start, stop in stretches]
        axes.broken_barh(boxes, (top, 0.34), facecolor=color, hatch=hatch, edgecolor="white", linewidth=0.6)
    if predicted_s is not None:
        axes.plot(
            [predicted_s * 1e3] * 2, [row - 0.42, row + 0.42], color=TEXT, linestyle="--", marker="", linewidth=1.4
        )


def _finish(figure: Figure, axes: Axes, names: Sequence[str], message: str, setting: str) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set(ylim=(len(names) - 0.5, -0.5), xlabel="time since backward began (ms)")
    axes.set_xlim(0, axes.get_xlim()[1] * 1.12)
    axes.grid(False, axis="y")
    headline(axes, message, setting)
    patches = [
        Patch(facecolor=SPANS[kind][0], hatch=SPANS[kind][1], edgecolor="white", label=label)
        for kind, label in (("compute", "backward, block by block"), ("comm", "all-reduces"))
    ]
    if any(line.get_linestyle() == "--" for line in axes.lines):
        patches.append(next(line for line in axes.lines if line.get_linestyle() == "--"))
        patches[-1].set_label("end of the step, predicted")
    figure.legend(handles=patches, loc="outside lower center", ncols=3)


def draw_trace(events: Sequence[dict[str, Any]]) -> Figure:
    """One step of torch's DDP on one rank from the events of its profiler trace, a row per thread."""
    forward = next(event for event in events if event["name"] == "DistributedDataParallel.forward")
    main = forward["tid"]
    threads = [main, *sorted({event["tid"] for event in events} - {main})]
    kinds = {"forward": "input", "backward": "compute", "all-reduce": "comm"}
    figure, axes = subplots(width=9, height=1.5 + 0.5 * len(threads))
    for event in events:
        if event["name"] == "c10d::allreduce_":
            axes.plot([1e3 * event["start"]] * 2, [-0.45, 0.45], color=TEXT, linewidth=1.2, marker="")
        elif event["name"] in ("aten::mm", "gloo:all_reduce"):
            early = event["end"] <= forward["end"]
            kind = "all-reduce" if event["tid"] != main else "forward" if early else "backward"
            color, hatch = SPANS[kinds[kind]]
            box = [(1e3 * event["start"], 1e3 * (event["end"] - event["start"]))]
            axes.broken_barh(
                box,
                (threads.index(event["tid"]) - 0.36, 0.72),
                facecolor=color,
                hatch=hatch,
                edgecolor="white",
                linewidth=0.3,
            )
    names = ["main thread", *(f"gloo thread {index}" for index in range(1, len(threads)))]
    axes.set_yticks(range(len(threads)), names)
    axes.set(ylim=(len(threads) - 0.5, -0.5), xlabel="time in the trace (ms)")
    headline(axes, "One step of torch's DDP on rank 0 of 2", "From the trace of torch.profiler")
    axes.grid(False, axis="y")
    patches = [
        Patch(facecolor=SPANS[kinds[kind]][0], hatch=SPANS[kinds[kind]][1], edgecolor="white", label=label)
        for kind, label in (
            ("forward", "matmul, forward"), ("backward", "matmul, backward"), ("all-reduce", "gloo:all_reduce")
        )
    ]  # fmt: skip
    patches += axes.plot([], [], color=TEXT, linewidth=1.2, marker="", label="an all-reduce is issued")
    figure.legend(handles=patches, loc="outside lower center", ncols=4)
    return figure


def draw_bucket_sweep(numbers: dict[str, Any]) -> Figure:
    """Step time by bucket size, measured and predicted, above the length of backward alone."""
    figure, axes = subplots(width=7.0, height=3.4)
    sizes = numbers["bucket_bytes"]
    drawn = look(0)
    axes.plot(sizes, numbers["measured_s"], color=drawn.color, marker=drawn.marker, label="measured")
    axes.plot(sizes, numbers["predicted_s"], color=drawn.color, linestyle="--", marker="", label="predicted")
    axes.axhline(numbers["backward_s"], color=look(1).color, linestyle=":", label="backward alone")
    axes.set(xscale="log", ylim=(0, None), xlabel="bucket", ylabel="time of a step")
    axes.set_xticks(
        sizes,
        [f"{EngFormatter('B')(s)}\n{n} bucket{'s' * (n > 1)}" for s, n in zip(sizes, numbers["buckets"], strict=True)],
    )
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(EngFormatter("s"))
    headline(axes, "Buckets too small pay latency, too large hide nothing", "Backward and link are emulated")
    axes.legend(loc="lower right")
    return figure


def draw_losses(numbers: dict[str, Any]) -> Figure:
    """Loss curves of each way to average, with the bytes a rank sends per step in the legend."""
    figure, axes = subplots(width=7.5, height=3.6)
    for index, (name, form) in enumerate(numbers["forms"].items()):
        drawn = {"color": look(index).color, "linestyle": look(index).linestyle, "marker": ""}
        if name.startswith("yours"):  # lies on the course's own: circles, so that both are seen
            drawn = {"color": TEXT, "linestyle": "none", "marker": "o", "markerfacecolor": "none", "markevery": 4}
        axes.plot(_smooth(form["losses"]), label=f"{name}: {form['bytes'] / 1e3:.1f} kB per step", **drawn)
    axes.set(yscale="log", xlabel="step", ylabel="loss (mean of 5 steps)")
    low, high = axes.get_ylim()
    ticks = [tick for tick in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5) if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    setting = f"{numbers['elements']:,} parameters on {numbers['world_size']} ranks"
    headline(axes, "Compressed gradients train well only if what is cut off is added later", setting)
    axes.legend()
    return figure


def _smooth(values: Sequence[float], width: int = 5) -> list[float]:
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))]


def draw_division(numbers: dict[str, Any]) -> Figure:
    """Losses with gradients averaged and only added up: hidden by AdamW, plain under SGD."""
    figure, panels = subplots(1, 2, width=9, height=3.1)
    for axes, optimizer in zip(panels, ("AdamW", "SGD"), strict=True):
        for index, (op, label) in enumerate((("avg", "mean over ranks"), ("sum", "sum, never divided"))):
            drawn, losses = look(index), numbers[f"{optimizer}, {op}"]["losses"]
            axes.plot(losses, color=drawn.color, linestyle=drawn.linestyle, marker="", linewidth=2.2, label=label)
        axes.set(xlabel="step", ylabel="loss", yscale="log", ylim=(4e-3, 10))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.set_title(optimizer)
        axes.legend()
    return figure


def draw_losing(numbers: dict[str, Any]) -> Figure:
    """Throughput of two ranks over that of one; 2 is perfect and below 1 a second machine slows you down."""
    figure, axes = subplots(width=6.5, height=3.2)
    names = list(numbers["measured"])
    predicted, measured = ([numbers[key][name] for name in names] for key in ("predicted", "measured"))
    bars(names, predicted, measured, quantity="throughput of 2 ranks / of 1", unit="", ax=axes)
    axes.axhline(1, color=TEXT, linewidth=1, linestyle=":")
    headline(axes, "A second machine pays only if backward is long beside its messages", "Emulated links")
    return figure


def _figure_overlap() -> tuple[Figure, dict[str, Any]]:
    found = overlap.overlap()
    return draw_steps(found), found


def _figure_bucket_size() -> tuple[Figure, dict[str, Any]]:
    found = overlap.far_away()["sweep"]
    return draw_bucket_sweep(found), found


def _figure_compression() -> tuple[Figure, dict[str, Any]]:
    found = experiments.compression()
    return draw_losses(found), found


FIGURES = {
    "overlap": _figure_overlap,
    "bucket_size": _figure_bucket_size,
    "compression": _figure_compression,
}
