"""Lab 19's figures: parts of a latency by rate, the knee, routing with old counts, a ramp and a retry storm."""

from typing import Any

from matplotlib.figure import Figure

from course.kit.answers import answers_of
from course.lab19_serving_fleet import experiments, incidents, queues, receipts
from minillm.drawing import headline, subplots
from minillm.palette import PALETTE, look
from minillm.predict.serving import queueing
from minillm.serve.requests.summary import percentiles

ANSWERS = answers_of("19_serving_fleet")
RATES = (4, 8, 12, 14, 16)
PARTS = ("queue", "prefill", "decode")
STALE = (0.0, 0.5, 1.0, 2.0, 4.0)


def latency_parts() -> Figure:
    """Bars by rate: seconds in the queue, in prefill and in decode, at p50 and p99; the queue grows last and most."""
    return _parts()[0]


def _parts() -> tuple[Figure, dict[str, Any]]:
    figure, panels = subplots(1, 2, width=9, height=3.4, sharey=True)
    numbers: dict[str, Any] = {"requests_per_s": RATES}
    for axes, share, name in ((panels[0], 0.5, "p50"), (panels[1], 0.99, "p99")):
        values = [
            [
                percentiles(part, [share])[0]
                for part in zip(*(s.parts for s in experiments.parts(r).stories), strict=True)
            ]
            for r in RATES
        ]
        numbers[name] = {part: [each[place] for each in values] for place, part in enumerate(PARTS)}
        for place, part in enumerate(PARTS):
            hatch = ("//", "..", "")[place]
            at = [index + 0.26 * (place - 1) for index in range(len(RATES))]
            axes.bar(at, numbers[name][part], 0.24, color=look(place).color, hatch=hatch, edgecolor="white", label=part)
        axes.set_xticks(range(len(RATES)), RATES)
        axes.set(xlabel="requests/s", title=f"{name} of each part")
    panels[0].set_ylabel("seconds")
    panels[0].legend()
    headline(
        figure,
        "The tail is the queue",
        "Real engine, simulated clock: 8 sequences at once, 64 prompt and 16 answer tokens",
    )
    return figure, numbers


def knee(cv: float = 1.0, service_ms: int = 300) -> Figure:
    """Mean wait against load for one server: nearly flat to 60 %, then a wall; the spread of services multiplies it."""
    figure, axes = subplots(width=8, height=3.4)
    service_s, loads = service_ms / 1e3, [n / 100 for n in range(1, 97)]
    for place, spread in enumerate(sorted({0.0, cv, 2.0})):
        waits = [queueing.mean_wait_any_service(load / service_s, service_s, spread) for load in loads]
        axes.plot(
            [100 * load for load in loads], waits, "--", marker="", color=look(place).color, label=f"spread {spread:g}"
        )
    axes.axhline(service_s, color=PALETTE["black"], linewidth=1, linestyle=":", label="one service")
    axes.set(xlabel="load (%)", ylabel="mean wait (s)", ylim=(0, 20 * service_s), xlim=(0, 100))
    axes.legend(title="services' standard deviation / mean", loc="upper left")
    headline(
        axes,
        "Waits are short until they are not",
        f"Formula (Pollaczek, Khinchine): services of {service_ms} ms, random arrivals",
    )
    return figure


def routing() -> Figure:
    """p99 of the wait against the age of the counts: least outstanding is best with exact ones, not with old ones."""
    return _routing()[0]


def _routing() -> tuple[Figure, dict[str, Any]]:
    rules = {
        "random": lambda: queues.at_random,
        "round robin": queues.round_robin,
        "two choices": lambda: ANSWERS.two_choices,
        "least outstanding": lambda: queues.least,
    }
    figure, axes = subplots(width=8, height=3.3)
    numbers: dict[str, Any] = {"counts_old_s": STALE}
    for place, (name, make) in enumerate(rules.items()):
        numbers[name] = [queues.routed(make(), stale_s=stale) for stale in STALE]
        drawn = look(place)
        axes.plot(STALE, numbers[name], color=drawn.color, marker=drawn.marker, linestyle=drawn.linestyle, label=name)
    axes.set(xlabel="counts are up to so old (s)", ylabel="p99 of the wait (s)", ylim=(0, None))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    setting = "10 replicas at 90 % load, services of 1 s on average, spread 1"
    headline(axes, "Two choices need no fresh counts", f"Simulated: {setting}")
    return figure, numbers


def ramps() -> Figure:
    """Replicas that are ready and requests that wait, over half an hour in which the load rises fivefold, by policy."""
    return _ramps()[0]


def _ramps() -> tuple[Figure, dict[str, Any]]:
    figure, panels = subplots(2, 1, width=9, height=4.6, sharex=True)
    numbers: dict[str, Any] = {}
    for place, (name, outcome) in enumerate(receipts.ramps().items()):
        minutes = [sample.at / 60 for sample in outcome.samples]
        ready, waiting = ([getattr(s, what) for s in outcome.samples] for what in ("ready", "waiting"))
        numbers[name] = {"minutes": minutes, "ready": ready, "waiting": waiting}
        width = (5, 2, 2)[place]  # the first is nearly the third: it shows on both sides of it
        style = {"color": look(place).color, "linestyle": look(place).linestyle, "linewidth": width}
        style |= {"marker": "", "label": name}
        panels[0].plot(minutes, waiting, **style)
        panels[1].step(minutes, ready, where="post", **style)
    needed = [min(10.0, max(2.0, 2 + 8 * (60 * m - 300) / 600)) for m in minutes]
    panels[1].plot(minutes, needed, color=PALETTE["black"], linewidth=1, linestyle=":", marker="", label="requests/s")
    panels[0].set_ylabel("requests waiting")
    panels[1].set(xlabel="minutes", ylabel="replicas ready")
    panels[1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    headline(
        figure,
        "A replica is ordered now for a load that comes later",
        "Simulated: cold start 120 s, a replica serves 1 request/s",
    )
    return figure, numbers


def storm() -> Figure:
    """Share of requests answered in time, by when they were due: with retries the collapse outlasts its burst."""
    return _storm()[0]


def _storm() -> tuple[Figure, dict[str, Any]]:
    figure, axes = subplots(width=8, height=3.3)
    cases = {
        "3 retries": {},
        "no retries": {"retries": 0},
        "3 retries, budget 10 %": {"budget": 0.1},
        "the same, nothing begun that was given up": {"budget": 0.1, "drops_expired": True},
    }
    starts = range(0, 38, 2)
    numbers: dict[str, Any] = {"due_s": [start + 1 for start in starts]}
    for place, (name, options) in enumerate(cases.items()):
        found = incidents.retry_storm(**options)
        numbers[name] = [incidents.in_time(found, start, start + 2) for start in starts]
        drawn = look(place)
        values = [100 * each for each in numbers[name]]
        axes.plot(
            numbers["due_s"], values, color=drawn.color, marker=drawn.marker, linestyle=drawn.linestyle, label=name
        )
    axes.axvspan(10, 15, color=PALETTE["black"], alpha=0.12, linewidth=0)
    axes.annotate("burst", (12.5, 102), ha="center", fontsize=9)
    axes.set(xlabel="request was due (s)", ylabel="answered in time (%)", ylim=(-4, 112))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    headline(
        axes,
        "Retries keep a collapse alive",
        "Real engine, simulated clock: load 60 %, in the burst 210 %; clients wait 1 s",
    )
    return figure, numbers


FIGURES = {"parts": _parts, "routing": _routing, "ramps": _ramps, "storm": _storm}
