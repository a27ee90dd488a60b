"""Receipts: what was predicted beside what really happened, and whether the two agree.

    ring all-reduce, 4 ranks
    name                   your guess       formula      measured   verdict
    bytes sent by rank 0        8.0 MB   1,572,864 B   1,572,864 B   ok
    messages                        —             6             6   ok

Columns keep apart where a number comes from: the reader's guess, a formula (or what must hold), arithmetic, a
simulation of a machine, and this machine. Only columns that a receipt uses are shown, and of a long one the first rows
and those that are off; the rest is folded. The same object is text for a terminal, HTML for a notebook (readable on
light and dark pages, and without any CSS, as on GitHub) and rows of JSON. With MINILLM_STRICT=1, as when solutions are
executed, a receipt that is off cannot be displayed, unless what is off depends on the machine (`Row.steady`).
"""

import functools
import inspect
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from numbers import Number
from typing import Any, Literal

Verdict = Literal["ok", "off", "info"]
Kind = Literal["measured", "simulated", "computed", "formula"]
OPEN_ROWS = 3  # a lab shows some thirty receipts, so the summary of what is folded says how it went
TIMES = ("s", "ms", "token/s", "B/s", "FLOP/s")  # units of what a busy machine changes when it is measured
_TINY = 1e-300
_MARKS = {"ok": ("✓", "#009E73"), "off": ("✗", "#D55E00"), "info": ("·", "#888888")}
_COLUMNS = ("your guess", "formula", "computed", "simulated", "measured")


class ReceiptOff(Exception):
    """A receipt is displayed under MINILLM_STRICT=1, and a steady row of it is off."""


@dataclass(frozen=True)
class Row:
    """One quantity. predicted: what a formula gives or what must hold, None where nothing was predicted ("info").

    measured: what was found; kind says whether on this machine, in a simulation, or by arithmetic with the course's
    formulas ("computed"), to decide what somebody claims. A row of kind "formula" has only its `predicted`. guess: the
    reader's. noisy: it depends on what else this machine is doing (time, traffic on the loopback interface).
    """

    @property
    def steady(self) -> bool:
        """Whether tests may insist on the verdict: the tour judges noisy rows and measured times, and tests do not."""
        return not self.noisy and not (self.kind == "measured" and self.unit in TIMES)

    name: str
    predicted: Any
    measured: Any
    unit: str
    verdict: Verdict
    kind: Kind = "measured"
    guess: Any = None
    noisy: bool = False

    @property
    def columns(self) -> dict[str, Any]:
        """Values by the column in which they stand."""
        found = {} if self.kind == "formula" else {self.kind: self.measured}
        return {"your guess": self.guess, "formula": self.predicted} | found

    def to_json(self) -> dict[str, Any]:
        plain = {
            "name": self.name,
            "predicted": _plain(self.predicted),
            "measured": _plain(self.measured),
            "unit": self.unit,
            "verdict": self.verdict,
        }
        return plain if self.kind == "measured" else plain | {"kind": self.kind}


@dataclass(frozen=True, repr=False)
class Receipt:
    """A titled table of rows; `.ok` is False as soon as one is off. print() shows all rows, a notebook the first ones.

    show: a regular expression for the names of rows that a notebook shows, too, wherever they stand.
    """

    title: str
    rows: tuple[Row, ...]
    open_rows: int = OPEN_ROWS
    show: str = ""

    @property
    def ok(self) -> bool:
        return all(row.verdict != "off" for row in self.rows)

    @property
    def shown(self) -> int:
        """How many rows stand before the fold: a row that is indented is not cut off from the one above it."""
        if len(self.rows) <= self.open_rows:
            return len(self.rows)
        whole = (n for n in range(self.open_rows, 0, -1) if not self._indented(n))
        return next(whole, self.open_rows)

    @property
    def open(self) -> tuple[Row, ...]:
        """The rows that are not folded: the first, those to show, and each that is off with the row it stands under."""
        return self._rows(is_open=True)

    @property
    def folded(self) -> tuple[Row, ...]:
        return self._rows(is_open=False)

    def to_json(self) -> list[dict[str, Any]]:
        """Rows {"name", "predicted", "measured", "unit", "verdict"}, safe to hand to `json.dump`."""
        return [row.to_json() for row in self.rows]

    def __str__(self) -> str:
        self._refuse_off()
        table = [self._heads(), *map(self._cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        sides = ["<", *[">"] * len(self._columns()), "<"]
        lines = [
            "   ".join(
                f"{cell:{side}{width}}" for cell, side, width in zip(cells, sides, widths, strict=False)
            ).rstrip()
            for cells in table
        ]
        return "\n".join([self.title, *lines] if self.title else lines)

    def __repr__(self) -> str:
        if not self.folded:
            return str(self)
        lines = str(self).splitlines()
        heads = lines[: -len(self.rows)]
        kept = [line for line, is_open in zip(lines[len(heads) :], self._is_open(), strict=True) if is_open]
        return "\n".join([*heads, *kept, f"... and {_summary(self.folded)}; print() shows them all"])

    def _repr_html_(self) -> str:
        self._refuse_off()
        title = f"<b>{escape(self.title)}</b>" if self.title else ""
        more = ""
        if self.folded:
            more = f"<details><summary>{_summary(self.folded)}</summary>{self._table(self.folded)}</details>"
        return f'<div style="color:inherit">{title}{self._table(self.open)}{more}</div>'

    def _rows(self, *, is_open: bool) -> tuple[Row, ...]:
        return tuple(row for row, found in zip(self.rows, self._is_open(), strict=True) if found == is_open)

    def _is_open(self) -> list[bool]:
        """Row by row, whether it is not folded."""
        named = [row.verdict == "off" or bool(self.show and re.search(self.show, row.name)) for row in self.rows]
        marks = [place < self.shown or wanted for place, wanted in enumerate(named)]
        parent = 0
        for place, wanted in enumerate(named):
            if not self._indented(place):
                parent = place
            elif wanted:
                marks[parent] = True
        return marks

    def _indented(self, place: int) -> bool:
        return self.rows[place].name.startswith(" ")

    def _refuse_off(self) -> None:
        """ReceiptOff under MINILLM_STRICT=1 if a steady row is off."""
        off = [row for row in self.rows if row.verdict == "off" and row.steady]
        if off and os.environ.get("MINILLM_STRICT") == "1":
            found = (f"{r.name}: {_plain(r.measured)} {r.unit}".rstrip() + f", not {_plain(r.predicted)}" for r in off)
            raise ReceiptOff(f"receipt '{self.title}' is off: {'; '.join(found)}")

    def _columns(self) -> list[str]:
        """Those columns that a row has a value for; a comparison always has "formula", an empty receipt "measured"."""
        used = {name for row in self.rows for name, value in row.columns.items() if value is not None}
        return [name for name in _COLUMNS if name in used] or ["measured"]

    def _judged(self) -> bool:
        return any(row.verdict != "info" for row in self.rows)

    def _heads(self) -> list[str]:
        return ["name", *self._columns(), *(["verdict"] if self._judged() else [])]

    def _cells(self, row: Row) -> list[str]:
        values = [format_value(row.columns.get(name), row.unit) for name in self._columns()]
        return [row.name, *values, *([row.verdict] if self._judged() else [])]

    def _table(self, rows: Iterable[Row]) -> str:
        sides = ["left", *["right"] * len(self._columns()), "left"]
        head = "".join(
            f'<th style="text-align:{side};padding:2px 12px">{name}</th>'
            for side, name in zip(sides, self._heads(), strict=False)
        )
        body = "".join(map(self._html_row, rows))
        return (
            '<table style="border-collapse:collapse;margin:4px 0;color:inherit">'
            f'<thead><tr style="border-bottom:1px solid #888">{head}</tr></thead><tbody>{body}</tbody></table>'
        )

    def _html_row(self, row: Row) -> str:
        name, *values = self._cells(row)
        verdict = values.pop() if self._judged() else ""
        depth = len(name) - len(name.lstrip(" "))
        indent = "&nbsp;" * depth  # a page collapses spaces, and GitHub drops styles
        cells = [f'<td style="text-align:left;padding:2px 12px">{indent}{escape(name.lstrip(" "))}</td>']
        number = "text-align:right;padding:2px 12px;font-variant-numeric:tabular-nums"
        cells += [f'<td style="{number}">{escape(value)}</td>' for value in values]
        if verdict:
            mark, colour = _MARKS[row.verdict]
            weight = "bold" if row.verdict == "off" else "normal"
            cells.append(
                f'<td style="text-align:left;padding:2px 12px"><span style="color:{colour};font-weight:bold">{mark}'
                f'</span> <span style="font-weight:{weight}">{verdict}</span></td>'
            )
        return f'<tr style="background:none;color:inherit">{"".join(cells)}</tr>'


def _summary(rows: Sequence[Row]) -> str:
    """How many rows are folded, and that those which compare agree: one that is off is never folded."""
    number = f"{len(rows)} more row{'s' * (len(rows) > 1)}"
    judged = sum(row.verdict != "info" for row in rows)
    return f"{number}, {'all ' * (judged == len(rows) > 1)}ok" if judged else number


def row(
    name: str,
    predicted: Any,
    measured: Any,
    unit: str = "",
    tolerance: float = 0.0,
    *,
    guess: Any = None,
    kind: Kind = "measured",
    noisy: bool = False,
) -> Row:
    """Compare a prediction with what was found.

    tolerance: relative to |predicted|; 0 asks for exact equality. predicted=None only reports ("info").
    kind="simulated": `measured` comes from a model of a machine; "computed": from arithmetic. guess: the reader's,
    shown and not judged. noisy: see Row. Numbers may be Python's, numpy's or one-element tensors; anything else is
    compared by ==.
    """
    if not tolerance >= 0:
        raise ValueError(f"tolerance={tolerance} of row '{name}' must be 0 or more (a share of the predicted value)")
    if kind not in ("measured", "simulated", "computed"):
        raise ValueError(
            f"kind='{kind}' of row '{name}' must be 'measured', 'simulated' or 'computed'; a formula's row is formula()"
        )
    predicted, measured = _scalar(predicted), _scalar(measured)
    if predicted is None:
        verdict = "info"
    elif isinstance(predicted, Number) and isinstance(measured, Number):
        close = predicted == measured or abs(measured - predicted) <= tolerance * max(abs(predicted), _TINY)
        verdict = "ok" if close else "off"
    else:
        verdict = "ok" if predicted == measured else "off"
    return Row(name, predicted, measured, unit, verdict, kind, _scalar(guess), noisy)


def formula(name: str, value: Any, unit: str = "", *, guess: Any = None) -> Row:
    """A number that is arithmetic and was not measured, beside the reader's guess if there is one."""
    return Row(name, _scalar(value), None, unit, "info", "formula", _scalar(guess))


def receipt(title: str, rows: Iterable[Row], *, open_rows: int = OPEN_ROWS, show: str = "") -> Receipt:
    """A receipt from rows made by `row` and `formula`; rows after `open_rows` are folded, except those off and those
    whose names the regular expression `show` finds: the rows that a text or a question speaks of."""
    if open_rows < 1:
        raise ValueError(f"open_rows={open_rows} of receipt '{title}' must be 1 or more")
    return Receipt(title, tuple(rows), open_rows, show)


def titled(
    title: str, *, open_rows: int = OPEN_ROWS, show: str = ""
) -> Callable[[Callable[..., Iterable[Row]]], Callable[..., Receipt]]:
    """What a function that yields rows returns: their receipt. {names} in the title are the function's arguments.

    @titled("{ranks} ranks, bytes of a step")
    def sent(ranks=4): yield row(...)
    """

    def decorate(make: Callable[..., Iterable[Row]]) -> Callable[..., Receipt]:
        @functools.wraps(make)
        def made(*args: Any, **options: Any) -> Receipt:
            given = inspect.signature(make).bind(*args, **options)
            given.apply_defaults()
            return receipt(title.format(**given.arguments), make(*args, **options), open_rows=open_rows, show=show)

        return made

    return decorate


def format_value(value: Any, unit: str = "") -> str:
    """A value as people write it: 1,572,864 B · 3.20 ms · 12.5 GFLOP/s · 0.7500."""
    if value is None:
        return "—"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(format_value(item) for item in value)})" + (f" {unit}" if unit else "")
    if not isinstance(value, (int, float)):
        return str(value)
    if not math.isfinite(value):
        return f"{value} {unit}".rstrip()
    if unit in ("s", "seconds"):
        return _with_prefix(value, "s", (("", 1.0), ("m", 1e-3), ("µ", 1e-6), ("n", 1e-9)))
    if unit.endswith("/s"):
        return _with_prefix(value, unit, (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0)))
    unit = "B" if unit == "bytes" else unit
    if float(value).is_integer() and abs(value) < 1e15:
        number = f"{int(value):,}"
    else:
        number = f"{value:,.1f}" if unit == "B" else _significant(value)
    return f"{number} {unit}".rstrip()


def _significant(value: float) -> str:
    """Four significant digits; very large and very small numbers as powers of ten."""
    if value == 0 or 1e-3 <= abs(value) < 1e15:
        digits = max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0
        return f"{value:,.{digits}f}"
    return f"{value:.3e}"


def _with_prefix(value: float, unit: str, prefixes: Sequence[tuple[str, float]]) -> str:
    """`prefixes` from the largest to the smallest: the first that keeps the number at 1 or more."""
    prefix, scale = next((p for p in prefixes if abs(value) >= p[1]), prefixes[-1] if value else ("", 1.0))
    scaled = value / scale
    digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
    return f"{scaled:,.{digits}f} {prefix}{unit}"


def _scalar(value: Any) -> Any:
    """One-element tensors and numpy scalars become Python numbers."""
    if not isinstance(value, (str, bytes)) and hasattr(value, "item") and getattr(value, "shape", None) in ((), (1,)):
        return value.item()
    return tuple(value) if type(value).__name__ == "Size" else value


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else str(value)
