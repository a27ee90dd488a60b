"""`python -m minillm figures`: measure anew and draw every committed figure of the course, its numbers beside it.

    figures/01_ring_vs_tree.png      the picture, as the README and the labs show it
    figures/01_ring_vs_tree.json     {"provenance": ..., "numbers": ...}: what was measured, where and how

A lab registers its figures in course/labNN_topic/figures.py: FIGURES maps a name to a function that returns
the figure and its numbers.
"""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.figure import Figure

from course.kit import course
from minillm.drawing import small, style
from minillm.measure.provenance import provenance

Drawing = Callable[[], tuple[Figure, dict[str, Any]]]
LARGEST_BYTES = 150_000


def command(
    labs: Annotated[
        list[str] | None, typer.Argument(help="Labs, such as 01, or figures, such as 01_bytes; none means all.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("figures"),
) -> None:
    """Measure and draw the course's figures."""
    chosen = list(registered(labs or []))
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, draw in chosen:
            with style():
                figure, numbers = draw()
            image = png(figure)
            (out / f"{name}.png").write_bytes(image)
            record = {"provenance": provenance(f"python -m minillm figures {name}"), "numbers": numbers}
            (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            print(f"{out / name}.png  {len(image) / 1e3:.0f} kB", flush=True)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written ({error.strerror}): name another folder") from error


def registered(labs: list[str]) -> Iterator[tuple[str, Drawing]]:
    """(NN_name, function) of every figure of the labs, or of all labs; of one figure if it is named."""
    known = course.numbers("figures")
    for lab in labs:
        if lab.split("_")[0] not in known:
            raise ValueError(f"lab '{lab}' has no committed figures; those with figures are {', '.join(known)}")
    for lab in labs or known:
        number, _, one = lab.partition("_")
        figures = course.load("figures", number).FIGURES
        for name in [one] if one in figures else figures:
            yield f"{number}_{name}", figures[name]


def png(figure: Figure) -> bytes:
    """The figure as PNG. ValueError if it is larger than a repository should carry."""
    buffer = io.BytesIO()
    with style():
        figure.savefig(buffer, format="png")
    image = small(buffer.getvalue())
    if len(image) > LARGEST_BYTES:
        raise ValueError(f"the figure takes {len(image):,} bytes as PNG; keep it under {LARGEST_BYTES:,}")
    return image
