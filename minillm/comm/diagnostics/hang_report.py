"""Who waits for whom: the flight recorder as a table.

A collective waits for the members that have not entered it; a receive waits for its sender. The culprit is the rank
that others wait for, and that waits for nobody.
"""

import time
from collections.abc import Collection, Mapping

from minillm.comm.diagnostics.flight_recorder import FINISHED, RAISED, STARTING, FlightRecorder, RecordedOperation

COLUMNS = ("rank", "where", "shape", "group", "since", "waits for")


def hang_report(
    recorder: FlightRecorder, places: Mapping[int, str] | None = None, stopped: Collection[int] = ()
) -> str:
    """A table with one line per rank. places: for a rank outside of operations, the source line it is at, if known.
    stopped: ranks whose processes a signal has stopped."""
    now = time.monotonic()
    rows = []
    for rank in recorder.ranks:
        number, where, *rest = _row(recorder, rank, now, (places or {}).get(rank, ""))
        rows.append((number, f"{where}, stopped by a signal" if rank in stopped else where, *rest))
    widths = [max(len(str(row[i])) for row in [COLUMNS, *rows]) for i in range(len(COLUMNS))]
    lines = ["  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
             for row in [COLUMNS, tuple("-" * width for width in widths), *rows]]  # fmt: skip
    return "\n".join(lines)


def _row(recorder: FlightRecorder, rank: int, now: float, place: str) -> tuple[str, ...]:
    pid, state, sign = recorder.state(rank)
    waiting = sorted((posted for posted in recorder.posted(rank) if posted.waiting), key=lambda p: p.launched)
    if waiting and state not in (FINISHED, RAISED):
        posted = waiting[0]
        missing = ", ".join(f"rank {r}" for r in waits_for(recorder, rank, posted))
        elsewhere = ", ".join(f"rank {r}" for r in posted.ranks if not recorder.has(r))
        whom = missing or (f"another machine: {elsewhere}" if elsewhere else "nobody: all have entered it")
        shape = f"{posted.shape} {posted.dtype}" if posted.shape != [0] else ""
        op = f"{posted.op} (launched)" if posted.launched else posted.op
        return (str(rank), op, shape, posted.name, f"{now - posted.since:.1f} s", whom)
    if pid == 0 or state == STARTING:
        return (str(rank), "starting", "", "", f"{now - sign:.1f} s" if pid else "", "")
    if state in (FINISHED, RAISED):
        return (str(rank), "finished" if state == FINISHED else "raised an error", "", "", f"{now - sign:.1f} s", "")
    latest = max([sign, *(posted.since for posted in recorder.posted(rank))])
    where = f"in no operation, {place}" if place else "in no operation"
    return (str(rank), where, "", "", f"{now - latest:.1f} s", "")


def waits_for(recorder: FlightRecorder, rank: int, posted: RecordedOperation) -> list[int]:
    """The global ranks that this operation waits for."""
    if posted.peers is not None:
        return posted.peers
    return [r for r in posted.ranks if r != rank and recorder.has(r) and not _entered(recorder, r, posted)]


def _entered(recorder: FlightRecorder, rank: int, posted: RecordedOperation) -> bool:
    other = recorder.posted_in(rank, posted.ordinal)
    return other is not None and other.sequence >= posted.sequence
