"""Receipts: what a formula predicted beside what really happened, and whether the two agree.

    ring all-reduce, 4 ranks
    name                     predicted      measured   verdict
    bytes sent by rank 0   1,572,864 B   1,572,864 B   ok
    messages                         6             6   ok

The same object is text for a terminal, HTML for a notebook (readable on light and dark pages, and without any CSS, as
on GitHub) and rows of JSON.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from numbers import Number
from typing import Any, Literal

Verdict = Literal["ok", "off", "info"]
_TINY = 1e-300
_MARKS = {"ok": ("✓", "#009E73"), "off": ("✗", "#D55E00"), "info": ("·", "#888888")}


@dataclass(frozen=True)
class Row:
    """One quantity: `predicted` is None where nothing was predicted (verdict "info")."""

    name: str
    predicted: Any
    measured: Any
    unit: str
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "predicted": _plain(self.predicted),
            "measured": _plain(self.measured),
            "unit": self.unit,
            "verdict": self.verdict,
        }


@dataclass(frozen=True, repr=False)
class Receipt:
    """A titled table of rows; `.ok` is False as soon as one row is off."""

    title: str
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        return all(row.verdict != "off" for row in self.rows)

    def to_json(self) -> list[dict[str, Any]]:
        """Rows {"name", "predicted", "measured", "unit", "verdict"}, safe to hand to `json.dump`."""
        return [row.to_json() for row in self.rows]

    def __str__(self) -> str:
        table = [("name", "predicted", "measured", "verdict"), *map(_cells, self.rows)]
        name, predicted, measured, _ = (max(map(len, column)) for column in zip(*table, strict=True))
        lines = [f"{n:<{name}}   {p:>{predicted}}   {m:>{measured}}   {v}" for n, p, m, v in table]
        return "\n".join([self.title, *lines] if self.title else lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(
            f'<th style="text-align:{side};padding:2px 12px">{name}</th>'
            for name, side in (("name", "left"), ("predicted", "right"), ("measured", "right"), ("verdict", "left"))
        )
        body = "".join(map(_html_row, self.rows))
        title = f"<b>{escape(self.title)}</b>" if self.title else ""
        return (
            f'<div style="color:inherit">{title}<table style="border-collapse:collapse;margin:4px 0;color:inherit">'
            f'<thead><tr style="border-bottom:1px solid #888">{head}</tr></thead><tbody>{body}</tbody></table></div>'
        )


def row(name: str, predicted: Any, measured: Any, unit: str = "", tolerance: float = 0.0) -> Row:
    """Compare a prediction with a measurement.

    tolerance: relative to |predicted|; 0 asks for exact equality. predicted=None only reports ("info").
    Numbers may be Python's, numpy's or one-element tensors; anything else is compared by ==.
    """
    if not tolerance >= 0:
        raise ValueError(f"tolerance={tolerance} of row '{name}' must be 0 or more (a share of the predicted value)")
    predicted, measured = _scalar(predicted), _scalar(measured)
    if predicted is None:
        verdict = "info"
    elif isinstance(predicted, Number) and isinstance(measured, Number):
        close = predicted == measured or abs(measured - predicted) <= tolerance * max(abs(predicted), _TINY)
        verdict = "ok" if close else "off"
    else:
        verdict = "ok" if predicted == measured else "off"
    return Row(name, predicted, measured, unit, verdict)


def receipt(title: str, rows: Iterable[Row]) -> Receipt:
    """A receipt from rows made by `row`."""
    return Receipt(title, tuple(rows))


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


def _cells(row: Row) -> tuple[str, str, str, str]:
    return row.name, format_value(row.predicted, row.unit), format_value(row.measured, row.unit), row.verdict


def _html_row(row: Row) -> str:
    name, predicted, measured, verdict = map(escape, _cells(row))
    mark, colour = _MARKS[row.verdict]
    number = 'style="text-align:right;padding:2px 12px;font-variant-numeric:tabular-nums"'
    text = 'style="text-align:left;padding:2px 12px"'
    weight = "bold" if row.verdict == "off" else "normal"
    return (
        f'<tr style="background:none;color:inherit"><td {text}>{name}</td><td {number}>{predicted}</td>'
        f"<td {number}>{measured}</td><td {text}>"
        f'<span style="color:{colour};font-weight:bold">{mark}</span> '
        f'<span style="font-weight:{weight}">{verdict}</span></td></tr>'
    )
