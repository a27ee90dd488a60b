"""Lab 13's figures: blocks and their holders, step by step; what is wasted, what sharing saves, which block size."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from course.lab13_paged_attention import experiments
from course.lab13_paged_attention import experiments_sharing as sharing_measured
from course.lab13_paged_attention import experiments_sizes as sizes_measured
from course.lab13_paged_attention import formulas as predict
from course.lab13_paged_attention.block_picture import FREE, draw_blocks, draw_memory, key
from minillm.drawing import bars, headline, lines, subplots
from minillm.palette import PALETTE
from minillm.serve import StepRecord

# Block tables.


def tables_and_memory(a: int = 10, b: int = 3, c: int = 9, block_size: int = 4) -> Figure:
    """Three sequences in logical order, with their block tables, and the same tokens where they lie in memory."""
    slots = 48
    order = [3, 0, 5, 1, 4, 2, 7, 6]  # of the free blocks, and on in eights
    free = [block + turn for turn in range(0, slots, 8) for block in order if block + turn < slots // block_size]
    tables: dict[str, list[int]] = {name: [] for name in "ABC"}
    lengths = dict(zip("ABC", (a, b, c), strict=True))
    for name, tokens in [(name, min(lengths[name], 6)) for name in "ABC"] + list(lengths.items()):  # in two goes
        while len(tables[name]) < predict.blocks_for(tokens, block_size):
            tables[name].append(free.pop(0))
    return draw_memory(tables, lengths, slots, block_size)


# Copy on write.


@cache
def forks() -> dict[str, Any]:
    """`sharing_measured.forks`, run once."""
    return sharing_measured.forks()


def _sample(name: str) -> str:
    return f"sample {name.split('/')[1]}"


def forks_before_and_after() -> Figure:
    """Three samples of one prompt: its blocks are held three times; the first write into its last block copies it."""
    records = forks()["records"]
    moments = {0: "prompt computed, forked", 1: "each wrote a token", len(records) - 2: "near the end"}
    names = sorted({_sample(name) for record in records for name in record.tables})
    figure, panels = subplots(1, 3, width=9, height=2.1)
    for axes, (step, said) in zip(panels, moments.items(), strict=True):
        tables = {_sample(name): table for name, table in records[step].tables.items()}
        draw_blocks(axes, tables, columns=8, names=names, blocks=24)
        axes.set_title(f"Step {step + 1}: {said}")
    key(figure, names)
    headline(figure, "Samples share the blocks of their prompt until one of them writes into the last")
    return figure


def forks_over_time(step: int = 2) -> Figure:
    """The pool step by step, while three samples of one prompt are written."""
    return _over_time(forks()["records"], step, 24, _sample)


# Eviction.


@cache
def chats(num_blocks: int) -> dict[str, Any]:
    """`sharing_measured.chats`, run once for each size of the pool."""
    return sharing_measured.chats(num_blocks)


def _user(name: str) -> str:
    return f"user {int(name.removeprefix('request-').split('/')[0]) % 3}"  # they take turns


def evictions_over_time(num_blocks: int = 20, step: int = 60) -> Figure:
    """Three users take turns: whose blocks are held, whose are cached or free (pale), and how many, by step."""
    return _over_time(chats(num_blocks)["records"], step, num_blocks, _user)


def _over_time(records: Sequence[StepRecord], step: int, blocks: int, label: Callable[[str], str]) -> Figure:
    step = min(max(step, 1), len(records))
    record, steps = records[step - 1], range(1, len(records) + 1)
    before = {block: label(n) for r in records[:step] for n, table in r.tables.items() for block in table}
    names = sorted({label(name) for r in records for name in r.tables})
    figure, (top, below) = subplots(2, 1, width=9, height=3.8, height_ratios=(3, 2))
    tables = {label(name): table for name, table in record.tables.items()}
    draw_blocks(top, tables, columns=16, names=names, blocks=blocks, before=before)
    batch = ", ".join(f"{tokens} of {label(name)}" for name, _, tokens in record.batch)
    counts = f"{record.used} blocks used, {record.cached} cached, {record.free} free"
    top.set_title(f"Step {step}, tokens computed: {batch}\n{counts}")
    shares = [[getattr(r, kind) for r in records] for kind in ("used", "cached", "free")]
    colours = (PALETTE["blue"], PALETTE["sky"], FREE)
    below.stackplot(steps, shares, labels=("used", "cached", "free"), colors=colours, step="post")
    below.axvline(step, color=PALETTE["vermillion"], linewidth=1.5)
    below.set(xlabel="step", ylabel="blocks", xlim=(1, len(records)), ylim=(0, sum(s[0] for s in shares)))
    below.grid(False)
    below.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, borderaxespad=0.2)
    key(figure, names, "never held (pale: held before)")
    return figure


# Waste.


def draw_waste(numbers: dict[str, Any], reserved: int) -> Figure:
    """How many unused slots a sequence has at a time, and the share of memory that three ways of keeping it waste."""
    size, lengths = numbers["block_size"], numbers["lengths"]
    figure, (left, right) = subplots(1, 2, width=9, height=3.2)
    counts = Counter(numbers["unused"])
    left.bar(range(size), [counts[n] for n in range(size)], 0.85, color=PALETTE["blue"])
    mean = predict.mean_unused_slots(size)
    left.axvline(mean, color=PALETTE["vermillion"], linestyle="--", label=f"predicted mean {mean:g}")
    left.set(xlabel="unused slots of a sequence", ylabel="times seen", xlim=(-0.8, size + 0.8))
    left.set_title("A sequence leaves less than a block unused")
    left.set_ylim(0, 1.25 * max(counts.values()))
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
        title="Blocks leave the least unused",
        ax=right,
    )
    right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    right.legend().remove()
    for place, value in enumerate(measured):
        right.annotate(f"{value:.1%}", (place, value), ha="center", va="bottom", fontsize=9)
    return figure


def waste_of(numbers: dict[str, Any]) -> Callable[[], Figure]:
    """`draw_waste` of these numbers, to show."""

    def waste() -> Figure:
        """A sequence never leaves a whole block unused; reservations leave most of what they hold unused."""
        return draw_waste(numbers, experiments.target().config.max_seq_len)

    return waste


# Sharing.


def sharing(prefix: int = 1000, own: int = 200, requests: int = 8, block_size: int = 16) -> Figure:
    """Blocks held and prompt tokens computed by number of requests, with and without a shared prefix (predicted)."""
    counts = range(1, 33)
    figure, panels = subplots(1, 2, width=9, height=3.2)
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
        for drawn in axes.lines:
            drawn.set_marker("")
        saved = 1 - values[requests - 1] / apart(requests)
        axes.axvline(requests, color="#999999", linestyle=":", linewidth=1)
        axes.set_ylim(0)
        axes.set_title(f"{requests} × ({prefix:,} + {own:,}) tokens: {saved:.0%} fewer")
    return figure


# Block sizes.


def by_block_size() -> Figure:
    """Unused share and attention's CPU time by block size: block by block it falls, copied together hardly."""
    return draw_sweep(sizes_measured.sweep())


def draw_sweep(rows: Sequence[dict[str, Any]]) -> Figure:
    """Unused share and attention's time by block size, measured: blocks cost time only when handled one by one."""
    sizes = [row["block_size"] for row in rows]
    figure, (left, right) = subplots(1, 2, width=9, height=3.2)
    lines(
        sizes,
        {"unused share": [row["waste"] for row in rows]},
        x_axis=("block size", ""),
        y_axis=("unused share of what is held", ""),
        title="Large blocks waste memory",
        log="x",
        ax=left,
    )
    lines(
        sizes,
        {name: [row["attention_s"][name] for row in rows] for name in rows[0]["attention_s"]},
        x_axis=("block size", ""),
        y_axis=("CPU time, a query over 480 keys", "s"),
        title="Small ones cost time only one by one",
        log="xy",
        ax=right,
    )
    left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    left.set_ylim(0)
    least = min(time for row in rows for time in row["attention_s"].values())
    right.set_ylim(0.9 * 10 ** math.floor(math.log10(least)))  # with a tick below the lower curve
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
    counts = {key: value for key, value in forks().items() if key != "records"}
    return forks_before_and_after(), counts | {"records": experiments.records_json(forks()["records"][:3])}


def _block_size() -> tuple[Figure, dict[str, Any]]:
    rows = sizes_measured.sweep()
    return draw_sweep(rows), {"rows": rows}


FIGURES = {"waste": _waste, "copy_on_write": _copy_on_write, "block_size": _block_size}
