"""Lab 19: what this machine's server does near the knee, and what starting one takes."""

from course.lab19_serving_fleet import experiments
from course.shared.table import Table, seconds, table

PHASES = ("process", "imports", "load", "warm-up")


def measured_knee() -> Table:
    """Mean waits of a rate sweep, beside Lindley's recursion and Pollaczek's and Khinchine's formula."""
    lines = [
        (
            f"{found.load:.0%}",
            seconds(found.service_s),
            "—" if found.idle_s is None else seconds(found.idle_s),
            f"{found.cv:.2f}",
            *(seconds(value) for value in (found.wait, found.path, found.formula)),
        )
        for found in experiments.knee()
    ]
    columns = ("load", "service", "if idle before", "spread", "mean wait: measured", "path", "long run, by formula")
    return table("the draft model over HTTP, one request at a time, 60 at each rate", columns, lines)


def cold_start() -> Table:
    """Where the seconds of a start went: one process, and two at once."""
    lines = []
    for together in (1, 2):
        for found in experiments.start(together):
            name = "alone" if together == 1 else "one of two at once"
            lines.append((name, *(seconds(found.phases[phase]) for phase in PHASES), seconds(found.seconds)))
    return table("python -m minillm serve, on this machine: measured", ("", *PHASES, "until ready"), lines)
