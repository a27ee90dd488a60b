"""Lab 19: what this machine's server does near the knee, and what starting one takes."""

from collections.abc import Iterator

from course.kit.receipts import Row, formula, row, titled
from course.lab19_serving_fleet import experiments
from course.shared.table import Table, seconds, table

PHASES = ("process", "imports", "load", "warm-up")


@titled("the draft model over HTTP, one request at a time, 60 at each rate", open_rows=9)
def measured_knee() -> Iterator[Row]:
    """Mean waits of a rate sweep, beside Lindley's recursion and Pollaczek's and Khinchine's formula."""
    for found in experiments.knee():
        name = (
            f"load {found.load:.0%}, service {found.service_s * 1e3:.0f} ms, spread {found.cv:.2f}: mean wait, by path"
        )
        yield row(name, found.path, found.wait, "s", 0.5, noisy=True)
        yield formula("    in the long run, Pollaczek and Khinchine", found.formula, "s")


def cold_start() -> Table:
    """Where the seconds of a start went: one process, and two at once."""
    lines = []
    for together in (1, 2):
        for found in experiments.start(together):
            name = "alone" if together == 1 else "one of two at once"
            lines.append((name, *(seconds(found.phases[phase]) for phase in PHASES), seconds(found.seconds)))
    return table("python -m minillm serve, on this machine: measured", ("", *PHASES, "until ready"), lines)
