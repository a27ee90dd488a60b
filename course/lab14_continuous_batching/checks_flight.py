"""Lab 14, the flight recorder read: when each token came, and which of four faults a scheduler has."""

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from numbers import Real

from course.kit.answers import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab14_continuous_batching import experiments_breaks
from course.lab14_continuous_batching.experiments import Flight, play, requests
from course.shared.diagnose import expect, expect_list
from minillm.serve.run.recorder import StepRecord

ANSWERS = answers_of("14_continuous_batching")
SEEDS = 200  # runs among which six must show the fault


@exercise(
    "latencies-from-a-flight",
    minutes=20,
    difficulty=3,
    hints=(
        "Being in a batch is not getting a token: pieces of a prompt give none, nor do the tokens computed again after "
        "a preemption. Which piece does?",
        "Keep how many tokens each sequence has: its prompt at first. A step that computes up to exactly that number "
        "(first + tokens == held) gives it one more, at started + seconds.",
    ),
)
def check_latencies(learner: Callable) -> Receipt:
    rows = []
    for how, options in (
        ("whole prompts", {"num_blocks": 200, "chunk": 64, "token_budget": 64}),
        ("prompts in pieces", {"num_blocks": 200}),
        ("preempted, recomputed", {"num_blocks": 30, "prefix_cache": False, "policy": "longest", "chunk": 3}),
        ("preempted, swapped", {"num_blocks": 30, "preemption": "swap"}),
        ("with pauses between requests", {"num_blocks": 200}),
    ):
        # No prompt ends where a piece does, so that a returning sequence has a piece of both prompt and answer.
        lengths = [(3 * random.randint(3, 13) + 2, random.randint(16, 30)) for _ in range(12 - len(rows) // 3)]
        settings = {"block_size": 4, "token_budget": 16, "max_num_seqs": 5, "chunk": 6, "reserve": 0}
        first, every = (0.3, 0.5) if how == "with pauses between requests" else (0.0, 0.007)
        arrivals = [replace(each, at=each.at + first) for each in requests(lengths, every=every)]
        flight = play(arrivals, **(settings | options))
        arrived = {name: history.arrived for name, history in flight.histories.items()}
        found = learner(list(flight.records), flight.prompts, arrived)
        fits = isinstance(found, dict) and set(found) == set(flight.histories)
        expect(fits, found, "a dict with one entry per request", f"{how}: you")
        for name, history in flight.histories.items():
            where = f"{how}: request {name}, a prompt of {history.prompt} and {len(history.tokens)} tokens"
            mine = expect_list(found[name], "(ttft, tpot, worst gap)", f"{where}: you", count=3)
            expect(all(isinstance(one, Real) for one in mine), mine, "three numbers of seconds", f"{where}: you")
            due = (history.ttft, history.tpot, history.worst_gap)
            for what, one, right in zip(("TTFT", "TPOT", "the worst gap"), mine, due, strict=True):
                if not abs(one - right) <= 1e-9 + 1e-6 * right:  # NaN, too
                    text = f"{where}: you say {what} {1e3 * one:.4f} ms, it was {1e3 * right:.4f} ms."
                    raise CheckFailed(text, rows, evidence={name: list(each) for name, each in found.items()})
        rows.append(row(f"{how}: requests timed as they happened", len(flight.histories), len(found)))
        for place, what in ((0, "ttft"), (2, "worst_gap")):
            worst = max(each[place] for each in found.values())
            rows.append(row(f"    longest {what.replace('_', ' ')}", flight.spread(what).most, worst, "s", 1e-9))
    return receipt("from records to latencies, on the computed clock", rows)


@exercise(
    "diagnose-a-flight",
    minutes=30,
    difficulty=4,
    hints=(
        "For each fault write the sentence 'no sound scheduler ever ...' in terms of a record's fields: batch, "
        "admitted, preempted, sampled. You have followed token counts through records already.",
        "Livelock: 100 steps without a token in which requests are preempted, or nothing is computed. Place lost: a "
        "request is admitted while a preempted one with a smaller number is away. Phases: sequences that decode are "
        "there, none of them is in the batch, and blocks are to be had. Tokens that do not exist: first + tokens > "
        "what the sequence has.",
    ),
)
def check_diagnose(learner: Callable) -> Receipt:
    rows = []
    base = random.randrange(10_000)
    for fault in experiments_breaks.FAULTS:
        right = 0
        for flight in _flights(fault, base):
            found = learner(list(flight.records), flight.prompts)
            expect(found in experiments_breaks.FAULTS, found, f"one of {', '.join(experiments_breaks.FAULTS)}")
            if found != fault:
                raise CheckFailed(_misread(flight, fault, found))
            right += 1
            if fault == experiments_breaks.HEALTHY:
                for begun in (flight.records[:1], flight.records[: len(flight.records) // 2]):
                    if (found := learner(list(begun), flight.prompts)) != fault:
                        raise CheckFailed(
                            f"the first {len(begun)} steps of a healthy run: you say '{found}'. That not all requests "
                            "have ended, or none has a token yet, is no fault: the recording may stop earlier"
                        )
            elif fault != "livelock":
                shown = _first_shown(flight, fault)
                if (found := learner(list(shown), flight.prompts)) != fault:
                    raise CheckFailed(
                        f"a recording of {len(shown)} steps that stops with the first step of the fault '{fault}': you "
                        f"say '{found}'. The last step counts, too"
                    )
        rows.append(row(f"{fault}: recognised, of 6 flights", 6, right))
    for name, records, prompts in _sound_flights():
        if (found := learner(records, prompts)) != experiments_breaks.HEALTHY:
            raise CheckFailed(f"{name}: you say '{found}', and the scheduler is sound")
    for name, (records, right) in _BY_HAND.items():
        if (found := learner(_numbered(records), {"0": 2, "1": 9})) != right:
            raise CheckFailed(f"{name}: you say '{found}', it is '{right}'")
    return receipt("five schedulers, 30 flights", rows)


def _first_shown(flight: Flight, fault: str) -> Sequence:
    """The shortest beginning of the recording in which the fault shows."""
    steps = range(1, len(flight.records) + 1)
    shown = bisect_left(steps, True, key=lambda n: ANSWERS.diagnose(flight.records[:n], flight.prompts) == fault)
    return flight.records[: shown + 1]


def _sound_flights() -> list[tuple[str, list[StepRecord], dict[str, int]]]:
    """(what is special, records, prompts) of sound schedulers that look like broken ones."""
    scarce = {"num_blocks": 26, "block_size": 4, "token_budget": 12, "reserve": 0}
    waits = play(requests([(53, 39), (47, 40), (20, 11), (20, 20), (9, 22)]), max_num_seqs=3, chunk=4, **scarce)
    draw = random.Random(7)
    lengths = [(draw.randint(18, 30), draw.randint(14, 24)) for _ in range(14)]
    many = play(requests(lengths), max_num_seqs=4, chunk=8, **scarce)
    long = play(requests([(3000, 40)]), num_blocks=200, token_budget=16, chunk=16, max_num_seqs=1)
    return [
        ("the only decoding sequence waits for a block, of which none is left", list(waits.records), waits.prompts),
        ("14 requests (request 10 came after request 9)", list(many.records), many.prompts),
        ("a prompt of 3,000 tokens in chunks of 16, recorded to its end", list(long.records), long.prompts),
        ("180 chunks of a long prompt, each computed once", list(long.records[:180]), long.prompts),
    ]


def _step(batch: list, sampled: int, **names: list[str]) -> dict:
    return {"batch": batch, "sampled": sampled, "admitted": [], "preempted": [], "ended": [], **names}


def _numbered(steps: Sequence[dict]) -> list[StepRecord]:
    """Records of a flight: a step each 10 ms, two sequences."""
    rest = {"seconds": 0.01, "running": 2, "waiting": 0, "free": 9, "cached": 0, "used": 3}
    return [StepRecord(step=number, started=0.01 * number, **rest, **each) for number, each in enumerate(steps)]


# Request 0 decodes while request 1 prefills in pieces; then it gives its blocks up, or ends.
_BEGIN = [_step([("0", 0, 2), ("1", 0, 2)], 1, admitted=["0", "1"])]
_BY_HAND = {
    "the only sequence that decodes is preempted, and a prompt goes on": (
        [*_BEGIN, _step([("1", 2, 4)], 0, preempted=["0"]), _step([("1", 6, 2)], 0)],
        experiments_breaks.HEALTHY,
    ),
    "the only sequence that decodes has ended, and a prompt goes on": (
        [*_BEGIN, _step([("0", 2, 1), ("1", 2, 2)], 1, ended=["0"]), _step([("1", 4, 4)], 0)],
        experiments_breaks.HEALTHY,
    ),
    "sequence 1 is preempted and comes back, and a step computes its prompt while sequence 0 gets nothing": (
        [*_BEGIN, _step([("0", 2, 1)], 1, preempted=["1"]), _step([("1", 0, 2)], 0, admitted=["1"])],
        "phases never mixed",
    ),
    "a sequence has 3 tokens, and the one at position 3 is computed": (
        [*_BEGIN, _step([("0", 3, 1), ("1", 2, 2)], 1)],
        "tokens that do not exist",
    ),
    "a sequence has 3 tokens, and 4 of it are computed": (
        [*_BEGIN, _step([("0", 2, 2), ("1", 2, 2)], 1)],
        "tokens that do not exist",
    ),
    "a token in each of 121 steps, and none in the 151 after them": (
        [
            *_BEGIN,
            *(_step([("0", 2 + n, 1)], 1) for n in range(120)),
            _step([], 0, preempted=["0"]),
            *[_step([], 0)] * 150,
        ],
        "livelock",
    ),
}


def _flights(fault: str, base: int) -> list[Flight]:
    """Six flights in which this fault shows, which in one of a hundred does not. Of healthy ones at least one preempts
    a sequence twice, of those that lose a place at least one preempts none twice, so that the number of preemptions
    does not give the fault away."""
    drawn = (experiments_breaks.case(fault, seed) for seed in range(base, base + SEEDS))
    shown = (flight for flight in drawn if ANSWERS.diagnose(flight.records, flight.prompts) == fault)
    flights = list(islice(shown, 6))
    if len(flights) < 6:
        few = f"'{fault}' shows in {len(flights)} of {SEEDS} runs from seed {base}"
        raise RuntimeError(f"{few}, and the check needs 6: enlarge SEEDS")
    twice = {experiments_breaks.HEALTHY: True, "place in the queue lost": False}.get(fault)
    while twice is not None and not any((_most_preempted(flight) > 1) is twice for flight in flights):
        another = next(shown, None)
        if another is None:
            often = "preempts a sequence twice" if twice else "preempts no sequence twice"
            raise RuntimeError(f"none of {SEEDS} runs from seed {base} with '{fault}' {often}: enlarge SEEDS")
        flights[-1] = another
    return flights


def _most_preempted(flight: Flight) -> int:
    return max(Counter(name for each in flight.records for name in each.preempted).values(), default=0)


def _misread(flight: Flight, fault: str, found: str) -> str:
    facts = f"{len(flight.records)} steps, {flight.preemptions} preemptions"
    evidence = {
        experiments_breaks.HEALTHY: "every preempted request comes back before later ones, and decoding requests get "
        "their token",
        "phases never mixed": "look for steps in which sequences that already decode get nothing",
        "place in the queue lost": "look at what is admitted while a preempted request is away",
        "livelock": f"the last 100 steps sampled {sum(each.sampled for each in flight.records[-100:])} tokens and "
        f"preempted {sum(len(each.preempted) for each in flight.records[-100:])} times",
        "tokens that do not exist": "compare first + tokens of each batch entry with what the sequence has",
    }
    return f"a flight of {facts}: you say '{found}', it is '{fault}': {evidence[fault]}"
