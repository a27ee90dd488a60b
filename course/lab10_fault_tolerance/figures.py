"""Lab 10's figures: goodput by interval and by GPUs, a run that was killed, learning rates; one with sliders."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course.lab10_fault_tolerance import experiments, experiments_breaks
from course.lab10_fault_tolerance.experiments import MTBF_S, RESTART_S, SAVE_S, ElasticRun
from minillm.drawing import headline, subplots
from minillm.palette import PALETTE, look
from minillm.predict import faults

USES = {  # color, hatch
    "useful": (PALETTE["blue"], ""),
    "saving": (PALETTE["green"], ".."),
    "lost": (PALETTE["vermillion"], "xx"),
    "restarting": (PALETTE["orange"], "//"),
}


def goodput_by_gpus(save_s: int = 60, restart_min: int = 10) -> Figure:
    """Useful share of the time by the number of GPUs, each failing as often as Meta's (formula)."""
    gpus = [2**power for power in range(6, 18)]
    mtbfs = [faults.job_mtbf(faults.LLAMA3_GPU_MTBF_S, count) for count in gpus]
    restart = 60.0 * restart_min
    curves = {
        f"a save of {save_s} s at Daly's interval": [faults.best_goodput(save_s, restart, mtbf) for mtbf in mtbfs],
        f"a save of {save_s} s every hour": [faults.goodput(3600, save_s, restart, mtbf) for mtbf in mtbfs],
        "a stall of 1 s (background) every 5 min": [
            faults.goodput(300, 1, restart, mtbf, write_s=save_s) for mtbf in mtbfs
        ],
    }
    figure, axes = subplots(width=8, height=3.6)
    for place, (name, values) in enumerate(curves.items()):
        drawn = look(place)
        axes.plot(gpus, values, color=drawn.color, marker=drawn.marker, linestyle=drawn.linestyle, label=name)
    meta = (faults.LLAMA3_GPUS, faults.LLAMA3_GOODPUT)
    axes.plot(*meta, "*", color=PALETTE["black"], markersize=13, label="Llama 3: reported, more than 90 %")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="GPUs", ylabel="useful share of the time", ylim=(0, 1.03))
    axes.set_xticks(gpus[::2], [f"{count:,}" for count in gpus[::2]])
    setting = f"Formula: one GPU fails every 5.8 years, a restart takes {restart_min} min"
    headline(axes, "The more GPUs, the more of their time goes to saves and failures", setting)
    axes.legend(loc="lower left")
    return figure


def draw_intervals(found: dict[float, dict[str, float]]) -> Figure:
    """Where the time of a simulated job goes, by the interval between saves; dashed: the formula's wasted share."""
    figure, axes = subplots(width=8, height=3.6)
    minutes = [interval / 60 for interval in found]
    shares = {name: [spent[name] / sum(spent.values()) for spent in found.values()] for name in USES}
    base = [0.0] * len(minutes)
    for name in ("saving", "lost", "restarting"):
        top = [low + share for low, share in zip(base, shares[name], strict=True)]
        color, hatch = USES[name]
        axes.fill_between(minutes, base, top, color=color, hatch=hatch, edgecolor="white", alpha=0.85, label=name)
        base = top
    wasted = [1 - faults.goodput(interval, SAVE_S, RESTART_S, MTBF_S) for interval in found]
    axes.plot(minutes, wasted, "--", color=PALETTE["black"], label="all of it, by formula")
    best = faults.young_interval(SAVE_S, MTBF_S) / 60
    axes.axvline(best, ymax=0.7, color=PALETTE["black"], linestyle=":", label=f"Young: {best:.0f} min")
    axes.set_xscale("log")
    axes.set(xlabel="time between saves (min)", ylabel="share of the time", ylim=(0, 1.4 * max(base)))
    ticks = (2, 5, 10, 20, 50, 100)
    axes.set_xticks(ticks, ticks)
    axes.minorticks_off()
    often = f"a save takes {SAVE_S:.0f} s, a failure comes every {MTBF_S / 3600:.0f} h"
    setting = f"Simulated: time that no training uses; {often}"
    headline(axes, "Saving too often wastes time, and so does saving too rarely", setting)
    axes.legend(loc="upper left", ncols=3)
    return figure


def draw_run(found: ElasticRun, whole: ElasticRun) -> Figure:
    """A run whose ranks are killed: its loss over that of an undisturbed run, and what each attempt did."""
    figure, (loss, bars) = subplots(2, 1, width=9, height=5.2, gridspec_kw={"height_ratios": [1.3, 1]})
    loss.plot(whole.losses, color=PALETTE["sky"], linewidth=5, alpha=0.6, label="undisturbed, 1 rank")
    for place, ranks in enumerate(dict.fromkeys(found.ranks)):
        steps = [step for step, count in enumerate(found.ranks) if count == ranks]
        drawn = look(place)
        values = [found.losses[step] for step in steps]
        loss.plot(steps, values, drawn.marker, color=PALETTE["black"], markersize=4, label=f"killed: {_ranks(ranks)}")
    for step, *_ in experiments.KILLS:
        loss.axvline(step - 0.5, color=PALETTE["vermillion"], linestyle="--", linewidth=1)
    loss.set(xlabel="step", ylabel="loss (nats per token)")
    killed = "A rank is killed at each dashed line; the others go on from the last checkpoint"
    headline(loss, "After each kill the run goes on along the loss of an undisturbed one", killed)
    loss.legend()
    _attempts(bars, found)
    return figure


def spans(events: list[dict[str, Any]]) -> list[list[tuple[str, float, float]]]:
    """By attempt: (use, from, to) in seconds since the beginning, from the rows of time.jsonl."""
    zero, found, again, last = events[0]["at"], [], set(), None
    for row in reversed(events):  # a step that a later attempt made again is lost
        if row["event"] == "step":
            row["lost"] = row["step"] in again
            again.add(row["step"])
    for row in events:
        if row["event"] == "begin":
            found.append([])
            continue
        start, end = row["at"] - row["seconds"] - zero, row["at"] - zero
        if not found[-1] and last is not None:
            found[-1].append(("restarting", last, start))
        if row["event"] in ("step", "save"):
            found[-1].append(("saving" if row["event"] == "save" else "lost" if row["lost"] else "useful", start, end))
        last = end
    return found


def _attempts(axes: Axes, run: ElasticRun) -> None:
    for attempt, done in enumerate(spans([dict(event) for event in run.events])):
        for use, start, end in done:
            color, hatch = USES[use]
            axes.broken_barh(
                [(start, end - start)], (attempt - 0.35, 0.7), facecolor=color, hatch=hatch, edgecolor="white"
            )
    axes.set(xlabel="time (s)", ylim=(len(run.killed) + 0.6, -0.6))
    axes.set_yticks(
        range(len(run.killed) + 1), [_ranks(experiments.RANKS - place) for place in range(len(run.killed) + 1)]
    )
    axes.set_title(f"{run.spent}")
    axes.grid(False, axis="y")
    entries = [
        Patch(facecolor=color, hatch=hatch, edgecolor="white", label=use) for use, (color, hatch) in USES.items()
    ]
    axes.legend(handles=entries, loc="lower left")


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def draw_schedules() -> Figure:
    """The learning rate by step: as meant, and two ways to get it wrong (computed)."""
    figure, axes = subplots(width=8, height=2.8)
    for place, (name, values) in enumerate(experiments_breaks.schedules().items()):
        drawn = look(place)
        wide = 6 if place == 0 else 1.5  # the right one lies under the others
        how = {"markevery": 40, "marker": drawn.marker, "linestyle": drawn.linestyle, "linewidth": wide}
        axes.plot(values, color=drawn.color, label=name, **how)
    axes.set(xlabel="step", ylabel="learning rate / highest")
    headline(axes, "Two ways to get a schedule wrong", "Computed: a cosine of 400 steps, 4 microbatches in each")
    axes.legend()
    return figure


# Committed figures.


def _figure_intervals() -> tuple[Figure, dict[str, Any]]:
    found = experiments.intervals()
    return draw_intervals(found), {
        "simulated": True,
        "seconds": {f"{each:.0f}": spent for each, spent in found.items()},
    }


def _figure_run() -> tuple[Figure, dict[str, Any]]:
    whole, found = experiments.run(()), experiments.run()
    about = {"losses": found.losses, "undisturbed": whole.losses, "ranks": found.ranks, "spent": found.spent.to_json()}
    return draw_run(found, whole), about


def _figure_gpus() -> tuple[Figure, dict[str, Any]]:
    return goodput_by_gpus(), {"gpu_mtbf_s": faults.LLAMA3_GPU_MTBF_S, "llama3_goodput": faults.LLAMA3_GOODPUT}


FIGURES = {"intervals": _figure_intervals, "killed": _figure_run, "gpus": _figure_gpus}
