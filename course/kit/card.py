"""What `check`, `hint` and `finish` show: a title, what to say about it, the receipt. HTML in a notebook, else text."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from course.kit.receipts import Receipt


@dataclass(frozen=True, repr=False)
class Card:
    """place: how far the lab is. hint_of: the exercise whose hints the card's button opens, if any."""

    title: str
    place: str = ""
    receipt: Receipt | None = None
    lines: tuple[str, ...] = ()
    note: str = ""
    good: bool = False
    hint_of: str = ""

    def __repr__(self) -> str:
        indented = ["  " + part for line in [*self.lines, self.note] if line for part in line.splitlines()]
        title = f"{self.title} ({self.place})" if self.place else self.title
        return "\n".join([title, *([str(self.receipt)] if self.receipt else []), *indented])

    def _repr_html_(self) -> str:
        colour = "#009E73" if self.good else "#E69F00"
        lines = "".join(map(_html_line, self.lines))
        note = f'<div style="margin-top:6px"><i>{escape(self.note)}</i></div>' if self.note else ""
        place = f' <span style="opacity:0.7">· {escape(self.place)}</span>' if self.place else ""
        table = self.receipt._repr_html_() if self.receipt else ""
        return (
            f'<div style="border-left:4px solid {colour};padding:4px 12px;color:inherit">'
            f"<b>{'✓ ' if self.good else ''}{escape(self.title)}</b>{place}{table}{lines}{note}</div>"
        )


def show_card(card: Card, on_hint: Callable[[str], None] | None = None) -> None:
    """Rich in a notebook, with a button that calls on_hint(card.hint_of); text anywhere else."""
    if not in_notebook():
        print(card)
        return
    from IPython.display import display

    display(card)
    if on_hint and card.hint_of:
        _show_button(card.hint_of, on_hint)


def in_notebook() -> bool:
    return "IPython" in sys.modules and getattr(sys.modules["IPython"].get_ipython(), "kernel", None) is not None


def _show_button(exercise: str, on_hint: Callable[[str], None]) -> None:
    try:
        import ipywidgets
    except ImportError:  # hint("...") does the same
        return
    from IPython.display import display

    button, answer = (
        ipywidgets.Button(description="Hint", tooltip=f"Open the next hint of {exercise}"),
        ipywidgets.Output(),
    )

    def opened(_button: object) -> None:
        with answer:
            on_hint(exercise)

    button.on_click(opened)
    display(ipywidgets.VBox([button, answer]))


def _html_line(line: str) -> str:
    """A sentence, or a block of several lines (a table, a line of code) that keeps its columns."""
    if "\n" in line:
        return f'<pre style="margin:3px 0;color:inherit;background:none">{escape(line)}</pre>'
    return f'<div style="margin:3px 0">{escape(line)}</div>'
