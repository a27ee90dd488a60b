"""A table with columns of its own, where a receipt (predicted beside measured) does not fit.

table("a pass of the target", ("tokens", "measured", "/ one token"), [(1, seconds(0.004), 1.0), (4, ...)])
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from course.kit.receipts import format_value


@dataclass(frozen=True, repr=False)
class Table:
    """Cells are text already; the first column is aligned to the left, the others to the right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __repr__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.columns, *self.rows, strict=True)]
        lines = [
            "   ".join(
                f"{cell:<{width}}" if place == 0 else f"{cell:>{width}}" for place, (cell, width) in enumerate(pairs)
            )
            for pairs in (list(zip(cells, widths, strict=True)) for cells in (self.columns, *self.rows))
        ]
        return "\n".join([self.title, *lines])

    def _repr_html_(self) -> str:
        def line(cells: Sequence[str], tag: str) -> str:
            sides = ["left"] + ["right"] * (len(cells) - 1)
            inner = "".join(
                f'<{tag} style="text-align:{side};padding:2px 12px;white-space:pre">{escape(cell)}</{tag}>'
                for side, cell in zip(sides, cells, strict=True)
            )
            return f'<tr style="background:none;color:inherit">{inner}</tr>'

        body = "".join(line(cells, "td") for cells in self.rows)
        return (
            f'<div style="color:inherit"><b>{escape(self.title)}</b><table style="border-collapse:collapse;'
            f'color:inherit"><thead>{line(self.columns, "th")}</thead><tbody>{body}</tbody></table></div>'
        )


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """Numbers are formatted to four digits; give text, or `seconds(x)`, where a unit is wanted."""
    return Table(title, tuple(columns), tuple(tuple(map(format_value, cells)) for cells in rows))


def seconds(value: float) -> str:
    """3.20 ms"""
    return format_value(value, "s")
