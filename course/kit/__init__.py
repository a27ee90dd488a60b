"""What labs are made of: exercises, hints, receipts, figures and the notebook builder.

A lab needs one line: `from course.kit import check, finish, hint, show, sliders`. Plotting names load matplotlib
on first use, so ranks that unpickle a lab's function stay quick to start.
"""

from importlib import import_module

from course.kit.answers import answers_of
from course.kit.checks import check, finish, hint
from course.kit.exercises import CheckFailed, KnownAnswers, exercise
from course.kit.receipts import Receipt, Row, formula, receipt, row

_LAZY = {
    **dict.fromkeys(("PALETTE", "SPANS", "look"), "minillm.palette"),
    **dict.fromkeys(("bars", "lines", "style", "subplots"), "minillm.drawing"),
    **dict.fromkeys(("show", "sliders"), "course.kit.interact"),
}

__all__ = [
    "CheckFailed",
    "KnownAnswers",
    "Receipt",
    "Row",
    "answers_of",
    "check",
    "exercise",
    "finish",
    "formula",
    "hint",
    "receipt",
    "row",
    *_LAZY,
]


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module 'course.kit' has no attribute '{name}'")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
