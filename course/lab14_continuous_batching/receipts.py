"""Stop 14: continuous batching: decode steps, one flight twice, chunks and gaps, what preemption costs, four faults."""

from collections.abc import Iterator

from course.lab14_continuous_batching import experiments
from course.lab14_continuous_batching import experiments_breaks as breaks
from course.lab14_continuous_batching import experiments_engines as engines
from course.lab14_continuous_batching import formulas as predict
from course.lab14_continuous_batching.checks_flight import diagnose
from minillm.labkit.receipts import Row, row


def rows() -> Iterator[Row]:
    """Counted, or on a computed clock: nothing here depends on how busy the machine is."""
    found = engines.compare()
    for trace in engines.TRACES:
        lengths = engines.answers(engines.coming(trace))
        due = {
            "static": predict.static_steps(lengths, engines.SEATS),
            "continuous": predict.continuous_steps(lengths, engines.SEATS),
        }
        for engine, steps in due.items():
            yield row(f"{trace} answers, {engine}: forward passes", steps, found[trace, engine]["passes"])
        alike = all(found[trace, engine]["ids"] == found[trace, "static"]["ids"] for engine in engines.ENGINES)
        yield row("    the same tokens from every engine", True, alike)
    coming = experiments.requests([(20 + 7 * i % 40, 5 + 13 * i % 30) for i in range(12)], vocab_size=4096)
    options = {"num_blocks": 24, "block_size": 8, "token_budget": 32, "max_num_seqs": 6, "reserve": 0}
    llm, _ = experiments.fly(coming, experiments.draft(), **options)
    played = experiments.play(coming, **options)
    same = experiments.same_flight(played.records, list(llm.records))
    yield row("a crowded trace: played without a model = flown with one", True, same)
    yield row("    steps", len(played.records), len(llm.records))
    yield row("    preemptions", None, played.preemptions)
    for chunk in (512, 2048, None):
        numbers = engines.stall(chunk)
        yield row(
            f"prompt of 8,192, chunk {chunk}: worst gap (computed clock)",
            numbers["predicted"],
            numbers["gap"],
            "s",
            0.01,
        )
    yield row("    chunk 512, phases never mixed", None, engines.unmixed(512)["gap"], "s")
    recomputed, swapped = engines.crowd("latest", "recompute"), engines.crowd("latest", "swap")
    again = recomputed.computed - recomputed.needed
    yield row("preempted and recomputed: tokens computed twice", sum(engines.given_up(recomputed)), again)
    blocks = 2 * sum(-(-tokens // 16) for tokens in engines.given_up(swapped))
    yield row("preempted and swapped: blocks moved", blocks, swapped.swapped)
    yield row("    tokens computed twice", 0, swapped.computed - swapped.needed)
    for fault in breaks.FAULTS:
        flight = breaks.case(fault, 14)
        yield row(
            "diagnosis of a flight", fault, diagnose(flight.records, {n: t.prompt for n, t in flight.told.items()})
        )


CLAIMS = (rows,)
