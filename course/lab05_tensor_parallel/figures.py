"""Lab 05's figures: who holds what, time per layer, a layer's bytes, overlap on a clock, a slow link."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from course.lab05_tensor_parallel import experiments as steps
from course.lab05_tensor_parallel import experiments_links as links
from course.lab05_tensor_parallel.experiments import FORMS, Setup
from minillm.drawing import headline, subplots
from minillm.measure.timeline import STYLES
from minillm.palette import PALETTE, TEXT, look
from minillm.predict import comms

GPU_FLOPS, LATENCY_S, SEQUENCE = 400e12, 5e-6, 4096  # assumed: what a large GPU really reaches in 16 bits; one sequence
TIMES = {
    "compute": (PALETTE["blue"], ""),
    "all-reduce, hidden behind dW": (PALETTE["green"], ".."),
    "all-reduce, waited for": (PALETTE["vermillion"], "xx"),
}


# Pure functions of parameters, for sliders.


def who_holds_what(ranks: int = 4, sequence: bool = False) -> Figure:
    """The matrices of one block and the embedding, cut over the ranks; what lies outside is whole or cut by tokens."""
    parts = [("x, norm(x)", 0.9, 1.4, "tokens"), ("q, k, v", 1.3, 2.0, "columns"), ("o", 1.4, 1.1, "rows")]
    parts += [("x, norm(x)", 0.9, 1.4, "tokens"), ("gate, up", 1.9, 2.0, "columns"), ("down", 1.4, 1.9, "rows")]
    parts += [("embedding", 1.4, 2.4, "rows")]
    figure, axes = subplots(width=9, height=3.0)
    left = 0.0
    for name, width, height, cut in parts:
        whole = cut == "tokens" and not sequence
        for rank in range(ranks):
            low, high = rank / ranks, (rank + 1) / ranks
            face = {"facecolor": look(rank).color, "hatch": look(rank).hatch, "alpha": 0.75}
            if cut == "columns":
                place, size = (left + low * width, -height / 2), ((high - low) * width, height)
            else:
                place, size = (left, height / 2 - high * height), (width, (high - low) * height)
            if not whole:
                axes.add_patch(Rectangle(place, *size, linewidth=0, edgecolor="white", **face))
        box = {"facecolor": "#EEEEEE"} if whole else {"fill": False}
        axes.add_patch(Rectangle((left, -height / 2), width, height, edgecolor=TEXT, linewidth=1.2, **box))
        axes.text(left + width / 2, 1.35, name, ha="center", fontsize=9)
        said = "whole on\nevery rank" if whole else f"by {cut}"
        axes.text(left + width / 2, -1.4, said, ha="center", va="top", fontsize=9)
        left += width + 0.45
    entries = [
        Patch(facecolor=look(r).color, hatch=look(r).hatch, alpha=0.75, edgecolor="white", label=f"rank {r}")
        for r in range(ranks)
    ]
    figure.legend(handles=entries, loc="outside lower center", ncols=ranks, frameon=False)
    axes.set(xlim=(-0.2, left), ylim=(-2.0, 1.7))
    axes.axis("off")
    return figure


def layer_seconds(tp: int, hidden: int, gb_per_s: float, tokens: int = SEQUENCE) -> dict[str, float]:
    """One GPT layer (12 h² weights, 16 bits), forward and backward, on each of tp GPUs.

    The 4 all-reduces are of tokens · h numbers. Forward they are waited for; backward each travels while the weight
    gradients of its column layers (3 h² for q, k, v; 4 h² for the MLP) are computed.
    """
    per_weight = 2 * tokens / tp / GPU_FLOPS  # one product, seconds per weight
    reduce = comms.ring_all_reduce(tokens * hidden, 2, tp).time(LATENCY_S, gb_per_s * 1e9) if tp > 1 else 0.0
    hidden_s = sum(min(reduce, share * hidden**2 * per_weight) for share in (3, 4))
    return {
        "compute": 3 * 12 * hidden**2 * per_weight,
        "all-reduce, hidden behind dW": hidden_s,
        "all-reduce, waited for": 4 * reduce - hidden_s,
    }


def time_per_layer(tp: int = 16, hidden: int = 8192, gb_per_s: int = 400) -> Figure:
    """Predicted time of one layer by tensor-parallel degree: compute is divided, all-reduces are not."""
    degrees = [d for d in (1, 2, 4, 8, 16, 32, 64) if d <= tp]
    figure, (left, right) = subplots(1, 2, width=9, height=3.6)
    alone = 1e3 * layer_seconds(1, hidden, gb_per_s)["compute"]
    for place, degree in enumerate(degrees):
        seconds = layer_seconds(degree, hidden, gb_per_s)
        time = _times(left, place, seconds, 1e3)
        left.text(place, time, f"{time:.3g}", ha="center", va="bottom", fontsize=9)
        spent = _times(right, place, seconds, 1e3 * degree)
        right.text(place, spent, f"{alone / spent:.0%}", ha="center", va="bottom", fontsize=9)
    for axes, quantity in ((left, "time of one layer (ms)"), (right, "the same × ranks (GPU · ms)")):
        axes.set_xticks(range(len(degrees)), [str(degree) for degree in degrees])
        axes.set(xlabel="tensor-parallel ranks", ylabel=quantity)
        axes.set_ylim(0, 1.12 * max(bar.get_y() + bar.get_height() for bar in axes.patches))
        axes.grid(False, axis="x")
    left.set_title("One layer")
    right.set_title("All ranks, and the share that computes")
    headline(
        figure, f"More ranks divide the compute, not the all-reduces (predicted: h = {hidden:,}, {gb_per_s:,} GB/s)"
    )
    entries = [Patch(facecolor=c, hatch=h, edgecolor="white", label=name) for name, (c, h) in TIMES.items()]
    figure.legend(handles=entries, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _times(axes: Axes, place: int, seconds: dict[str, float], scale: float) -> float:
    """A bar of compute with what is waited for on top, what is hidden beside it; returns its height."""
    floor = 0.0
    for name, (color, hatch) in TIMES.items():
        look_of = {"color": color, "hatch": hatch, "edgecolor": "white"}
        height = seconds[name] * scale
        if "hidden" in name:
            axes.bar(place + 0.38, height, 0.14, **look_of)
            continue
        axes.bar(place, height, 0.6, floor, **look_of)
        floor += height
    return floor


# Drawn from measurements.


def draw_layer(lines: dict[Setup, dict[str, Any]], alone: int) -> Figure:
    """What one layer sends and keeps on each rank, by form and number of ranks: predicted hollow, measured solid.

    alone: bytes that a layer keeps in one process.
    """
    figure, panels = subplots(1, 2, width=9, height=3.8)
    worlds = sorted({setup.world_size for setup in lines})
    for axes, key, predict in (
        (panels[0], "sent", steps.layer_bytes),
        (panels[1], "activation", steps.layer_activation_bytes),
    ):
        for index, form in enumerate(FORMS):
            for place, world in enumerate(worlds):
                setup = next(s for s in lines if s.form == form and s.world_size == world)
                left = place + (index - 1) * 0.28
                axes.bar(left - 0.065, predict(setup) / 1e3, 0.12, fill=False, hatch="//", edgecolor=TEXT)
                bar = axes.bar(
                    left + 0.065, lines[setup][key] / 1e3, 0.12, color=look(index).color, hatch=look(index).hatch
                )
                axes.bar_label(bar, fmt="%.0f", fontsize=9)
        axes.set_xticks(range(len(worlds)), [f"t = {world}" for world in worlds])
        axes.grid(False, axis="x")
    panels[0].set(ylabel="sent per layer and step (kB)", title="Sent")
    panels[1].axhline(alone / 1e3, color=PALETTE["black"], linestyle="--", linewidth=1)
    panels[1].text(0.5, alone / 1e3, "one process", ha="center", va="bottom", fontsize=9)
    panels[1].set(ylabel="kept for backward per layer (kB)", title="Activations kept", ylim=(0, 1.15 * alone / 1e3))
    entries = [
        Patch(facecolor=look(i).color, hatch=look(i).hatch, edgecolor="white", label=name)
        for i, name in enumerate(FORMS.values())
    ]
    entries.append(Patch(fill=False, hatch="//", edgecolor=TEXT, label="predicted"))
    figure.legend(handles=entries, loc="outside lower center", ncols=4, frameon=False)
    headline(figure, "Sequence parallelism keeps fewer activations for the same bytes; regathering sends more")
    return figure


def draw_overlap(found: dict[str, dict[str, Any]]) -> Figure:
    """Rank 0's backward pass through column layers: waiting for each all-reduce at once, and after dW."""
    figure, panels = subplots(len(found), 1, width=9, height=1.0 + 1.3 * len(found), sharex=True, squeeze=False)
    for axes, (name, numbers) in zip(panels[:, 0], found.items(), strict=True):
        led = numbers["ledgers"][0]
        start = min(span.start for span in led.spans)
        for span in led.spans:
            _bar(axes, "compute", 0.55, span.start - start, span.end - start, span.name)
        for event in led.events:
            begin, end = event.start - start, event.end - start
            _bar(axes, "comm", 0.0, begin, max(begin, end - event.waited), "")
            _bar(axes, "wait", 0.0, max(begin, end - event.waited), end, "ΣdX")
        predicted, measured = (numbers[key] * 1e3 for key in ("predicted_s", "measured_s"))
        axes.set_title(f"{name.capitalize()}: predicted {predicted:.0f} ms, measured {measured:.0f} ms")
        axes.set(ylim=(-0.1, 1.05))
        axes.set_yticks([0.22, 0.77], ["link", "compute"])
        axes.grid(False)
    panels[-1, 0].set(xlabel="time (ms), link and products emulated")
    panels[-1, 0].set_xlim(0, max(numbers["measured_s"] for numbers in found.values()) * 1.02e3)
    entries = [
        Patch(facecolor=STYLES[k][0], hatch=STYLES[k][1], edgecolor="#444444", label=STYLES[k][3])
        for k in ("compute", "comm", "wait")
    ]
    figure.legend(handles=entries, loc="outside lower center", ncols=3, frameon=False)
    headline(figure, "An all-reduce that travels while dW is computed costs almost nothing")
    return figure


def _bar(axes: Axes, kind: str, low: float, start: float, end: float, label: str) -> None:
    color, hatch = STYLES[kind][:2]
    face = {"facecolor": color, "hatch": hatch, "edgecolor": "#444444", "linewidth": 0.5}
    axes.broken_barh([(start * 1e3, (end - start) * 1e3)], (low, 0.45), **face)
    if label and end - start > 0.006:
        axes.text((start + end) / 2 * 1e3, low + 0.22, label, ha="center", va="center", fontsize=9)


def draw_slow_link(numbers: dict[str, Any]) -> Figure:
    """Seconds of a step over an emulated slow link, the same batch divided by weights or by rows, by its tokens."""
    figure, axes = subplots(width=7.5, height=3.4)
    for index, (kind, name) in enumerate((("tensor", "tensor parallel"), ("data", "data parallel"))):
        rows = [row for row in numbers["rows"] if row["kind"] == kind]
        tokens, drawn = [row["tokens"] for row in rows], look(index)
        axes.plot(
            tokens,
            [row["measured_s"] for row in rows],
            color=drawn.color,
            marker=drawn.marker,
            label=f"{name}, measured",
        )
        axes.plot(
            tokens,
            [row["predicted_s"] for row in rows],
            color=drawn.color,
            marker="",
            linestyle="--",
            label=f"{name}, predicted",
        )
    axes.set(xlabel="tokens in the batch", ylabel="time of one step (s)", ylim=(0, None))
    setting = f"{numbers['world_size']} ranks, link emulated; predicted: bytes / bandwidth + rounds · latency"
    headline(axes, "Tensor parallelism sends more with every token, data parallelism does not", setting)
    axes.legend()
    return figure


# Committed figures.


def _figure_layer() -> tuple[Figure, dict[str, Any]]:
    setups = [Setup(n, form) for n in (2, 4) for form in FORMS]
    lines = steps.per_layer(setups)
    rows = [
        {"ranks": s.world_size, "form": s.form, "sent_predicted": steps.layer_bytes(s), "sent": line["sent"]}
        | {"activation_predicted": steps.layer_activation_bytes(s), "activation": line["activation"]}
        for s, line in lines.items()
    ]
    alone = steps.layer_activation_bytes(Setup(1))
    return draw_layer(lines, alone), {"activation_in_one_process": alone, "rows": rows}


def _figure_overlap() -> tuple[Figure, dict[str, Any]]:
    found = links.overlap_on_a_clock()
    numbers = {name: {key: v for key, v in n.items() if key != "ledgers"} for name, n in found.items()}
    return draw_overlap(found), {"emulated": True, "forms": numbers}


def _figure_slow_link() -> tuple[Figure, dict[str, Any]]:
    found = links.over_a_slow_link()
    return draw_slow_link(found), found


def _figure_time_per_layer() -> tuple[Figure, dict[str, Any]]:
    seconds = {str(d): layer_seconds(d, 8192, 400) for d in (1, 2, 4, 8, 16)}
    return time_per_layer(), {
        "predicted": True,
        "hidden": 8192,
        "gb_per_s": 400,
        "tokens": SEQUENCE,
        "by_degree": seconds,
    }


FIGURES = {
    "layer": _figure_layer,
    "overlap": _figure_overlap,
    "slow_link": _figure_slow_link,
    "time_per_layer": _figure_time_per_layer,
}
