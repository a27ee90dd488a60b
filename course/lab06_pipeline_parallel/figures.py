"""Lab 06's figures: the plan above the measurement, idle shares of all schedules; and two with sliders."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from course.lab06_pipeline_parallel import experiments, pipeline_picture
from course.lab06_pipeline_parallel.experiments import FORWARD_S, Job, PipelineRecord
from minillm.drawing import headline, subplots
from minillm.palette import TEXT, look
from minillm.parallel.pipeline_parallel.schedule.schedules import SCHEDULES, Durations, pipedream, simulate
from minillm.predict.training import pipeline as predict

EVERY = tuple(SCHEDULES)


# Pure functions of parameters, for sliders.


def schedule_on_a_clock(
    schedule: str = "1f1b", stages: int = 4, microbatches: int = 8, backward: float = 2.0, message: float = 0.0
) -> Figure:
    """A pipeline schedule as the simulator sees it: one row per rank, one bar per action, idle time grey.

    backward: a whole one, in forwards; half of it is for the weights. message: from one rank to the next, in forwards.
    """
    make = {**SCHEDULES, "pipedream": pipedream}[schedule]
    durations = Durations(F=1, B=backward, W=backward / 2, message=message)
    line = simulate(make(stages, microbatches), durations)
    peaks = ", ".join(f"{peak:g}" for peak in line.peak_in_flight)
    title = f"{schedule}, {stages} stages, {microbatches} microbatches: idle {line.idle_share:.1%}, in flight {peaks}"
    return pipeline_picture.draw(line, title=title)


def idle_by_microbatches(stages: int = 4, most_idle: float = 0.25) -> Figure:
    """Share of a step that stages idle, by microbatches: GPipe and 1F1B, interleaved, zero-bubble, and (n-1)/M."""
    counts = [m * stages for m in (1, 2, 3, 4, 6, 8)]
    figure, axes = subplots(width=8, height=3.6)
    every = list(range(1, 8 * stages + 1))
    lines = {
        "GPipe and 1F1B: (n-1)/(M+n-1)": (every, [predict.idle_share(stages, m) for m in every], "-"),
        "interleaved, 2 chunks: (n-1)/(2M+n-1)": (counts, [predict.idle_share(stages, m, 2) for m in counts], "-"),
        "zero bubble (ZB-H1), F = I = W": (counts, [_zero_bubble(stages, m) for m in counts], "-"),
        "idle over useful time: (n-1)/M": (every, [predict.overhead(stages, m) for m in every], ":"),
    }
    for index, (name, (x, y, how)) in enumerate(lines.items()):
        drawn = look(index)
        marker = drawn.marker if x is counts else ""
        axes.plot(x, y, color=drawn.color, marker=marker, linestyle=how, label=name)
    needed = predict.microbatches_needed(stages, most_idle)
    axes.axhline(most_idle, color=TEXT, linewidth=1, linestyle="--")
    axes.axvline(needed, color=TEXT, linewidth=1, linestyle="--")
    axes.annotate(f"{needed} microbatches", (needed, 0), xytext=(4, 4), textcoords="offset points", fontsize=9)
    axes.set(xlabel="microbatches M", ylim=(0, 1.05), xlim=(0, 8 * stages))
    axes.set_ylabel("idle share of a step (dotted: of useful time)")
    axes.set_title(f"GPipe and 1F1B, {stages} stages: idle at most {most_idle:.0%} from {needed} microbatches on")
    axes.legend()
    return figure


def _zero_bubble(stages: int, microbatches: int) -> float:
    idle = predict.zero_bubble_idle(stages, 1, 2, 1)
    return idle / (3 * microbatches + idle)


# Drawn from measurements.


def draw_bars(job: Job, ranks: list[PipelineRecord]) -> Figure:
    """Every action of a step, rank by rank: planned bars (hollow) above measured ones (solid)."""
    line = experiments.measured(job, ranks)
    plan = experiments.planned(job)
    shape = f"{job.schedule}, {job.stages} stages, {job.microbatches} microbatches, devices emulated"
    figure = pipeline_picture.draw(plan, line, unit="s")
    times = f"planned {plan.makespan * 1e3:.0f} ms, measured {line.makespan * 1e3:.0f} ms"
    headline(figure.axes[0], "The ranks keep to the plan, bar by bar", f"{shape}: {times}")
    return figure


def draw_idle(rows: list[dict[str, Any]], stages: int, microbatches: int) -> Figure:
    """Idle share of every schedule and its time of a step, predicted beside measured, on emulated devices."""
    chosen = [r for r in rows if (r["stages"], r["microbatches"]) == (stages, microbatches)]
    names = [numbers["schedule"].replace("_", " ").replace("bubble v", "bubble V") for numbers in chosen]
    figure, panels = subplots(1, 2, width=9, height=3.9, sharey=True)
    for axes, key, scale, name in (
        (panels[0], "idle", 100, "idle share of the step (%)"),
        (panels[1], "s", 1e3, "time of a step (ms)"),
    ):
        for place, numbers in enumerate(chosen):
            planned, found = (scale * numbers[f"{when}_{key}"] for when in ("planned", "measured"))
            axes.barh(place - 0.2, planned, 0.38, fill=False, hatch="//", edgecolor=look(1).color)
            bar = axes.barh(place + 0.2, found, 0.38, color=look(0).color)
            axes.bar_label(bar, fmt=" %.0f", fontsize=9)
        axes.set_yticks(range(len(chosen)), names)
        axes.set(xlabel=name, ylim=(len(chosen) - 0.4, -0.6))
        axes.margins(x=0.12)
        axes.grid(False, axis="y")
    panels[0].set_title(f"{stages} stages, {microbatches} microbatches, devices emulated")
    entries = [
        Patch(fill=False, hatch="//", edgecolor=look(1).color, label="predicted by the simulator"),
        Patch(color=look(0).color, label="measured on real ranks"),
    ]
    figure.legend(handles=entries, loc="outside lower center", ncols=2, frameon=False)
    headline(figure, "1F1B idles as long as GPipe; interleaving, zero bubble and DualPipe idle less")
    return figure


def draw_sweep(rows: list[dict[str, Any]]) -> Figure:
    """Idle share by microbatches: (n-1)/(M+n-1) and what 1F1B measured, with the other formula for comparison."""
    figure, axes = subplots(width=9, height=3.6)
    formula = {"color": TEXT, "linestyle": "--", "label": "formula: (n-1)/(M+n-1)"}
    wrong = {"color": TEXT, "linestyle": ":", "label": "(n-1)/M: over useful time, not of the step"}
    entries = []
    for index, stages in enumerate(sorted({r["stages"] for r in rows}, reverse=True)):
        own = sorted((r for r in rows if r["stages"] == stages), key=lambda r: r["microbatches"])
        x, drawn = [r["microbatches"] for r in own], look(index)
        color = {"color": drawn.color, "marker": ""}
        axes.plot(x, [predict.idle_share(stages, m) for m in x], **formula | color)
        axes.plot(x, [predict.overhead(stages, m) for m in x], **wrong | color)
        found, label = [r["measured_idle"] for r in own], f"n = {stages} stages, measured"
        entries += axes.plot(x, found, color=drawn.color, marker=drawn.marker, linestyle="", label=label)
    entries += [Line2D([], [], **formula), Line2D([], [], **wrong)]
    axes.set(xlabel="microbatches M", ylabel="idle share", yscale="log")
    axes.set_yticks([0.05, 0.1, 0.2, 0.5, 1, 2, 5], ["5%", "10%", "20%", "50%", "100%", "200%", "500%"])
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({r["microbatches"] for r in rows}), sorted({r["microbatches"] for r in rows}))
    axes.minorticks_off()
    headline(axes, "More microbatches, less idle: 1F1B idles (n-1)/(M+n-1) of a step", "Devices emulated")
    figure.legend(handles=entries, loc="outside right center")
    return figure


# Committed figures.


def _figure_bars() -> tuple[Figure, dict[str, Any]]:
    job = Job("1f1b")
    found = experiments.run([job])
    return draw_bars(job, found[job]), {"rows": experiments.rows_of(found)}


def _figure_idle() -> tuple[Figure, dict[str, Any]]:
    rows = experiments.rows_of(experiments.run([Job(name) for name in EVERY]))
    return draw_idle(rows, 4, 8), {"rows": rows}


def _figure_sweep() -> tuple[Figure, dict[str, Any]]:
    jobs = [Job("1f1b", n, m, (FORWARD_S,) * n) for n in (2, 4, 8) for m in (1, 2, 4, 8, 16)]
    rows = experiments.rows_of(experiments.run(jobs))
    return draw_sweep(rows), {"rows": rows}


FIGURES = {"bars": _figure_bars, "idle": _figure_idle, "sweep": _figure_sweep}
