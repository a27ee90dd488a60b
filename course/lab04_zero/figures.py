"""Lab 04's figures: state by stage, bytes by stage, stage 3 on a clock, slow links; and three with sliders."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from course.kit import answers_of
from course.lab04_zero import experiments as stages
from course.lab04_zero import experiments_links as links
from course.lab04_zero import experiments_torch
from course.lab04_zero.experiments import NAMES, STAGES, Setup
from minillm.drawing import headline, subplots
from minillm.measure.timeline import STYLES
from minillm.palette import PALETTE, TEXT, look
from minillm.predict.model import ADAM_FP32, ADAM_MIXED

ANSWERS = answers_of("04_zero")

KINDS = {"parameter": "weights", "gradient": "gradients", "optimizer": "optimizer (masters, moments)"}
LOOKS = {
    "parameter": (PALETTE["blue"], ""),
    "gradient": (PALETTE["orange"], "//"),
    "optimizer": (PALETTE["green"], ".."),
}


# Pure functions of parameters, for sliders.


def who_holds_what(ranks: int = 4, layers: int = 3) -> Figure:
    """The flat buffer of a small model, cut into equal shards: which rank holds which part of which parameter."""
    shapes = [("embedding", 8 * 6)] + [
        (f"layer {i}.{n}", s) for i in range(layers) for n, s in (("weight", 36), ("bias", 5))
    ]
    sizes = [size for _, size in shapes]
    length, _ = ANSWERS.partition(sizes, ranks, 0)
    figure, axes = subplots(width=9, height=1.6)
    start = 0
    for index, (name, size) in enumerate(shapes):
        for rank in range(ranks):
            piece = ANSWERS.partition(sizes, ranks, rank)[1][index]
            box = {"facecolor": look(rank).color, "hatch": look(rank).hatch, "alpha": 0.75, "edgecolor": "white"}
            axes.add_patch(Rectangle((start + piece.start, 0), piece.stop - piece.start, 1, linewidth=0, **box))
        axes.add_patch(Rectangle((start, 0), size, 1, fill=False, edgecolor=TEXT, linewidth=1.2))
        if size > 12:
            axes.text(start + size / 2, 1.12, name, ha="center", fontsize=9, va="bottom")
        start += size
    padding = length * ranks - start
    if padding:
        axes.add_patch(Rectangle((start, 0), padding, 1, fill=False, edgecolor=TEXT, linestyle=":"))
    for rank in range(ranks):
        axes.text((rank + 0.5) * length, -0.3, f"rank {rank}", ha="center", va="center", fontsize=9)
        axes.axvline((rank + 1) * length, ymin=0.12, ymax=0.85, color=TEXT, linewidth=1.5)
    axes.set(
        xlim=(-1, length * ranks + 1),
        ylim=(-0.55, 1.5),
        xlabel=f"elements: {ranks} shards of {length}, {padding} of padding",
    )
    axes.set_yticks([])
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    return figure


def memory_by_stage(billions: float = 7.0, ranks: int = 8, mixed: bool = True) -> Figure:
    """Predicted bytes of model state per rank, by ZeRO stage, for a model of some billion parameters."""
    state, numel = ADAM_MIXED if mixed else ADAM_FP32, int(billions * 1e9)
    parts = {"parameter": state.parameter, "gradient": state.gradient, "optimizer": state.master + state.moments}
    figure, axes = subplots(width=7.5, height=3.2)
    floor = [0.0] * len(STAGES)
    for kind, size in parts.items():
        shards_from = {"optimizer": 1, "gradient": 2, "parameter": 3}[kind]
        heights = [size * numel / 1e9 / (ranks if stage >= shards_from else 1) for stage in STAGES]
        color, hatch = LOOKS[kind]
        axes.bar(NAMES, heights, 0.6, floor, color=color, hatch=hatch, edgecolor="white", label=KINDS[kind])
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    for place, total in enumerate(floor):
        axes.text(place, total, f"{total:,.1f} GB", ha="center", va="bottom", fontsize=9)
    axes.axhline(80, color=PALETTE["vermillion"], linestyle="--", linewidth=1.2, label="80 GB")
    axes.set(ylabel="model state per rank (GB)", ylim=(0, 1.15 * max(*floor, 80)))
    kind = "bf16 with fp32 masters" if mixed else "fp32"
    setting = f"Predicted: {billions:g}B parameters, {ranks} ranks, {kind}"
    headline(axes, "Each stage of ZeRO divides one more kind of state by the ranks", setting)
    axes.grid(False, axis="x")
    axes.legend()
    return figure


def stage3_timeline(blocks: int = 5, prefetch: int = 1, gather_ms: int = 21, forward_ms: int = 24) -> Figure:
    """Stage 3 on one rank, simulated: what the prefetch depth hides, for blocks of given gather and compute times."""
    bars = links.simulate(blocks, gather_ms / 1e3, forward_ms / 1e3, gather_ms / 1e3, prefetch)
    figure, axes = subplots(width=9, height=1.9)
    _lanes(axes, [(b.lane, b.name, b.start, b.end, 0.0) for b in bars])
    end = max(bar.end for bar in bars)
    busy = sum(bar.end - bar.start for bar in bars if bar.lane == "compute")
    whole = min(prefetch + 1, blocks)
    axes.set_title(
        f"Prefetch {prefetch}: {end * 1e3:.0f} ms, computing {busy / end:.0%} of it (simulated); "
        f"at most {whole} block{'s' * (whole > 1)} whole at once"
    )
    axes.set_xlabel("time (ms)")
    return figure


# Drawn from measurements.


def draw_memory(found: dict[Setup, list[Any]]) -> Figure:
    """Bytes per rank by kind, predicted and measured, by stage; a row per precision, a column per number of ranks."""
    worlds, precisions = sorted({s.world_size for s in found}), sorted({s.mixed for s in found}, reverse=True)
    figure, panels = subplots(len(precisions), len(worlds), width=9, height=5.6, squeeze=False, sharey=True)
    for line, mixed in zip(panels, precisions, strict=True):
        for axes, world in zip(line, worlds, strict=True):
            chosen = {s.stage: ranks for s, ranks in found.items() if s.world_size == world and s.mixed == mixed}
            for stage, ranks in chosen.items():
                setup = Setup(stage, world, mixed=mixed)
                _stack(axes, stage - 0.2, stages.predicted_kinds(setup), predicted=True)
                total = _stack(axes, stage + 0.2, ranks[0].memory, predicted=False)
                axes.text(stage, total + 0.25, f"{total:.2f} Ψ", ha="center", va="bottom", fontsize=9)
            axes.set_xticks(range(len(NAMES)), NAMES)
            axes.set_yticks(range(0, 17, 4))
            axes.grid(False, axis="x")
            axes.set(title=f"{'bf16 with fp32 masters' if mixed else 'fp32'}, N = {world}", ylim=(0, 18.5))
        line[0].set_ylabel("bytes per rank / Ψ")
    entries = [Patch(facecolor=c, hatch=h, edgecolor="white", label=KINDS[kind]) for kind, (c, h) in LOOKS.items()]
    entries.append(
        Patch(fill=False, edgecolor=TEXT, hatch="", linestyle="--", label="left: predicted, right: measured")
    )
    figure.legend(handles=entries, loc="outside lower center", ncols=4, frameon=False)
    headline(figure, "Each stage divides one more kind of state by the number of ranks, as predicted")
    return figure


def _stack(axes: Axes, place: float, kinds: dict[str, int], predicted: bool) -> float:
    """One stacked bar in bytes per parameter; returns its height."""
    floor = 0.0
    for kind, (color, hatch) in LOOKS.items():
        height = kinds.get(kind, 0) / stages.PSI
        drawn = (
            {"fill": False, "edgecolor": color, "linestyle": "--"}
            if predicted
            else {"color": color, "edgecolor": "white"}
        )
        axes.bar(place, height, 0.36, floor, hatch=hatch, linewidth=1.2, **drawn)
        floor += height
    return floor


def draw_bytes(rows: list[dict[str, Any]], world_size: int) -> Figure:
    """Bytes sent per rank and step in units of P(N-1)/N, predicted and measured, with one and with K microbatches."""
    accumulates = sorted({row["accumulate"] for row in rows})
    figure, panels = subplots(1, len(accumulates), width=9, height=4.2, squeeze=False, sharey=True)
    unit = 4 * stages.PSI * (world_size - 1) / world_size
    for axes, k in zip(panels[0], accumulates, strict=True):
        chosen = [row for row in rows if row["accumulate"] == k]
        for place, row in enumerate(chosen):
            axes.barh(place - 0.2, row["predicted"] / unit, 0.38, fill=False, hatch="//", edgecolor=look(1).color)
            ours, theirs = {"color": look(0).color}, {"color": look(2).color, "hatch": "..", "edgecolor": "white"}
            drawn = theirs if row["witness"] == "wire" else ours
            bar = axes.barh(place + 0.2, row["sent"] / unit, 0.38, **drawn)
            axes.bar_label(bar, fmt=" %.2f", fontsize=9)
        axes.set_yticks(range(len(chosen)), [row["name"].replace("Redundancy", "\nRedundancy") for row in chosen])
        axes.set_ylim(len(chosen) - 0.4, -0.6)
        axes.margins(x=0.16)
        axes.set(xlabel="bytes sent per rank / (P(N-1)/N)", title=f"{k} microbatch{'es' if k > 1 else ''} per step")
        axes.grid(False, axis="y")
    entries = [
        Patch(fill=False, hatch="//", edgecolor=look(1).color, label="predicted"),
        Patch(color=look(0).color, label="measured, ledger"),
        Patch(facecolor=look(2).color, hatch="..", edgecolor="white", label="torch on gloo, measured on the wire"),
    ]
    figure.legend(handles=entries, loc="outside lower center", ncols=3, frameon=False)
    headline(figure, "Stage 1 sends what DDP sends; stage 2 sends more once gradients accumulate, stage 3 always")
    return figure


def draw_prefetch(found: dict[int, dict[str, Any]]) -> Figure:
    """Rank 0 of stage 3 on a clock, one panel per prefetch depth, on a common time axis."""
    figure, panels = subplots(len(found), 1, width=9, height=1.0 + 1.35 * len(found), sharex=True, squeeze=False)
    for axes, (prefetch, numbers) in zip(panels[:, 0], found.items(), strict=True):
        led = numbers["ledgers"][0]
        zero = min(event.start for event in led.events)
        bars = [("compute", s.name, s.start - zero, s.end - zero, 0.0) for s in led.spans]
        bars += [("link", e.op.replace("_", " "), e.start - zero, e.end - zero, e.waited) for e in led.events]
        _lanes(axes, bars)
        predicted, measured = (numbers[key] * 1e3 for key in ("predicted_s", "measured_s"))
        units = f"{numbers['units_held']} block{'s' if numbers['units_held'] > 1 else ''} whole at once"
        axes.set_title(
            f"Prefetch {prefetch}: predicted {predicted:.0f} ms, measured {measured:.0f} ms; at most {units}"
        )
    panels[-1, 0].set(xlabel="time (ms), link emulated; G gather, F forward, B backward, R reduce-scatter")
    panels[-1, 0].set_xlim(0, max(numbers["measured_s"] for numbers in found.values()) * 1.02e3)
    kinds = ("compute", "comm", "wait")
    entries = [
        Patch(facecolor=STYLES[k][0], hatch=STYLES[k][1], edgecolor="#444444", label=STYLES[k][3]) for k in kinds
    ]
    figure.legend(handles=entries, loc="outside lower center", ncols=3, frameon=False)
    headline(figure, "Gathering one block ahead hides the link behind the compute and holds one block more")
    return figure


def _lanes(axes: Axes, bars: list[tuple[str, str, float, float, float]]) -> None:
    """(lane, name, start, end, waited) in seconds: compute above, link below; what was waited for is hatched."""
    end = max(bar[3] for bar in bars)
    for lane, name, start, stop, waited in bars:
        low = 0.55 if lane == "compute" else 0.0
        parts = (
            [("compute", start, stop)]
            if lane == "compute"
            else [("comm", start, stop - waited), ("wait", stop - waited, stop)]
        )
        for kind, begin, finish in parts:
            if finish > begin:
                face = {
                    "facecolor": STYLES[kind][0],
                    "hatch": STYLES[kind][1],
                    "edgecolor": "#444444",
                    "linewidth": 0.5,
                }
                axes.broken_barh([(begin * 1e3, (finish - begin) * 1e3)], (low, 0.45), **face)
        label = _short(name)
        if (stop - start) / end > 0.008 * len(label):
            axes.text((start + stop) / 2 * 1e3, low + 0.22, label, ha="center", va="center", fontsize=9)
    axes.set(xlim=(0, 1.01 * end * 1e3), ylim=(-0.1, 1.05))
    axes.set_yticks([0.22, 0.77], ["link", "compute"])
    axes.grid(False)


def _short(name: str) -> str:
    verb, _, rest = name.partition(" ")
    return verb[0].upper().replace("A", "G") + (rest if rest.isdigit() else "")


def draw_slow_link(numbers: dict[str, Any]) -> Figure:
    """Seconds of a step of every stage over an emulated slow link, predicted and measured, by microbatches per step."""
    rows, accumulates = numbers["rows"], sorted({row["accumulate"] for row in numbers["rows"]})
    figure, panels = subplots(1, len(accumulates), width=9, height=3.4, sharey=True, squeeze=False)
    for axes, k in zip(panels[0], accumulates, strict=True):
        for place, row in enumerate(row for row in rows if row["accumulate"] == k):
            axes.bar(place - 0.2, row["predicted_s"], 0.38, fill=False, hatch="//", edgecolor=look(1).color)
            bar = axes.bar(place + 0.2, row["measured_s"], 0.38, color=look(0).color)
            axes.bar_label(bar, [f"{row['measured_s'] * 1e3:.0f} ms"], fontsize=9)
        axes.margins(y=0.1)
        axes.set_xticks(range(len(NAMES)), NAMES)
        axes.set_title(f"{k} microbatch{'es' if k > 1 else ''} per step")
        axes.grid(False, axis="x")
    panels[0, 0].set_ylabel("time of one step (s)")
    entries = [
        Patch(fill=False, hatch="//", edgecolor=look(1).color, label="predicted: bytes / bandwidth + rounds · latency"),
        Patch(color=look(0).color, label="measured, link emulated"),
    ]
    figure.legend(handles=entries, loc="outside lower center", ncols=2, frameon=False)
    headline(figure, "On a slow link stage 3 costs time, and more with every microbatch")
    return figure


# Committed figures.


def _figure_memory() -> tuple[Figure, dict[str, Any]]:
    found = stages.compare([Setup(s, n, mixed=mixed) for n in (2, 4) for mixed in (True, False) for s in STAGES])
    return draw_memory(found), {"parameters": stages.PSI, "rows": stages.state_rows(found)}


def _figure_bytes() -> tuple[Figure, dict[str, Any]]:
    found = stages.compare([Setup(s, 4, k) for k in (1, 4) for s in STAGES])
    rows = stages.byte_rows(found) + experiments_torch.byte_rows(
        experiments_torch.peers(tuple(experiments_torch.PEERS)[:2])
    )
    return draw_bytes(rows, 4), {"world_size": 4, "payload_bytes": 4 * stages.PSI, "rows": rows}


def _figure_prefetch() -> tuple[Figure, dict[str, Any]]:
    found = links.stage3_on_a_clock()
    numbers = {str(k): {key: v for key, v in n.items() if key != "ledgers"} for k, n in found.items()}
    return draw_prefetch(found), {"emulated": True, "prefetch": numbers}


def _figure_slow_link() -> tuple[Figure, dict[str, Any]]:
    found = links.over_a_slow_link()
    return draw_slow_link(found), found


FIGURES = {
    "memory": _figure_memory,
    "bytes": _figure_bytes,
    "prefetch": _figure_prefetch,
    "slow_link": _figure_slow_link,
}
