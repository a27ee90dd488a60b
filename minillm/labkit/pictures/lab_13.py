"""Lab 13's figures: who holds which block, step by step; what is wasted, what sharing saves, which block size."""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import PercentFormatter

from minillm.labkit.experiments import lab_13 as experiments
from minillm.labkit.palette import CARD, PALETTE, TEXT, look
from minillm.labkit.plots import bars, lines, style, subplots
from minillm.predict import paging as predict
from minillm.serve import StepRecord

FREE, SHARED = "#E3E3E3", PALETTE["yellow"]


def draw_blocks(
    axes: Axes, record: StepRecord, *, columns: int, names: Sequence[str], blocks: int | None = None
) -> None:
    """The pool after a step: each block in the colour of its sequence, in yellow if several hold it, with their number.

    names: the sequences, in the order of their colours. blocks: only the first so many are drawn.
    """
    holders = {name: set(table) for name, table in (record.tables or {}).items()}
    count = min(blocks or len(record.references), len(record.references))
    for block in range(count):
        row, column = divmod(block, columns)
        mine = [name for name in names if block in holders.get(name, ())]
        known = mine and names.index(mine[0])
        colour = FREE if not mine else SHARED if len(mine) > 1 else look(known).color
        hatch = look(known).hatch if len(mine) == 1 else ""
        axes.add_patch(Rectangle((column, row), 0.9, 0.9, facecolor=colour, edgecolor=CARD, hatch=hatch, linewidth=0.5))
        if mine:
            where = [holders_place(record, name, block) for name in mine]
            dark = len(mine) > 1 or colour in (PALETTE["orange"], PALETTE["sky"], PALETTE["purple"])
            text = f"{len(mine)}×" if len(mine) > 1 else str(where[0])
            box = {"facecolor": colour, "edgecolor": "none", "pad": 1.0}
            axes.text(
                column + 0.45, row + 0.47, text, ha="center", va="center", fontsize=8,
                color=TEXT if dark else CARD, fontweight="bold", bbox=box,
            )  # fmt: skip
    axes.set(xlim=(-0.15, columns), ylim=(-(-count // columns), -0.15), aspect="equal")
    axes.axis("off")


def holders_place(record: StepRecord, name: str, block: int) -> int:
    """Which logical block of the sequence it is."""
    return record.tables[name].index(block)


def _key(figure: Figure, names: Sequence[str], **options: Any) -> None:
    patches = [
        Rectangle((0, 0), 1, 1, facecolor=look(i).color, hatch=look(i).hatch, edgecolor=CARD, label=name)
        for i, name in enumerate(names)
    ]
    patches += [Rectangle((0, 0), 1, 1, facecolor=SHARED, edgecolor=CARD, label="held by several (how many)")]
    patches += [Rectangle((0, 0), 1, 1, facecolor=FREE, edgecolor=CARD, label="free, or cached and held by nobody")]
    figure.legend(handles=patches, loc="outside lower left", ncols=3, fontsize=8, **options)


def _samples(records: Sequence[StepRecord]) -> list[str]:
    return sorted({name for record in records for name in record.tables})


# Copy on write.


@cache
def _forks() -> dict[str, Any]:
    return experiments.forks()


def forks_before_and_after() -> Figure:
    """Three samples of one prompt: its blocks are held three times; the first write into its last block copies it."""
    records = _forks()["records"]
    moments = {0: "the prompt is computed, and forked", 1: "each wrote one token", len(records) - 2: "at the end"}
    names = [f"sample {name.split('/')[1]}" for name in _samples(records)]
    figure, panels = subplots(1, 3, width=10, height=2.5)
    with style():
        for axes, (step, said) in zip(panels, moments.items(), strict=True):
            draw_blocks(axes, records[step], columns=8, names=_samples(records), blocks=24)
            axes.set_title(f"step {step + 1}: {said}", fontsize=9)
        _key(figure, names)
    return figure


def forks_over_time(step: int = 2) -> Figure:
    """The pool step by step, while three samples of one prompt are written."""
    return _over_time(_forks()["records"], step, 24, columns=12, label=lambda name: f"sample {name.split('/')[1]}")


# Eviction.


@cache
def _chats(num_blocks: int) -> dict[str, Any]:
    return experiments.chats(num_blocks)


def evictions_over_time(num_blocks: int = 24, step: int = 60) -> Figure:
    """Three users take turns: blocks of the one that is served, and how many others are cached, by step."""
    found = _chats(num_blocks)
    return _over_time(found["records"], step, num_blocks, columns=16, label=lambda name: name.split("/")[0])


def _over_time(records: Sequence[StepRecord], step: int, blocks: int, columns: int, label) -> Figure:
    step = min(max(step, 1), len(records))
    record, steps = records[step - 1], range(1, len(records) + 1)
    figure, (top, below) = subplots(2, 1, width=8, height=4.0, height_ratios=(3, 2))
    names = list(record.tables)
    with style():
        draw_blocks(top, record, columns=columns, names=names, blocks=blocks)
        batch = ", ".join(f"{label(name)}: {tokens}" for name, _, tokens in record.batch)
        top.set_title(f"step {step}: {record.free} free, {record.cached} cached, {record.used} used. Tokens: {batch}")
        shares = [[getattr(r, kind) for r in records] for kind in ("used", "cached", "free")]
        colours = (PALETTE["blue"], PALETTE["sky"], FREE)
        below.stackplot(steps, shares, labels=("used", "cached", "free"), colors=colours, step="post")
        below.axvline(step, color=PALETTE["vermillion"], linewidth=1.5)
        below.set(xlabel="step", ylabel="blocks", xlim=(1, len(records)), ylim=(0, sum(s[0] for s in shares)))
        below.grid(False)
        below.legend(loc="upper left", ncols=3, fontsize=8, frameon=True)
        _key(figure, [label(name) for name in names] or ["a sequence"])
    return figure


# Waste.


def draw_waste(numbers: dict[str, Any], reserved: int) -> Figure:
    """How many unused slots a sequence has at a time, and the share of memory that three ways of keeping it waste."""
    size, lengths = numbers["block_size"], numbers["lengths"]
    figure, (left, right) = subplots(1, 2, width=9.5, height=3.2)
    counts = Counter(numbers["unused"])
    with style():
        left.bar(range(size), [counts[n] for n in range(size)], 0.85, color=PALETTE["blue"])
        mean = predict.mean_unused_slots(size)
        left.axvline(mean, color=PALETTE["vermillion"], linestyle="--", label=f"predicted mean {mean:g}")
        left.set(xlabel="unused slots of a sequence", ylabel="times seen", xlim=(-0.8, size + 0.8))
        left.set_title(f"Blocks of {size}: never {size} or more")
        left.legend()
    measured = [
        predict.reserved_waste(lengths, reserved),
        predict.reserved_waste(lengths, max(lengths)),
        1 - numbers["filled"] / numbers["held"],
    ]
    bars(
        [
            f"{reserved} reserved\n(the context)",
            f"{max(lengths)} reserved\n(the longest)",
            f"blocks of {size}\n(measured)",
        ],
        None,
        measured,
        quantity="unused share of what is held",
        unit="",
        title="Waste",
        ax=right,
    )
    with style():
        right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        right.legend().remove()
        for place, value in enumerate(measured):
            right.annotate(f"{value:.1%}", (place, value), ha="center", va="bottom", fontsize=9)
    return figure


def waste_by_block_size(mean_length: int = 100, block_size: int = 16, reserved: int = 512) -> Figure:
    """Predicted waste by block size, for sequences of some mean length, beside one reservation for each."""
    sizes = [2**k for k in range(10)]
    figure, axes = subplots(width=7.2, height=3.2)
    shares = [predict.mean_unused_slots(b) / (mean_length + predict.mean_unused_slots(b)) for b in sizes]
    lines(
        sizes,
        {
            "blocks: (b-1)/2 of every sequence": shares,
            f"{reserved} reserved": [1 - mean_length / reserved] * len(sizes),
        },
        x_axis=("block size", ""),
        y_axis=("unused share", ""),
        log="x",
        ax=axes,
    )
    here = predict.mean_unused_slots(block_size) / (mean_length + predict.mean_unused_slots(block_size))
    with style():
        axes.axvline(block_size, color="#999999", linestyle=":", linewidth=1)
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_title(f"sequences of {mean_length} tokens, blocks of {block_size}: {here:.1%} unused")
    return figure


# Sharing.


def sharing(prefix: int = 1000, own: int = 200, requests: int = 8, block_size: int = 16) -> Figure:
    """Blocks held and prompt tokens computed by number of requests, with and without a shared prefix (predicted)."""
    counts = range(1, 33)
    figure, panels = subplots(1, 2, width=9.5, height=3.2)
    prompt = prefix + own
    for axes, what, apart, shared in (
        (panels[0], "blocks held", lambda r: r * predict.blocks_for(prompt, block_size), predict.shared_blocks),
        (panels[1], "prompt tokens computed", lambda r: r * prompt, predict.computed_tokens),
    ):
        values = [shared(prefix, own, r, block_size) for r in counts]
        lines(
            counts,
            {"each its own": [apart(r) for r in counts], "the prefix once": values},
            x_axis=("requests", ""),
            y_axis=(what, ""),
            ax=axes,
        )
        with style():
            for drawn in axes.lines:
                drawn.set_marker("")
            saved = 1 - values[requests - 1] / apart(requests)
            axes.axvline(requests, color="#999999", linestyle=":", linewidth=1)
            axes.set_ylim(0)
            axes.set_title(f"{requests} requests: {saved:.0%} fewer")
    return figure


# Block sizes.


def draw_sweep(rows: Sequence[dict[str, Any]]) -> Figure:
    """Waste grows with the block, attention's time falls: measured, by block size."""
    sizes = [row["block_size"] for row in rows]
    figure, (left, right) = subplots(1, 2, width=9.5, height=3.2)
    lines(
        sizes,
        {"unused share": [row["waste"] for row in rows]},
        x_axis=("block size", ""),
        y_axis=("unused share of what is held", ""),
        title="Too large wastes",
        log="x",
        ax=left,
    )
    lines(
        sizes,
        {name: [row["attention_s"][name] for row in rows] for name in rows[0]["attention_s"]},
        x_axis=("block size", ""),
        y_axis=("one query over 480 keys", "s"),
        title="Too small costs",
        log="xy",
        ax=right,
    )
    with style():
        left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        left.set_ylim(0)
        for axes in (left, right):
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.minorticks_off()
    return figure


# The committed ones: measured anew by `python -m minillm figures`.


def _waste() -> tuple[Figure, dict[str, Any]]:
    numbers = experiments.waste(16)
    kept = {key: value for key, value in numbers.items() if key != "unused"}
    mean = sum(numbers["unused"]) / len(numbers["unused"])
    return draw_waste(numbers, experiments.target().config.max_seq_len), kept | {"mean_unused": mean}


def _copy_on_write() -> tuple[Figure, dict[str, Any]]:
    found = experiments.forks()
    return forks_before_and_after(), {key: value for key, value in found.items() if key != "records"} | {
        "records": experiments.records_json(found["records"][:3])
    }


def _block_size() -> tuple[Figure, dict[str, Any]]:
    rows = experiments.sweep()
    return draw_sweep(rows), {"rows": rows}


FIGURES = {"waste": _waste, "copy_on_write": _copy_on_write, "block_size": _block_size}
