"""Pictures of blocks: which sequence holds which, and where the tokens of a sequence lie in memory."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minillm.drawing import subplots
from minillm.palette import CARD, PALETTE, TEXT, look

FREE, SHARED = "#E3E3E3", PALETTE["yellow"]


def draw_blocks(
    axes: Axes,
    tables: Mapping[str, Sequence[int]],
    *,
    blocks: int,
    columns: int,
    names: Sequence[str],
    before: Mapping[int, str] | None = None,
) -> None:
    """A pool: each block in the colour of its holder, with its logical place; yellow and how many if there are several.

    names: the holders, in the order of their colours. before: block -> its last holder, drawn pale if it has none now.
    """
    for block in range(blocks):
        row, column = divmod(block, columns)
        mine = [name for name in names if block in tables.get(name, ())]
        last = mine[0] if mine else (before or {}).get(block)
        drawn = look(names.index(last)) if last else None
        colour = SHARED if len(mine) > 1 else drawn.color if drawn else FREE
        hatch, alpha = drawn.hatch if len(mine) == 1 else "", 1.0 if mine or not drawn else 0.3
        patch = {"facecolor": colour, "edgecolor": CARD, "hatch": hatch, "linewidth": 0.5, "alpha": alpha}
        axes.add_patch(Rectangle((column, row), 0.9, 0.9, **patch))
        if mine:
            dark = len(mine) > 1 or colour in (PALETTE["orange"], PALETTE["sky"], PALETTE["purple"])
            text = f"{len(mine)}×" if len(mine) > 1 else str(list(tables[mine[0]]).index(block))
            written = {"color": TEXT if dark else CARD, "fontsize": 9, "fontweight": "bold"}
            box = {"facecolor": colour, "edgecolor": "none", "pad": 1.0}
            axes.text(column + 0.45, row + 0.47, text, ha="center", va="center", bbox=box, **written)
    axes.set(xlim=(-0.15, columns), ylim=(-(-blocks // columns), -0.15), aspect="equal")
    axes.axis("off")


def key(figure: Figure, names: Sequence[str], free: str = "held by none") -> None:
    """The legend under a figure of `draw_blocks`."""
    patches = [
        Rectangle((0, 0), 1, 1, facecolor=look(i).color, hatch=look(i).hatch, edgecolor=CARD, label=name)
        for i, name in enumerate(names)
    ]
    patches += [Rectangle((0, 0), 1, 1, facecolor=SHARED, edgecolor=CARD, label="held by several (how many)")]
    patches += [Rectangle((0, 0), 1, 1, facecolor=FREE, edgecolor=CARD, label=free)]
    figure.legend(handles=patches, loc="outside lower left", ncols=5)


def draw_memory(tables: Mapping[str, Sequence[int]], lengths: Mapping[str, int], slots: int, block_size: int) -> Figure:
    """Above, each sequence in its own order with its block table; below, a memory of so many slots, block by block."""
    figure, (above, below) = subplots(2, 1, width=9, height=3.5, height_ratios=(3, 1.2))
    owner = {block: (name, place) for name, table in tables.items() for place, block in enumerate(table)}
    unused = sum(len(table) * block_size - lengths[name] for name, table in tables.items())
    for line, (name, table) in enumerate(tables.items()):
        for place, block in enumerate(table):
            left = place * (block_size + 0.5)
            filled = lengths[name] - place * block_size
            _draw_block(above, left, 1.3 * line, block_size, look(line).color, filled, place)
            above.text(left + block_size / 2, 1.3 * line + 1.0, str(block), ha="center", va="center", fontsize=9)
        above.text(-0.4, 1.3 * line + 0.4, f"{name}: {list(table)}", ha="right", va="center", fontsize=9)
    for block in range(slots // block_size):
        name, place = owner.get(block, (None, 0))
        filled = lengths[name] - place * block_size if name else 0
        colour = look(list(tables).index(name)).color if name else FREE
        _draw_block(below, block * block_size, 0, block_size, colour, filled, place)
        below.text((block + 0.5) * block_size, 1.15, str(block), ha="center", va="center", fontsize=9)
    widest = max(len(table) for table in tables.values()) * (block_size + 0.5)
    above.set(xlim=(-0.42 * max(widest, 20), max(widest, 20)), ylim=(1.3 * len(tables), -0.15))
    below.set(xlim=(-0.2, slots + 0.2), ylim=(1.5, -0.15))
    above.set_title("Block tables: in the order of the sequence")
    below.set_title(f"Memory: {slots} slots in blocks of {block_size}; {unused} slots held and unused")
    above.axis("off")
    below.axis("off")
    return figure


def _draw_block(axes: Axes, left: float, top: float, size: int, colour: str, filled: int, place: int) -> None:
    """One block: a cell per token with its position, empty cells hatched."""
    for slot in range(size):
        used, held = slot < filled, filled > 0
        looks = {"facecolor": colour if used else CARD if held else FREE, "hatch": "xxxx" if held and not used else ""}
        edge = {"edgecolor": "#999999" if held and not used else CARD, "linewidth": 0.5}
        axes.add_patch(Rectangle((left + slot, top), 1, 0.8, **looks, **edge))
        if used:
            bright = colour in (PALETTE["orange"], PALETTE["sky"])
            where = {"ha": "center", "va": "center", "fontsize": 9, "color": TEXT if bright else CARD}
            axes.text(left + slot + 0.5, top + 0.4, str(place * size + slot), **where)
    axes.add_patch(Rectangle((left, top), size, 0.8, fill=False, edgecolor=TEXT, linewidth=1))
