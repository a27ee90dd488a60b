"""Lab 15's figures: what is accepted, how many draft tokens pay, what each proposer brings and costs."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from course.lab15_speculative_decoding import experiments, experiments_breaks
from course.lab15_speculative_decoding import experiments_runs as runs
from course.lab15_speculative_decoding.experiments import Compared
from course.lab15_speculative_decoding.experiments_runs import Sweep
from minillm.drawing import bars, headline, lines, log_ticks, subplots
from minillm.palette import PALETTE, look
from minillm.predict.serving import speculation as predict

TEMPERATURES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
KS = (1, 2, 4, 6)
EPSILONS = (0.01, 0.03, 0.09, 0.2, 0.4, 0.7)


# Pure functions of parameters, for sliders.


def overlap(agreement: float = 0.6, temperature: float = 1.0, seed: int = 3) -> Figure:
    """Two distributions over 8 tokens: what they share is accepted; where p is larger, the excess is the residual."""
    draw = np.random.default_rng(seed)
    ours, other = draw.normal(0, 1.6, 8), draw.normal(0, 1.6, 8)
    scores = np.stack([ours, agreement * ours + (1 - agreement) * other]) / temperature
    p, q = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    both, places = np.minimum(p, q), np.arange(8)
    figure, axes = subplots(width=8, height=3.3)
    axes.bar(places, both, color=look(0).color, label="min(p, q): accepted")
    axes.bar(places, p - both, bottom=both, color=PALETTE["orange"], hatch="//", label="p - q: from the residual")
    axes.bar(
        places,
        q - both,
        bottom=both,
        facecolor="white",
        edgecolor=PALETTE["vermillion"],
        hatch="xx",
        label="q - p: drafted, rejected",
    )
    axes.set_xticks(places, [f"token {i}" for i in places], fontsize=9)
    axes.set(ylabel="probability", ylim=(0, max(p.max(), q.max()) * 1.15))
    axes.set_title(f"Accepted: Σ min(p, q) = {both.sum():.2f}; total variation {1 - both.sum():.2f}")
    axes.legend()
    return figure


def speedup_by_k(alpha: float = 0.8, c: float = 0.1, verify: float = 1.0) -> Figure:
    """Speedup by number of draft tokens, its optimum, and the common claim K · acceptance · (1 - overhead)."""
    ks = list(range(0, 17))
    values = [predict.speedup(alpha, c, k, verify=verify if k else 1.0) for k in ks]
    best = int(np.argmax(values))
    figure, axes = subplots(width=8, height=3.4)
    axes.plot(ks, values, color=look(0).color, marker="o", label="(1 - αᴷ⁺¹) / ((1 - α)(cK + 1))")
    axes.plot(ks, [k * alpha * (1 - c) for k in ks], color=look(3).color, linestyle=":", label="K · α · (1 - c)")
    axes.axhline(1, color=PALETTE["black"], linewidth=0.8)
    axes.annotate(
        f"best: K = {best}, {values[best]:.2f} times",
        (best, values[best]),
        xytext=(4, 10),
        textcoords="offset points",
        fontsize=9,
    )
    axes.set(xlabel="draft tokens per pass, K", ylabel="speedup", ylim=(0, max(4.0, 1.3 * max(values))))
    setting = f"α = {alpha:g}; in plain passes: a draft token costs {c:g}, checking {verify:g}"
    headline(axes, "More draft tokens pay only up to a point", setting)
    axes.legend(loc="upper right")
    return figure


def typical_acceptance() -> Figure:
    """Typical acceptance by its threshold: draft tokens accepted, and the distance from the target's distribution."""
    return _typical()[0]


# Drawn from measurements.


def draw_alpha(shares: dict[str, list[float]], temperatures=TEMPERATURES) -> Figure:
    """Share of draft tokens accepted by temperature: sampled ones, and the likeliest token."""
    figure = lines(
        temperatures,
        shares,
        x_axis=("temperature of the request", ""),
        y_axis=("accepted", ""),
        ax=subplots(width=8, height=3.5)[1],
    )
    figure.axes[0].set_ylim(0, 1)
    setting = "On held-out text; of sampled draft tokens Σ min(p, q) is accepted, computed without sampling"
    headline(
        figure.axes[0], "At high temperature sampled draft tokens stay accepted, the likeliest ones do not", setting
    )
    return figure


def draw_sweep(found: Sweep) -> Figure:
    """Tokens per pass and speedup by K: measured, and by the formulas."""
    ks = list(found.runs)
    figure, (left, right) = subplots(1, 2, width=9, height=3.6)
    lines(
        ks,
        {"tokens per pass": [found.runs[k].run.tokens_per_pass for k in ks]},
        {"tokens per pass": [predict.tokens_per_pass(found.alpha[:k]) for k in ks]},
        x_axis=("draft tokens per pass, K", ""),
        y_axis=("tokens per pass", ""),
        title="Every accepted draft token saves a pass …",
        ax=left,
    )
    lines(
        ks,
        {"speedup": [found.runs[k].speedup for k in ks]},
        {"speedup": [found.predicted(k) for k in ks]},
        x_axis=("draft tokens per pass, K", ""),
        y_axis=("speedup", ""),
        title="… and costs a pass of the draft",
        ax=right,
    )
    textbook = [found.predicted(k, textbook=True) for k in ks]
    right.plot(ks, textbook, color=look(1).color, linestyle=":", marker="", label="if K + 1 tokens cost as one")
    right.axhline(1, color=PALETTE["black"], linewidth=0.8)
    right.set_ylim(0, 1.1 * max([*textbook, *(each.speedup for each in found.runs.values())]))
    left.set_ylim(0.9, None)
    right.legend()
    return figure


def draw_table(found: dict[str, Compared | None]) -> Figure:
    """Tokens per pass and speedup of every proposer: measured, and by formula from the run's acceptance and costs."""
    present = {name: each for name, each in found.items() if each is not None}
    names, values = list(present), list(present.values())
    figure, (left, right) = subplots(1, 2, width=9, height=3.4)
    names = [name.replace("-", "-\n") for name in names]
    for axes, what, predicted, measured in (
        (
            left,
            "tokens per pass",
            [experiments.formula(e.run) for e in values],
            [e.run.tokens_per_pass for e in values],
        ),
        (right, "speedup", [e.predicted for e in values], [e.speedup for e in values]),
    ):
        bars(names, predicted, measured, quantity=what, unit="", ax=axes)
        axes.axhline(1, color=PALETTE["black"], linewidth=0.8)
        axes.tick_params(axis="x", labelsize=9)
        axes.margins(y=0.25)
        axes.legend(loc="upper right", ncols=2)
    left.set_title("Tokens per pass of the target")
    right.set_title("Speedup")
    headline(figure, "A proposer pays if its draft tokens are right often enough for what they cost")
    return figure


def draw_typical(rows: list[tuple[float, float, float]], exact: float) -> Figure:
    """Typical acceptance: draft tokens accepted and distance from the target's distribution, by its threshold."""
    figure, axes = subplots(width=8, height=3.4)
    for index, (name, place) in enumerate((("draft tokens accepted", 1), ("total variation of a token", 2))):
        drawn = look(index)
        values = [row[place] for row in rows]
        axes.plot([row[0] for row in rows], values, color=drawn.color, marker=drawn.marker, label=name)
    axes.axhline(exact, color=look(0).color, linestyle="--", label="accepted by the exact rule, total variation 0")
    axes.set(xlabel="threshold ε", ylabel="share accepted; total variation", ylim=(0, 1), xscale="log")
    log_ticks(axes.xaxis)
    headline(axes, "Typical acceptance samples another distribution at all these thresholds", "Temperature 1")
    axes.legend()
    return figure


# The committed figures: how each is made, with its numbers.


def _acceptance() -> tuple[Figure, dict[str, Any]]:
    shares = experiments.alpha_by_temperature(TEMPERATURES)
    return draw_alpha(shares), {"temperatures": TEMPERATURES, "accepted": shares}


def _sweep() -> tuple[Figure, dict[str, Any]]:
    found = runs.sweep(KS, count=6)
    rows = [
        {"k": k, "tokens_per_pass": each.run.tokens_per_pass, "speedup": each.speedup, "predicted": found.predicted(k)}
        for k, each in found.runs.items()
    ]
    return draw_sweep(found), {"c": found.c, "verify": found.verify, "alpha": found.alpha, "rows": rows}


def _proposers() -> tuple[Figure, dict[str, Any]]:
    found = runs.table(count=6)
    rows = {
        name: {"k": runs.K[name], "c": each.c}
        | {"tokens_per_pass": each.run.tokens_per_pass, "tokens_predicted": experiments.formula(each.run)}
        | {"speedup": each.speedup, "predicted": each.predicted, "same_tokens": each.same}
        for name, each in found.items()
        if each is not None
    }
    return draw_table(found), rows


def _typical() -> tuple[Figure, dict[str, Any]]:
    p, q = experiments.distributions(experiments.logits_of("code"), 1.0)
    rows = [(epsilon, *experiments_breaks.typical(p, q, epsilon)) for epsilon in EPSILONS]
    exact = float(experiments.overlap(p, q).mean())
    return draw_typical(rows, exact), {"rows": rows, "exact": exact}


FIGURES = {"acceptance": _acceptance, "sweep": _sweep, "proposers": _proposers, "typical": _typical}
