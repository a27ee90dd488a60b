"""Lab 14: two plans at a time, and four loads played with lengths as drawn and with their means."""

from itertools import pairwise

from course.kit.answers import answers_of
from course.kit.receipts import Receipt, receipt, row
from course.lab14_continuous_batching import experiments_ahead
from course.lab14_continuous_batching import experiments_engines as engines
from course.lab14_continuous_batching import experiments_loads as three
from course.shared.table import Table, seconds, table

ANSWERS = answers_of("14_continuous_batching")


def ahead() -> Receipt:
    """Asynchronous scheduling beside the plain engine, and what one buffer for two plans would do."""
    found = experiments_ahead.asynchronous()
    lengths = engines.answers(engines.trace_arrivals("skewed"))
    plans = ANSWERS.continuous_batches(lengths, engines.MAX_NUM_SEQS)
    changes = sum(one != other for one, other in pairwise(plans))
    read = tuple(experiments_ahead.overwritten(plans, buffers) for buffers in (1, 2))
    return receipt(
        "two plans at a time",
        [
            row("the plain engine's answers", True, found.equal),
            row(f"steps launched before the one before was read, of {found.steps}", None, found.ahead),
            row(f"victims whose pass was under way, of {found.preempted}", None, found.under_way),
            row(f"steps of {len(plans)} that read another's batch: one buffer, two", (changes, 0), read),
            row("blocks held afterwards", 0, found.used),
        ],
        open_rows=4,
    )


def loads() -> Table:
    """Each load with its lengths as drawn, and with the mean lengths for all requests."""
    lines = []
    for name, load in three.LOADS.items():
        lengths = three.drawn(load)
        for kind, each in (("as drawn", lengths), ("all of the mean", three.means(lengths))):
            flight = three.played(load, each)
            answered = sum(answer for _, answer in each)
            ttft, gap = flight.spread("ttft"), flight.spread("worst_gap")
            times = (seconds(value) for value in (ttft.p50, ttft.p99, gap.p99))
            lines.append((f"{name}, {kind}", *times, f"{answered / flight.seconds:,.0f}"))
    columns = ("", "TTFT p50", "p99", "worst gap p99", "answer tokens/s")
    return table(f"{three.COUNT} requests of each, 8B on one H100, simulated", columns, lines)
