"""Lab 22's claims: a silent bug looks right, leaves a trace, and the trace goes when the bug does."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from course.kit.receipts import Row, row, titled
from course.lab22_bug_museum import museum
from course.lab22_bug_museum.training_runs import Record, Run, together
from course.shared.faults.patches import code_hash
from course.shared.table import Table, table

SHOWN = ("slow-with-clipping", "two-gpus-one-run", "utilisation")


def hall(kind: str = "") -> Table:
    """The exhibits, of one kind or of both."""
    rows = [(f"{its.name}: {its.title}", its.kind) for its in museum.EXHIBITS.values() if kind in ("", its.kind)]
    return table(f"{len(rows)} exhibits", ("exhibit", "kind"), rows)


@titled("silent bugs and their traces", open_rows=6)
def every_bug_leaves_a_trace() -> Iterator[Row]:
    """Of a few exhibits."""
    for name in SHOWN:
        yield from leaves_a_trace(name)


def leaves_a_trace(name: str) -> Iterator[Row]:
    """Of one exhibit: what looks right with the fault, and what does not with and without it."""
    its = museum.exhibit(name)
    before = [code_hash(fault.target) for fault in its.faults]
    faulty, sound = recorded(name), its.run((), 1)
    looks, trace, clean = its.looks(faulty), its.trace(faulty), its.trace(sound)
    what = ", ".join(each.name for each in looks)
    yield row(f"{name}: right are {what}", len(looks), sum(each.verdict == "ok" for each in looks))
    yield row("    leaves a trace", not its.innocent, any(each.verdict == "off" for each in trace))
    yield row("    and none without the fault", 0, sum(each.verdict == "off" for each in clean))
    yield row("    the patch is gone", True, before == [code_hash(fault.target) for fault in its.faults])


@titled("a constant factor under AdamW")
def factor_under_adam(guess_of_loss: float | None = None, guess_of_norm: float | None = None) -> Iterator[Row]:
    """The first exhibit's gradient and loss beside one process's."""
    record: Record = recorded("slow-with-clipping")
    norm, loss = record.ranks[0].norm / record.alone.norm, record.steps[-1].loss / record.alone.steps[-1].loss
    factor = record.scene.layout.accumulate
    yield row("gradient norm / one process's", factor, norm, tolerance=1e-3, guess=guess_of_norm)
    yield row("last loss / one process's", 1.0, loss, tolerance=0.02, guess=guess_of_loss)


@cache
def recorded(name: str) -> Any:
    """A run of the exhibit with its faults."""
    its = museum.exhibit(name)
    return its.run(its.faults, 1)


@cache
def trained() -> dict[str, Record]:
    """The same of every exhibit that trains on two ranks, in one launch."""
    exhibits = [its for its in museum.EXHIBITS.values() if isinstance(its.run, Run)]
    records = together([(its.run, its.faults, 1) for its in exhibits])
    return {its.name: record for its, record in zip(exhibits, records, strict=True)}


CLAIMS = (every_bug_leaves_a_trace, factor_under_adam)
