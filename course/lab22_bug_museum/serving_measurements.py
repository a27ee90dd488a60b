"""What can be ordered of a run of the engine: answers, records, the pool, and the same traffic under other conditions.

Each shows numbers and concludes nothing. A measurement that runs the traffic again does so with the faults in place,
as an engineer would on the system that misbehaves.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

from course.kit.receipts import Row, row
from course.lab22_bug_museum.exhibit import Measurement
from course.lab22_bug_museum.serving_runs import ENGINE, SMALL, Served, Traffic, serve
from course.shared.faults.patches import Patch, planted
from course.shared.table import Table, table
from minillm.serve.requests import request
from minillm.serve.schedule.sequence import Sequence as Sample

STEPS_SHOWN = 24


def plausible(served: Served) -> list[Row]:
    """What an operator sees on the dashboard, and all of it is as it should be."""
    asked = [each for each in served.traffic.asked if each.leaves is None]
    lengths = [
        (sum(map(len, served.answers(number))), each.params.max_tokens * each.params.n)
        for number, each in enumerate(served.traffic.asked)
        if each.leaves is None
    ]
    return [
        row("requests that got their answer", len(asked), sum(found > 0 for found, _ in lengths)),
        row("tokens of the answers", sum(wanted for _, wanted in lengths), sum(found for found, _ in lengths)),
        row("errors in outputs and records", 0, served.errors),
    ]


def same_tokens(served: Served, name: str = "tokens that are not the naive loop's") -> Row:
    return row(name, 0, sum(served.wrong))


def hit(served: Served, number: int, expected: int, name: str) -> Row:
    return row(name, expected, served.hit[number])


def same_answers_so_far(served: Served) -> Row:
    """Of the requests that ended."""
    pairs = zip(served.wrong, served.ended, strict=True)
    wrong = sum(wrong for wrong, ended in pairs if ended is not None)
    return row("tokens of ended requests that are not the naive loop's", 0, wrong)


def against_the_loop(make: Callable[[random.Random], Traffic]) -> Callable[[Sequence[Patch]], list[Row]]:
    """A proof for `Exhibit`: the answers to this traffic are the naive loop's, token by token."""

    def rows(patches: Sequence[Patch]) -> list[Row]:
        served = serve(make(random.Random()), patches)
        return [
            row("the naive loop: requests answered", len(served.outputs), len(served.outputs) - served.unfinished),
            same_tokens(served, "the naive loop: tokens that differ"),
        ]

    return rows


def told_apart(patches: Sequence[Patch]) -> Row:
    """Whether tokens that differ in a bit have keys of their own, in a vocabulary of a quarter of a million."""
    with planted(patches):
        keys = [Sample([token], 1).prefixes(1, 1)[0] for token in (0, *(1 << bit for bit in range(18)))]
    return row("keys of 19 tokens that differ in a bit", 19, len(set(keys)))


def kept_apart(patches: Sequence[Patch]) -> Row:
    """Whether each pair of an adapter and a tenant begins its chains in a namespace of its own."""
    adapters = [None, *(SimpleNamespace(cache_key=key, number=number) for number, key in enumerate(("tin", "tar")))]
    with planted(patches):
        asked = [
            request.new_request([1], None, SMALL, None, 0.0, adapter=adapter, salt=salt)
            for adapter, salt in product(adapters, (None, "red", "rob"))
        ]
        origins = {each.samples[0].origin for each in asked}
    return row("namespaces of 3 adapters, each with 3 salts", 9, len(origins))


def _answers(served: Served) -> Table:
    rows = []
    for number, asked in enumerate(served.traffic.asked):
        for index, right in enumerate(served.right(number)):
            mine = served.answers(number)[index] if served.answers(number) else []
            places = [p for p, pair in enumerate(zip(mine, right, strict=False)) if pair[0] != pair[1]]
            rows.append(
                (f"{number}/{index}", len(asked.prompt), len(mine), len(places), places[0] if places else "none")
            )
    return table("answers beside the naive loop's", ("sequence", "prompt", "answer", "differ", "first"), rows)


def _hits(served: Served) -> Table:
    rows = [
        (
            f"{number}" + (f" ({asked.salt})" if asked.salt else ""),
            asked.at,
            len(asked.prompt),
            0 if output is None else output.hit,
            0 if output is None else output.computed,
            0 if output is None else output.preemptions,
        )
        for number, (asked, output) in enumerate(zip(served.traffic.asked, served.outputs, strict=True))
    ]
    heads = ("request", "arrived in step", "prompt", "tokens hit", "tokens computed", "preempted")
    return table("what the cache gave and what was computed", heads, rows)


def _latency(served: Served) -> Table:
    rows = []
    for number, (asked, ended) in enumerate(zip(served.traffic.asked, served.ended, strict=True)):
        places = served.steps_of(number)
        rows.append(
            (
                str(number),
                asked.at,
                places[0] - asked.at if places else "never",
                served.longest_gap(number),
                "never" if ended is None else ended - asked.at + 1,
            )
        )
    heads = ("request", "arrived in step", "waited", "longest gap", "end to end")
    return table("latency, in steps", heads, rows)


def _throughput(served: Served) -> Table:
    sampled = sum(record.sampled for record in served.records)
    tokens = sum(record.tokens for record in served.records)
    rows = [
        ("steps that computed something", len(served.records)),
        ("tokens computed, in the mean step", tokens / max(1, len(served.records))),
        ("tokens sampled, in the mean step", sampled / max(1, len(served.records))),
        ("sequences running, in the mean step", _mean([record.running for record in served.records])),
        ("sequences running, at most", max((record.running for record in served.records), default=0)),
        ("sequences that have a seat (max_num_seqs)", {**ENGINE, **served.traffic.engine}["max_num_seqs"]),
        ("steps in which requests waited", sum(record.waiting > 0 for record in served.records)),
    ]
    return table("throughput", ("", "value"), rows)


def _steps(served: Served) -> Table:
    rows = []
    for record in served.records[:STEPS_SHOWN]:
        batch = " ".join(f"{name}@{start}+{count}" for name, start, count in record.batch)
        came = " ".join([*(f"+{name}" for name in record.admitted), *(f"-{name}" for name in record.preempted)])
        rows.append((str(record.step - 1), batch, came, record.waiting, record.free, record.cached, record.used))
    heads = ("step", "sequence@first token+tokens", "admitted, preempted", "waiting", "free", "cached", "used")
    return table(f"the first {len(rows)} of {len(served.records)} step records", heads, rows)


def _pool(served: Served) -> Table:
    first, last = served.records[0], served.records[-1]
    rows = [
        ("blocks of the pool", first.free + first.cached + first.used),
        ("blocks in use, in the mean step", _mean([record.used for record in served.records])),
        ("blocks in use, at most", max(record.used for record in served.records)),
        ("blocks in use at the end", served.used),
        ("blocks free or cached in the last step", last.free + last.cached),
        ("blocks copied on write", served.copied),
        ("preemptions", sum(len(record.preempted) for record in served.records)),
    ]
    return table("the pool of blocks", ("", "value"), rows)


def _holders(served: Served) -> Table:
    again = served.again(served.traffic.with_engine(record_blocks=True))
    rows = []
    for record in again.records:
        held: dict[int, list[str]] = {}
        for name, blocks in (record.tables or {}).items():
            for block in blocks:
                held.setdefault(block, []).append(name)
        for block, names in held.items():
            if len(names) > 1 and len(rows) < STEPS_SHOWN:
                rows.append((str(record.step - 1), block, " ".join(names), record.references[block]))
    heads = ("step", "block", "sequences that hold it", "holders counted")
    return table("blocks in several tables", heads, rows)


def _seats(served: Served) -> Table:
    rows = [
        ("sequences that run or are counted as running, at the end", served.seats),
        ("requests that have not ended", served.unfinished),
        ("steps asked for", served.steps),
        ("steps that computed something", len(served.records)),
    ]
    return table("the scheduler's counts at the end", ("", "value"), rows)


def _again(title: str, change: Callable[[Traffic], Traffic]) -> Callable[[Served], Table]:
    def show(served: Served) -> Table:
        again = served.again(change(served.traffic))
        rows = [
            (str(number), before, after)
            for number, (before, after) in enumerate(zip(served.wrong, again.wrong, strict=True))
        ]
        return table(title, ("request", "tokens that differ, as it was", "tokens that differ, now"), rows)

    return show


def _without_cache(served: Served) -> Table:
    again = served.again(served.traffic.with_engine(prefix_cache=False))
    rows = [
        (str(number), len(asked.prompt), *("no" if each is None else "yes" for each in (before, after)))
        for number, (asked, before, after) in enumerate(
            zip(served.traffic.asked, served.ended, again.ended, strict=True)
        )
    ]
    return table("prefix_cache=False", ("request", "prompt", "ended, as it was", "ended, now"), rows)


def _gaps(title: str, change: Callable[[Traffic], Traffic]) -> Callable[[Served], Table]:
    def show(served: Served) -> Table:
        again = served.again(change(served.traffic))
        rows = [
            (str(number), served.longest_gap(number), again.longest_gap(number))
            for number in range(len(served.traffic.asked))
        ]
        return table(title, ("request", "longest gap in steps, as it was", "now"), rows)

    return show


def _stay(traffic: Traffic) -> Traffic:
    return replace(traffic, asked=tuple(replace(each, leaves=None) for each in traffic.asked))


def _patient(served: Served) -> Table:
    again = served.again(_stay(served.traffic))
    rows = [
        ("sequences counted as running when all is over", served.seats, again.seats),
        ("steps", served.steps, again.steps),
    ]
    return table("the same requests, and nobody goes away", ("", "as it was", "now"), rows)


def _alone(served: Served) -> Table:
    rows = []
    for number in range(len(served.traffic.asked)):
        again = served.again(served.traffic.alone(number))
        rows.append((str(number), served.wrong[number], again.wrong[0]))
    heads = ("request", "tokens that differ, as it was", "tokens that differ, alone")
    return table("each request with the engine to itself", heads, rows)


def _mean(values: list[int]) -> float:
    return sum(values) / max(1, len(values))


ANSWERS = Measurement("answers", 15, "every answer beside that of the naive loop", _answers)
HITS = Measurement("cache-hits", 5, "tokens of each request that were found in the prefix cache", _hits)
LATENCY = Measurement("latency", 5, "waiting time, longest gap between two tokens, end to end", _latency)
THROUGHPUT = Measurement("throughput", 5, "tokens and sequences in the mean step", _throughput)
STEPS = Measurement("step-records", 10, "what each step computed, who came and who went", _steps)
POOL = Measurement("pool", 5, "blocks in use, copied and preempted", _pool)
HOLDERS = Measurement(
    "block-tables", 15, "blocks that stand in several tables, and how many holders are counted", _holders
)
SEATS = Measurement("scheduler-counts", 5, "sequences and steps that the scheduler counts at the end", _seats)
ALONE = Measurement("one-at-a-time", 15, "each request again, with the engine to itself", _alone)
NO_CACHE = Measurement(
    "prefix-cache-off", 10, "the same requests without a prefix cache",
    _again("prefix_cache=False", lambda traffic: traffic.with_engine(prefix_cache=False)),
)  # fmt: skip
NO_CACHE_ENDS = Measurement("prefix-cache-off", 10, "the same requests without a prefix cache", _without_cache)
RECOMPUTE = Measurement(
    "recompute", 10, "the same requests, preempted sequences recomputed and not swapped",
    _again('preemption="recompute"', lambda traffic: traffic.with_engine(preemption="recompute", num_host_blocks=0)),
)  # fmt: skip
NO_CANCELS = Measurement("nobody-leaves", 10, "the same requests, and no client goes away", _patient)
WHOLE_PROMPT_GAPS = Measurement(
    "whole-prompts", 10, "the same requests, each prompt in one piece",
    _gaps("chunk=None, token_budget=1024", lambda traffic: traffic.with_engine(chunk=None, token_budget=1024)),
)  # fmt: skip
BIG_POOL = Measurement(
    "large-pool", 10, "the same requests with 512 blocks",
    _again("num_blocks=512", lambda traffic: traffic.with_engine(num_blocks=512)),
)  # fmt: skip
PIECES = Measurement(
    "prompts-in-pieces", 10, "the same requests without a cache, their prompts in pieces of 16 tokens",
    _again("prefix_cache=False, chunk=16", lambda traffic: traffic.with_engine(prefix_cache=False, chunk=16)),
)  # fmt: skip
ONE_SEAT = Measurement(
    "one-seat", 10, "the same requests, one sequence at a time in one engine",
    _again("max_num_seqs=1", lambda traffic: traffic.with_engine(max_num_seqs=1)),
)  # fmt: skip
