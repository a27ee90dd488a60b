"""Lab 01's figures: drawn from numbers that `experiments.py` measured, or pure functions of parameters."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import EngFormatter, NullFormatter

from course.lab01_collectives import experiments
from minillm.drawing import bars, headline, lines, subplots
from minillm.palette import PALETTE, TEXT, look
from minillm.predict import comms


def draw_ring_against_tree(*found: dict[str, Any]) -> Figure:
    """Measured points and predicted lines, one panel per result of `ring_against_tree`; crossovers marked."""
    figure, panels = subplots(1, len(found), width=4.5 * len(found), height=4.1, squeeze=False)
    for axes, numbers in zip(panels[0], found, strict=True):
        sizes, place = numbers["sizes"], "an emulated link" if numbers["emulated"] else "this machine's loopback"
        lines(
            sizes,
            numbers["measured_s"],
            numbers["predicted_s"],
            x_axis=("tensor", "B"),
            y_axis=("time of one all-reduce", "s"),
            title=f"{numbers['world_size']} ranks, {place}",
            log="xy",
            ax=axes,
        )
        axes.get_legend().remove()
        axes.yaxis.set_minor_formatter(NullFormatter())
        for index, size in enumerate(numbers["predicted_crossover_bytes"].values(), start=1):
            if sizes[0] <= size <= sizes[-1]:
                axes.axvline(size, color=look(index).color, linewidth=1.2, linestyle=":")
    entries, names = panels[0][0].get_legend_handles_labels()
    entries.append(Line2D([], [], color=TEXT, linewidth=1.2, linestyle=":"))
    names.append("ring begins to win, predicted")
    figure.legend(entries, names, loc="outside lower center", ncols=4, frameon=False)
    headline(figure, "The ring loses on small tensors, which cost rounds, and wins on large ones, which cost bytes")
    return figure


def draw_flat_against_two_level(numbers: dict[str, Any]) -> Figure:
    """Predicted and measured seconds of both, by tensor size."""
    figure, panels = subplots(1, len(numbers["sizes"]), width=9, height=3.2)
    names = list(numbers["measured_s"])
    for index, (axes, size) in enumerate(zip(panels, numbers["sizes"], strict=True)):
        predicted, measured = ([numbers[key][name][index] for name in names] for key in ("predicted_s", "measured_s"))
        bars(names, predicted, measured, quantity="time", unit="s", title=_size(size), ax=axes)
        if index:
            axes.get_legend().remove()
            axes.set_ylabel("")
    setting = "All-reduce over 2 nodes of 2 ranks; the link between the nodes is slow and emulated"
    headline(figure, "Two levels cross the slow link in fewer rounds than one flat ring", setting)
    return figure


def draw_bytes(numbers: dict[str, Any]) -> Figure:
    """Bytes as multiples of the tensor: of all ranks by three witnesses, and of the rank that sends most."""
    rows, payload = numbers["rows"], numbers["payload_bytes"]
    predicted = {"fill": False, "edgecolor": look(1).color, "hatch": "//"}
    ledger, wire = {"color": look(0).color}, {"color": look(2).color, "hatch": "..", "edgecolor": "white"}
    figure, (left, right) = subplots(1, 2, width=9, height=3.8, width_ratios=(3, 2))
    _grouped(left, rows, payload, {"predicted": predicted, "ledger": ledger, "wire": wire})
    _grouped(right, rows, payload, {"busiest_predicted": predicted, "busiest_ledger": ledger})
    left.set_title(f"All {numbers['world_size']} ranks together; P is a tensor of {_size(payload)}")
    right.set_title("The rank that sends most")
    left.set_ylabel("bytes sent / P")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    headline(figure, "A parameter server sends as much as a ring all-reduce, but half of it from one rank")
    return figure


def _grouped(axes: Axes, rows: list[dict[str, Any]], payload: int, kinds: dict[str, dict[str, Any]]) -> None:
    """One group of bars per row, one bar per kind; the last kind carries its value."""
    width = 0.8 / len(kinds)
    for index, (kind, drawn) in enumerate(kinds.items()):
        places = [place + (index - (len(kinds) - 1) / 2) * width for place in range(len(rows))]
        last = axes.bar(places, [row[kind] / payload for row in rows], 0.9 * width, label=kind, **drawn)
    axes.bar_label(last, fmt="%.2f", fontsize=9)
    axes.margins(y=0.1)
    names = [row["name"].replace("-", "-\n").replace(" ", "\n") for row in rows]
    axes.set_xticks(range(len(rows)), names, fontsize=9)
    axes.grid(False, axis="x")


def ring_rounds(ranks: int = 4, rounds_done: int = 2) -> Figure:
    """Ring reduce-scatter: which ranks' contributions each chunk holds on each rank after some rounds."""
    done = min(rounds_done, ranks - 1)
    held = {(rank, chunk): {rank} for rank in range(ranks) for chunk in range(ranks)}
    sent = []
    for s in range(done):
        sent = [(rank, (rank - s - 1) % ranks) for rank in range(ranks)]
        travelling = {(rank, chunk): set(held[rank, chunk]) for rank, chunk in sent}
        for (rank, chunk), contributions in travelling.items():
            held[(rank + 1) % ranks, chunk] |= contributions
    figure, axes = subplots(width=1.6 + 1.25 * ranks, height=1.0 + 0.5 * ranks)
    for (rank, chunk), contributions in held.items():
        share = (len(contributions) - 1) / max(1, ranks - 1)
        just_in = ((rank - 1) % ranks, chunk) in sent
        box = {"facecolor": PALETTE["blue"], "alpha": 0.08 + 0.5 * share}
        axes.add_patch(_rectangle(chunk, rank, **box, edgecolor="none"))
        if just_in:
            axes.add_patch(_rectangle(chunk, rank, fill=False, edgecolor=PALETTE["vermillion"], linewidth=2))
        axes.text(chunk, rank, "+".join(map(str, sorted(contributions))), ha="center", va="center", fontsize=9)
    axes.set(xlim=(-0.5, ranks - 0.5), ylim=(ranks - 0.5, -0.5))
    axes.set_xticks(range(ranks), [f"chunk {chunk}" for chunk in range(ranks)])
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.grid(False)
    headline(axes, f"After round {done} of {ranks - 1}", "Outlined: just arrived and added")
    return figure


def times_by_size(world_size: int = 4, latency_us: float = 5.0, bandwidth_gb_per_s: float = 50.0) -> Figure:
    """Predicted time of three all-reduces by tensor size, and where the ring begins to win."""
    line = latency_us * 1e-6, bandwidth_gb_per_s * 1e9
    sizes = [2.0**k for k in range(10, 31)]
    costs = {name: cost for name, (_, cost) in experiments.ALL_REDUCES.items()}
    figure, axes = subplots(width=7.5, height=3.6)
    for index, (name, cost) in enumerate(costs.items()):
        seconds = [cost(int(size) // 4, 4, world_size).time(*line) for size in sizes]
        axes.plot(sizes, seconds, color=look(index).color, linestyle=look(index).linestyle, marker="", label=name)
        meets = comms.crossover_bytes(costs["ring"], cost, world_size, *line) if name != "ring" else 0.0
        if sizes[0] < meets < sizes[-1]:
            label = f"ring passes {name} at {EngFormatter('B')(float(f'{meets:.3g}'))}"
            axes.axvline(meets, color=look(index).color, linestyle=":", linewidth=1.2, label=label)
    axes.set(xscale="log", yscale="log", xlabel="tensor", ylabel="time")
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    axes.yaxis.set_major_formatter(EngFormatter("s"))
    setting = f"Predicted: {world_size} ranks, α = {latency_us:g} µs, β = {bandwidth_gb_per_s:g} GB/s"
    headline(axes, "Which all-reduce is fastest depends on the size of the tensor", setting)
    axes.legend(frameon=True, framealpha=1, edgecolor="none")  # the dotted lines pass behind it
    return figure


def _rectangle(x: float, y: float, **drawn: Any) -> Rectangle:
    return Rectangle((x - 0.46, y - 0.42), 0.92, 0.84, **drawn)


def _size(num_bytes: int) -> str:
    return EngFormatter("B")(num_bytes)


def _figure_ring_vs_tree() -> tuple[Figure, dict[str, Any]]:
    found = {"loopback": experiments.ring_against_tree(), "emulated": experiments.ring_against_tree(experiments.SLOW)}
    return draw_ring_against_tree(*found.values()), found


def _figure_hierarchical() -> tuple[Figure, dict[str, Any]]:
    found = experiments.flat_against_two_level()
    return draw_flat_against_two_level(found), found


def _figure_bytes() -> tuple[Figure, dict[str, Any]]:
    found = experiments.bytes_of_collectives()
    found["rows"] = [line for line in found["rows"] if line["name"] in SHOWN]
    return draw_bytes(found), found


SHOWN = ("all-reduce", "reduce-scatter", "all-gather", "broadcast", "all-to-all", "parameter server")
FIGURES = {
    "ring_vs_tree": _figure_ring_vs_tree,
    "hierarchical": _figure_hierarchical,
    "bytes": _figure_bytes,
}
