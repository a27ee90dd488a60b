"""The flight recorder as a picture: blocks by sequence and number of holders, and the batches under them."""

from functools import cache

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from course.lab14_continuous_batching.experiments import Flight, play, requests
from minillm.bench.load import Arrival
from minillm.drawing import headline, subplots
from minillm.palette import PALETTE, look
from minillm.serve import StepRecord

COLUMNS, SIZE = 16, 4
POOL = {"num_blocks": 48, "block_size": SIZE, "token_budget": 24, "max_num_seqs": 6, "chunk": 12, "reserve": 0}
FREE = "#DEDEDE"


def trace() -> list[Arrival]:
    """12 requests; every second one begins with the same 16 tokens, which are stored once."""
    lengths = [
        (28, 30),
        (24, 36),
        (36, 12),
        (24, 40),
        (12, 24),
        (26, 8),
        (40, 28),
        (22, 30),
        (10, 40),
        (30, 10),
        (18, 36),
    ]
    arrivals = requests([*lengths, (32, 16)], vocab_size=1000)
    prefix = arrivals[0].prompt[:16]
    return [
        Arrival(each.at, prefix + each.prompt[16:], each.params) if number % 2 == 0 and len(each.prompt) > 16 else each
        for number, each in enumerate(arrivals)
    ]


@cache
def flight(policy: str = "latest", preemption: str = "recompute", chunk: int = 12) -> Flight:
    return play(trace(), blocks=True, policy=policy, preemption=preemption, **(POOL | {"chunk": chunk}))


def view(step: int = 14, policy: str = "latest", preemption: str = "recompute", chunk: int = 12) -> Figure:
    """Which sequence holds which block after a step, and what each step computed (the shown one is shaded).

    A block shows its sequence; ×2: two hold it. Hatched tokens are prompt, or computed again after a preemption.
    """
    return draw(flight(policy, preemption, chunk), step, f"policy: preempt the {policy} and {preemption}")


def draw(flown: Flight, step: int, title: str) -> Figure:
    """A flight with recorded blocks at one of its steps, from 1 on; a later step is its last."""
    records = flown.records
    step = min(max(step, 1), len(records))
    now = records[step - 1]
    figure, (above, below) = subplots(2, 1, width=9, height=5.0, height_ratios=[1, 1.25])
    _draw_blocks(above, now)
    away = sorted(_away(records[:step]), key=int)
    headline(
        above,
        f"Step {step} of {len(records)}: {now.running} sequences run and {now.waiting} wait, "
        f"{now.used} of {now.used + now.free + now.cached} blocks are held",
        f"Waiting after a preemption: {', '.join(away) or 'none'}; blocks cached: {now.cached}; {title}",
    )
    _draw_batches(below, flown, step)
    return figure


def _away(records: list[StepRecord]) -> set[str]:
    away: set[str] = set()
    for each in records:
        away = (away | set(each.preempted)) - set(each.admitted)
    return away


def _colour(name: str) -> str:
    """Seven colours of the palette, its yellow, then four of Tol's muted ones; blocks and batches carry numbers too."""
    colours = [look(i).color for i in range(7)] + [PALETTE["yellow"], "#332288", "#882255", "#999933", "#BBBBBB"]
    return colours[int(name) % len(colours)]


def _draw_blocks(axes: Axes, now: StepRecord) -> None:
    holder: dict[int, str] = {}
    for name, table in now.tables.items():
        for block in table:
            holder.setdefault(block, name)
    for block, held in enumerate(now.references):
        x, y = block % COLUMNS, block // COLUMNS
        colour = _colour(holder[block]) if held else FREE
        axes.add_patch(Rectangle((x + 0.04, y + 0.06), 0.92, 0.88, facecolor=colour, edgecolor="none"))
        if held > 1:
            axes.add_patch(Rectangle((x + 0.04, y + 0.06), 0.92, 0.88, fill=False, edgecolor="black", linewidth=2))
        if held:
            label = holder[block] + (f" ×{held}" if held > 1 else "")
            axes.text(x + 0.5, y + 0.5, label, ha="center", va="center", fontsize=9, color=_ink(holder[block]))
    axes.set(xlim=(0, COLUMNS), ylim=(-(-len(now.references) // COLUMNS), 0), xticks=[], yticks=[])
    axes.set_ylabel("blocks")
    axes.grid(False)
    for side in axes.spines.values():
        side.set_visible(False)


def _ink(name: str) -> str:
    red, green, blue = to_rgb(_colour(name))
    return "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.5 else "white"


def _draw_batches(axes: Axes, flown: Flight, step: int) -> None:
    known = flown.prompts
    boxes: dict[tuple[str, bool], list] = {}
    named: dict[str, tuple[float, float]] = {}  # where a sequence is computed first
    for number, each in enumerate(flown.records, start=1):
        bottom, left, right = 0, number - 0.45, number + 0.45
        for name, first, tokens in each.batch:
            catching_up = tokens > 1 or first + tokens < known[name]
            top = bottom + tokens
            if name not in named:
                named[name] = (number, bottom + tokens / 2)
            boxes.setdefault((name, catching_up), []).append(
                [(left, bottom), (right, bottom), (right, top), (left, top)]
            )
            bottom = top
            known[name] += first + tokens == known[name]
        if each.preempted:
            axes.plot(number, bottom + 1.2, marker="v", color=PALETTE["vermillion"], markersize=6)
            names = ",".join(each.preempted)
            axes.annotate(names, (number, bottom + 2.2), ha="center", fontsize=9, color=PALETTE["vermillion"])
    for (name, catching_up), corners in boxes.items():
        options = {"hatch": "///", "edgecolor": "white"} if catching_up else {"edgecolor": "none"}
        axes.add_collection(PolyCollection(corners, facecolor=_colour(name), linewidth=0, **options))
    halo = [withStroke(linewidth=3, foreground="white")]
    for name, place in named.items():
        axes.text(*place, name, ha="center", va="center", fontsize=9, fontweight="bold", path_effects=halo)
    top = max(each.tokens for each in flown.records)
    axes.axvspan(step - 0.5, step + 0.5, color="black", alpha=0.15, linewidth=0)
    axes.set(xlim=(0, len(flown.records) + 1), ylim=(0, top + 7), xlabel="step", ylabel="tokens of the step")
    axes.grid(False, axis="x")
    axes.set_title("Hatched: prompt or computed again. Plain: decode. ▾: preempted", fontsize=9, fontweight="normal")
