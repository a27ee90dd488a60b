"""Lab 07's figures: who does which part of the causal work, memory by length, a ring on a clock; two with sliders."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from course.lab07_long_context import experiments
from course.lab07_long_context import experiments_links as links
from minillm.drawing import headline, lines, subplots
from minillm.measure.timeline import STYLES
from minillm.palette import PALETTE, look
from minillm.predict.training import context
from minillm.predict.training.context import AttentionShape, Hardware

# Pure functions of parameters, for sliders.


def causal_work(ranks: int = 4) -> Figure:
    """The causal triangle of queries and keys, by the rank that computes it, and each rank's share."""
    figure, panels = subplots(2, 2, width=9, height=5.4, gridspec_kw={"width_ratios": [1, 1.5]})
    for (triangle, shares), order in zip(panels, ("contiguous", "zigzag"), strict=True):
        _triangle(triangle, ranks, order)
        _shares(shares, ranks, order)
    headline(figure, "Contiguous parts give the last rank most of the causal work, zigzag parts share it evenly")
    return figure


def _triangle(axes: Axes, ranks: int, order: str) -> None:
    parts = 2 * ranks
    for rank in range(ranks):
        box = {"facecolor": look(rank).color, "hatch": look(rank).hatch, "edgecolor": "white", "linewidth": 0.5}
        for start, stop in context.spans(parts, rank, ranks, order):
            for query in range(start, stop):
                axes.add_patch(Rectangle((0, query), query + 0.5, 1, alpha=0.85, **box))
    axes.set(xlim=(0, parts), ylim=(parts, 0), xlabel="keys (part)", ylabel="queries (part)", title=order.capitalize())
    axes.set_aspect("equal")
    axes.grid(False)


def _shares(axes: Axes, ranks: int, order: str) -> None:
    shares = [context.work_share(rank, ranks, order) for rank in range(ranks)]
    for rank, share in enumerate(shares):
        axes.barh(rank, share, 0.7, color=look(rank).color, hatch=look(rank).hatch, edgecolor="white", alpha=0.85)
        axes.text(share + 0.005, rank, f"{share:.1%}", va="center", fontsize=9)
    axes.axvline(1 / ranks, color=PALETTE["black"], linestyle="--", linewidth=1)
    axes.set(xlim=(0, 1.15 * (2 * ranks - 1) / ranks**2), ylim=(ranks - 0.4, -0.6), xlabel="share of all work")
    axes.set_title(f"All wait for {max(shares) * ranks:.2f} times an even share (formula)")
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.grid(False, axis="y")


def bytes_by_ranks(heads: int = 32, kv_heads: int = 8) -> Figure:
    """Bytes that a rank sends in one layer's forward attention, by the number of ranks, for each variant (formula)."""
    counts, seq = [2, 4, 8, 16, 32, 64], 2**17
    shape = AttentionShape(1, seq, heads, kv_heads, 128, itemsize=2)
    figure, axes = subplots(width=8, height=3.4)
    for index, name in enumerate(("zigzag", "ulysses", "hybrid")):
        points = [(n, sent) for n in counts if (sent := _sent(name, shape, n)) is not None]
        label = {"zigzag": "ring, gather", "hybrid": "Ulysses over 8, ring across"}.get(name, "Ulysses")
        drawn = look(index)
        style_of = {"color": drawn.color, "marker": drawn.marker, "linestyle": drawn.linestyle, "label": label}
        if points:
            axes.plot([n for n, _ in points], [sent / 1e6 for _, sent in points], **style_of)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="ranks", ylabel="sent per rank (MB)", ylim=(0, None))
    axes.set_xticks(counts, counts)
    setting = f"Formula: 128k tokens, {heads} heads on {kv_heads} kv heads, bf16, one layer forward"
    headline(axes, "With more ranks a rank sends more in a ring and less with Ulysses", setting)
    axes.legend()
    return figure


def _sent(name: str, shape: AttentionShape, ranks: int) -> int | None:
    if name == "hybrid" and ranks <= 8:
        return None
    try:
        return context.forward_traffic(name, shape, ranks, 8).bytes
    except ValueError:  # heads that do not divide
        return None


def where_it_hides(heads: int = 32, kv_heads: int = 8, tflops: int = 400, gb_s: int = 50) -> Figure:
    """A ring's work on a block and the block's journey, by tokens per rank; right of the crossing it is hidden."""
    tokens = [2**power for power in range(8, 18)]
    machine = Hardware(tflops * 1e12, 1e-5, gb_s * 1e9)
    shapes = [AttentionShape(1, 8 * count, heads, kv_heads, 128, itemsize=2) for count in tokens]
    work = [context.ring_flops(shape, 8)[0][1] / machine.flops for shape in shapes]
    journey = [machine.link(shape.block_bytes(8)) for shape in shapes]
    figure, axes = subplots(width=8, height=3.4)
    axes.plot(tokens, work, color=look(0).color, marker=look(0).marker, label="work on a block")
    axes.plot(tokens, journey, color=look(1).color, marker=look(1).marker, linestyle="--", label="its journey")
    hides = context.hiding_length(heads, kv_heads, machine, 2)
    axes.axvline(hides, color=PALETTE["vermillion"], linestyle=":", label=f"hidden from {hides:,.0f} tokens per rank")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="tokens per rank", ylabel="time per block (s)")
    setting = f"Formula: {heads} heads on {kv_heads}, bf16, {tflops} TFLOP/s, {gb_s} GB/s"
    headline(axes, "Work grows with the square of the block, its journey in proportion", setting)
    axes.legend()
    return figure


# Drawn from measurements.


def draw_memory(found: dict[str, list[int]]) -> Figure:
    """Peak bytes of a layer's forward and backward, by length: scores stored, and tiles; dashed: quadratic, linear."""
    lengths = experiments.LENGTHS
    ideal = {
        name: [sizes[-1] * (seq / lengths[-1]) ** power for seq in lengths]
        for (name, sizes), power in zip(found.items(), (2, 1), strict=True)
    }
    figure = lines(
        lengths,
        found,
        ideal,
        x_axis=("length in tokens", ""),
        y_axis=("peak", "B"),
        log="xy",
    )
    axes = figure.axes[0]
    for line, growth in zip(axes.lines[1::2], ("exactly quadratic", "exactly linear"), strict=True):
        line.set_label(growth)
    axes.legend()
    setting = "One layer of 2 heads, forward and backward; dashed: growth through the last point"
    headline(axes, "Stored scores grow with the square of the length, tiles in proportion", setting)
    return figure


def draw_overlap(found: dict[tuple[str, bool], links.Clock]) -> Figure:
    """Rank 0 of a forward ring, work above link: a faster and a slower emulated link, with overlap and without."""
    figure, panels = subplots(len(found), 1, width=9, height=5.2, sharex=True)
    end = max(clock.measured_s for clock in found.values())
    for axes, ((name, overlap), clock) in zip(panels, found.items(), strict=True):
        _clock(axes, clock.ledgers[0], links.LINKS_S[name])
        how = "sent behind the work" if overlap else "sent, then worked"
        took, due = 1e3 * clock.measured_s, 1e3 * clock.predicted_s
        axes.set_title(f"{name.capitalize()} link, {how}: {took:.0f} ms ({due:.0f} by formula)")
        axes.set_xlim(0, 1.02e3 * end)
    panels[-1].set_xlabel("time (ms), link and work emulated")
    entries = [
        Patch(facecolor=STYLES[kind][0], hatch=STYLES[kind][1], edgecolor="#444444", label=STYLES[kind][3])
        for kind in ("compute", "comm", "wait")
    ]
    figure.legend(handles=entries, loc="outside lower center", ncols=3, frameon=False)
    headline(figure, "Sending behind the work hides a fast link wholly and a slow one in part")
    return figure


def _clock(axes: Axes, ledger: Any, journey_s: float) -> None:
    """A message leaves when the work on its block begins; the ledger knows from when on it was waited for."""
    events = [event for event in ledger.events if event.op == "exchange"]
    zero = min(item.start for item in (*events, *ledger.spans))
    for each in ledger.spans:
        _bar(axes, "compute", 0.55, each.start - zero, each.end - zero, each.name)
    for event, block in zip(events, ledger.spans, strict=False):
        leaves = min(event.start, block.start)
        arrives = max(leaves + journey_s, event.end if event.waited > 0.1 * journey_s else 0.0)
        _bar(axes, "comm", 0.0, leaves - zero, min(event.start, arrives) - zero)
        _bar(axes, "wait", 0.0, event.start - zero, arrives - zero)
    axes.set(ylim=(-0.1, 1.1))
    axes.set_yticks([0.22, 0.77], ["link", "work"])
    axes.grid(False)


def _bar(axes: Axes, kind: str, low: float, start: float, end: float, name: str = "") -> None:
    if end > start:
        color, hatch, *_ = STYLES[kind]
        face = {"facecolor": color, "hatch": hatch, "edgecolor": "#444444", "linewidth": 0.5}
        axes.broken_barh([(start * 1e3, (end - start) * 1e3)], (low, 0.45), **face)
        axes.text((start + end) / 2 * 1e3, low + 0.22, name, ha="center", va="center", fontsize=9)


# Committed figures.


def _figure_work() -> tuple[Figure, dict[str, Any]]:
    return causal_work(), {"world_size": 4, "flops_share": experiments.work()}


def _figure_memory() -> tuple[Figure, dict[str, Any]]:
    found = experiments.peaks()
    return draw_memory(found), {"lengths": list(experiments.LENGTHS), "peak_bytes": found}


def _figure_overlap() -> tuple[Figure, dict[str, Any]]:
    clocks = links.on_a_clock()
    return draw_overlap(clocks), {"emulated": True, "rows": links.overlap_rows(clocks)}


FIGURES = {"work": _figure_work, "memory": _figure_memory, "overlap": _figure_overlap}
