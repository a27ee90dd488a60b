"""Lab 19's claims and tables about queues, routing, fairness and scaling; the notebook prints each in one line.

receipts.py             simulated, counted or by formula: the same on every machine
receipts_measured.py    a server on this machine, a replica's start
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from course.kit.answers import answers_of
from course.kit.receipts import Row, formula, row, titled
from course.lab19_serving_fleet import experiments, queues
from course.lab19_serving_fleet import incidents as staged
from course.lab19_serving_fleet.stage import Staged
from course.shared.table import Table, seconds, table
from minillm.api.autoscale.policies import Reactive
from minillm.predict.serving import queueing
from minillm.serve.requests.summary import percentiles

ANSWERS = answers_of("19_serving_fleet")
RATES = (4, 8, 12, 16)


@titled("one server, services of 1 s")
def predictions(guess_half: float, guess_full: float, guess_backlog: float) -> Iterator[Row]:
    """The reader's guesses beside the closed forms."""
    for load, guess in ((0.5, guess_half), (0.95, guess_full)):
        value = queueing.mean_wait_any_service(load, 1.0, 0.0)
        yield formula(f"mean wait at {load:.0%} load, equal services", value, "s", guess=guess)
    yield formula("waiting after a cold start of 60 s: (λ - μ) · T", queueing.backlog(2, 1, 60), guess=guess_backlog)


def split() -> Table:
    """p99 of queue, prefill and decode by rate."""
    lines = []
    for rate in RATES:
        found = experiments.parts(rate)
        tails = [percentiles(part, [0.99])[0] for part in zip(*(s.parts for s in found.stories), strict=True)]
        inside, law = experiments.littles_law(found)
        lines.append((f"{rate} requests/s", *map(seconds, tails), f"{inside:.2f}", f"{law:.2f}"))
    columns = ("", "queue p99", "prefill p99", "decode p99", "inside, scraped", "λ · W")
    return table("real engine, simulated clock: 8 sequences at once", columns, lines)


@titled("Little's law: requests inside, scraped every 100 ms, and arrivals per second times seconds inside")
def littles_law() -> Iterator[Row]:
    for rate in (8, 16):
        inside, law = experiments.littles_law(experiments.parts(rate))
        yield row(f"{rate} requests/s", law, inside, "", 0.03, kind="simulated")


@titled("30,000 requests at one server, services of 1 s on average", open_rows=1, show="spread 2")
def pollaczek_khinchine() -> Iterator[Row]:
    """The event simulator beside the formula."""
    for load, cv in ((0.8, 0.0), (0.8, 2.0), (0.8, 1.0), (0.5, 1.0)):
        mean, tail = queues.mg1(load, cv)
        value = queueing.mean_wait_any_service(load, 1.0, cv)
        yield row(f"load {load:.0%}, spread {cv:g}: mean wait", value, mean, "s", 0.1, kind="simulated")
        yield row("    p99", None, tail, "s", kind="simulated")


@titled("a minute of ten requests per second; the server stands still for ten seconds of it", open_rows=4)
def omission() -> Iterator[Row]:
    """What each generator reports, with its own way to count, and what the users got."""
    found = experiments.two_generators()
    for name, calls in (
        ("closed loop, from when it was sent", found["closed"]),
        ("open loop, from when it was due", found["open"]),
    ):
        counted = [call.end_to_end if "due" in name else call.ended - call.begun for call in calls]
        p50, p99 = percentiles(counted, (0.5, 0.99))
        hit = sum(value > 1 for value in counted)
        predicted = 1 if "sent" in name else 90
        yield row(f"{name}: calls over 1 s", predicted, hit, "", 0.02, kind="simulated")
        yield row("    p50, p99", None, (seconds(p50), seconds(p99)), kind="simulated")


@titled("one server, services of 1 s on average, spread 1, 20,000 requests", open_rows=3)
def admission() -> Iterator[Row]:
    """P94: a bounded queue bounds the mean wait to about q / μ, at the price of those it refuses (M/M/1/K)."""
    for load, places in ((1.3, None), (1.3, 8), (0.9, None), (0.9, 8)):
        p99, refused = queues.bounded(load, places)
        name = f"load {load:.0%}, " + ("no bound" if places is None else f"at most {places} wait")
        yield row(f"{name}: p99 of the wait", None, p99, "s", kind="simulated")
        if places is not None:
            share = refused_share(load, places + 1)
            yield row("    refused", share, refused, "", 0.1, kind="simulated")


def refused_share(load: float, inside: int) -> float:
    """Of M/M/1/K: the share of arrivals that find K = `inside` requests there. load: not 1."""
    return (1 - load) * load**inside / (1 - load ** (inside + 1))


def routing(two_choices: Callable | None = None) -> Table:
    """p99 of the wait by rule, with exact and with old counts."""
    rules = {
        "random": lambda: queues.at_random,
        "round robin": queues.round_robin,
        "two choices (yours)": lambda: two_choices or ANSWERS.two_choices,
        "least outstanding": lambda: queues.least,
    }
    lines = [
        (name, *(seconds(queues.routed(make(), stale_s=stale)) for stale in (0.0, 1.0, 4.0)))
        for name, make in rules.items()
    ]
    columns = ("rule", "counts exact", "up to 1 s old", "up to 4 s old")
    title = "p99 of the wait, 10 replicas at 90 % load, services of 1 s on average, spread 1: simulated"
    return table(title, columns, lines)


@titled("10 replicas at 90 % load: p99 of the wait")
def two_choices_suffice() -> Iterator[Row]:
    two, random_, least = (queues.routed(rule) for rule in (ANSWERS.two_choices, queues.at_random, queues.least))
    yield row("two choices beat one at least threefold", True, 3 * two < random_, kind="simulated")
    herd = queues.routed(queues.least, stale_s=4.0)
    yield row("least outstanding herds when counts are 4 s old", True, herd > 3 * least, kind="simulated")


@titled(
    "TTFT of the quiet tenant: real engine, simulated clock", open_rows=2, show="your queue|inside the engine|may fill"
)
def neighbours(fair: Callable | None = None) -> Iterator[Row]:
    """A tenant with a tenth of the other's requests: alone, first come first served, and fair."""
    alone = staged.ttft(staged.neighbours(noisy=0.0), 0.99, "quiet")
    crowded = staged.ttft(staged.neighbours(), 0.99, "quiet")
    shared = staged.neighbours(fair or ANSWERS.FairQueue)
    mine = staged.ttft(shared, 0.99, "quiet")
    yield row("alone: p99", None, alone, "s", kind="simulated")
    yield row("first come, first served: p99", None, crowded, "s", kind="simulated")
    yield row("your queue: p99", None, mine, "s", kind="simulated")
    yield row("    many times nearer to being alone", True, mine - alone < (crowded - alone) / 10, kind="simulated")
    yield row("    p99 of the noisy tenant", None, staged.ttft(shared, 0.99, "noisy"), "s", kind="simulated")
    own, uneven = (inside(even_steps) for even_steps in (True, False))
    yield row("inside the engine, fair: p99 / alone", None, own, kind="simulated")
    yield row("    within 1.5 times of being alone", True, own <= 1.5, kind="simulated")
    yield row("    prompts may fill a step: p99 / alone", None, uneven, kind="simulated")


def inside(even_steps: bool, seeds: Sequence[int] = range(4)) -> float:
    """How many times later than alone the quiet tenant's first token comes: p99 of the requests of several runs."""

    def p99(**options: Any) -> float:
        runs = [staged.neighbours_inside(seed=seed, **options) for seed in seeds]
        return staged.ttft(Staged([story for run in runs for story in run.stories]), 0.99, "quiet")

    return p99(even_steps=even_steps) / p99(noisy=0.0)


def affinity(ring: Callable | None = None) -> Table:
    """Hit rate, p99 and balance of each rule."""
    made = ring or ANSWERS.Ring
    names = [f"replica-{n}" for n in range(8)]
    turns = iter(range(10**9))
    own, drawn = made(names), random.Random(0)
    rules = {
        "round robin": lambda key, outstanding: names[next(turns) % len(names)],
        "ring, no bound": lambda key, outstanding: own.choose(key, outstanding, 1e9),
        "ring, bound 2": lambda key, outstanding: own.choose(key, outstanding, 2.0),
        "ring, bound 1.25": lambda key, outstanding: own.choose(key, outstanding, 1.25),
        "two choices": lambda key, outstanding: min(drawn.sample(names, 2), key=outstanding.__getitem__),
        "least outstanding": lambda key, outstanding: min(names, key=outstanding.__getitem__),
    }
    lines = []
    for name, rule in rules.items():
        found = queues.prefixes(rule)
        lines.append((name, f"{found.hits:.0%}", seconds(found.p99_s), f"{found.busiest:.2f}"))
    return table("8 replicas: simulated", ("rule", "prefix hits", "p99 of an answer", "busiest / mean"), lines)


@titled("the load rises from 2 to 10 per second, cold start 120 s: simulated", open_rows=3)
def autoscaling(wanted: Callable | None = None) -> Iterator[Row]:
    """p99 of the wait and replica hours of three policies."""
    for name, outcome in ramps(wanted).items():
        both = seconds(tail(outcome)), f"{outcome.replica_s / 3600:.1f} h"
        yield row(f"{name}: p99 of the wait, replica hours", None, both, kind="simulated")
    for cold in (60, 0):
        value = queueing.backlog(2, 1, cold)
        yield row(
            f"cold start of {cold} s, 2 per second for 1: waiting",
            value,
            queues.step_up(cold, 2, 1),
            "",
            0.03,
            kind="simulated",
        )


def ramps(wanted: Callable | None = None) -> dict:
    wanted = wanted or ANSWERS.replicas_wanted
    settings = {"capacity": 1.0, "utilization": 0.7, "drain_s": 60.0}
    return {
        "your function, not looking ahead": queues.ramp(queues.of_policy(wanted, cold_start_s=0.0, **settings)),
        "your function, a cold start ahead": queues.ramp(queues.of_policy(wanted, cold_start_s=135.0, **settings)),
        "reactive, as Kubernetes'": queues.ramp(Reactive(2.8)),
    }


def incidents() -> Table:
    """What shows each incident, before and after its cure. Real engine, simulated clock; the last is all simulated."""
    storm, budget, both = _storms()
    before, after = (staged.ttft(staged.neighbours(*queue), 0.99, "quiet") for queue in ((), (ANSWERS.FairQueue,)))
    full, kept = staged.memory(0), staged.memory(12)
    whole, cut = staged.long_prompts(None, 2048), staged.long_prompts(16, 256)
    at_once, one, pool = (tail(staged.cold_start_storm(**how)) for how in ({}, {"at_once": 1}, {"pool": 6}))

    def line(incident: str, what: str, found: float | None, cured: float | None, cure: str, text: Callable) -> tuple:
        return incident, what, *("" if value is None else text(value) for value in (found, cured)), cure

    share, ratio = "{:.0%}".format, "{:.2f}".format
    late = "answered in time, from 5 s after the burst on"
    lines = [
        line("retry storm", "attempts per request", storm.attempts / len(storm.stories), None, "", ratio),
        line("", late, answered(storm), answered(budget), "a retry budget of 10 %", share),
        line("", "", None, answered(both), "and nothing begun that was given up", share),
        line("noisy neighbour", "TTFT p99 of the quiet tenant", before, after, "a fair queue", seconds),
        line(
            "memory collapse", "tokens computed / needed", spent(full), spent(kept), "12 blocks kept free each", ratio
        ),
        line("", "TPOT p99", tpot(full), tpot(kept), "", seconds),
        line("long prompts", "TTFT p99 of short ones", *_ttft(0.99, "short", whole, cut), "chunks of 16", seconds),
        line("", "TTFT p50 of long ones", *_ttft(0.5, "long", whole, cut), "", seconds),
        line("cold-start storm", "p99 of the wait", at_once, one, "one start at a time", seconds),
        line("", "", None, pool, "a warm pool of 6", seconds),
    ]
    return table("five incidents, simulated", ("incident", "what shows it", "as it is", "with a cure", "which"), lines)


@titled("what ends incidents")
def cures() -> Iterator[Row]:
    storm, _, both = _storms()
    name = "retry storm: answered in time, from 5 s after the burst on"
    yield row(name, 0.0, answered(storm), kind="simulated")
    name = "    with a budget of 10 %, and nothing begun that was given up"
    yield row(name, 1.0, answered(both), "", 0.02, kind="simulated")
    name = "memory collapse, 12 blocks kept free per sequence: tokens computed / needed"
    yield row(name, 1.0, spent(staged.memory(12)), kind="simulated")


def _storms() -> list[Staged]:
    return [staged.retry_storm(**how) for how in ({}, {"budget": 0.1}, {"budget": 0.1, "drops_expired": True})]


def _ttft(share: float, who: str, *found: Staged) -> list[float]:
    return [staged.ttft(each, share, who) for each in found]


def answered(found: Staged) -> float:
    return staged.in_time(found, 20, 38)


def spent(found: Staged) -> float:
    return found.computed / found.needed


def tpot(found) -> float:
    return percentiles([(s.ended - s.first) / (s.arrival.params.max_tokens - 1) for s in found.stories], [0.99])[0]


def tail(outcome) -> float:
    return percentiles(outcome.waits, [0.99])[0]


def losses() -> Table:
    """Routing at low load, and one queue before all replicas."""
    lines = []
    for load in (0.3, 0.6, 0.9):
        rules = (queues.round_robin(), ANSWERS.two_choices, queues.least)
        central = queues.central(load)
        lines.append((f"{load:.0%}", *(seconds(queues.routed(rule, load)) for rule in rules), seconds(central)))
    columns = ("load", "round robin", "two choices", "least outstanding", "one queue for all")
    return table("p99 of the wait, 10 replicas, services of 1 s on average, spread 1: simulated", columns, lines)


def design() -> Table:
    """D1: the load and the p99 of the wait of n replicas, one queue for all (Erlang C); D2: backlog and pool."""
    lines = []
    for replicas in (26, 28, 30, 32):
        slots, offered = 32 * replicas, 200 * 4.0
        waits, tail_s = erlang_c(slots, offered, 4.0, 0.99)
        lines.append(
            (f"D1: {replicas} replicas", f"{offered / slots:.0%} load", f"{waits:.2%} wait", f"p99 {tail_s:.2f} s")
        )
    lag, slope = 240, 60 / 300
    lines.append(
        ("D2: missing at the end of the rise", f"{slope * lag:.0f} requests/s", f"{slope * lag / 8:.0f} replicas", "")
    )
    lines.append(("    backlog, without slack", f"{60 * lag:,} requests", "", ""))
    return table("formula", ("", "", "", ""), lines)


def erlang_c(slots: int, offered: float, service_s: float, share: float) -> tuple[float, float]:
    """(share that waits, quantile of the wait in seconds) of M/M/c. offered: arrivals per second times service."""
    blocked = 1.0
    for busy in range(1, slots + 1):
        blocked = offered * blocked / (busy + offered * blocked)
    waits = blocked / (1 - offered / slots * (1 - blocked))
    tail_s = math.log(max(1.0, waits / (1 - share))) * service_s / (slots - offered)
    return waits, tail_s


CLAIMS = (
    littles_law,
    pollaczek_khinchine,
    omission,
    admission,
    two_choices_suffice,
    neighbours,
    autoscaling,
    cures,
)
