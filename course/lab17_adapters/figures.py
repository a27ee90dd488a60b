"""Lab 17's figures: states on each card by formula, memory of a measured step, loss by rank, time by adapters."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from course.lab17_adapters import experiments, formulas
from course.lab17_adapters.experiments import NEAR, PARTS, TASKS, TOKENS, BatchCost, StepBytes, Tuned
from minillm.drawing import headline, log_ticks, subplots
from minillm.palette import PALETTE, look

NAMES = {"8B": "llama-3-8b", "70B": "llama-3-70b"}


# Pure functions of parameters, for sliders.


def states_on_a_card(model: str = "70B", rank: int = 16, cards: int = 8) -> Figure:
    """Bytes on each 80 GB card for three ways to train a Llama 3, without activations."""
    ways = formulas.fine_tunes(NAMES[model], rank, cards)
    figure, axes = subplots(width=8.5, height=3.2)
    for place, way in enumerate(reversed(ways)):
        frozen, trained = way.frozen / 1e9, way.trained / 1e9
        one, other = look(0), look(1)
        axes.barh(place, frozen, color=one.color, hatch=one.hatch, label="frozen weights" if place == 0 else None)
        axes.barh(place, trained, left=frozen, color=other.color, hatch=other.hatch,
                  label="trained numbers and their states" if place == 0 else None)  # fmt: skip
        note = f"{frozen + trained:,.1f} GB" + (f", of which {trained:.2f} are trained" if frozen else "")
        axes.annotate(
            note, (frozen + trained, place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9,
            bbox={"facecolor": axes.get_facecolor(), "edgecolor": "none", "pad": 1.5},  # the line of 80 GB stays behind
        )  # fmt: skip
    longest = max(way.states for way in ways) / 1e9
    axes.axvline(formulas.CARD / 1e9, color=PALETTE["vermillion"], linestyle=":", zorder=1)
    axes.annotate("80 GB", (formulas.CARD / 1e9, 2.42), xytext=(4, 0), textcoords="offset points", fontsize=9,
                  color=PALETTE["vermillion"], va="center")  # fmt: skip
    axes.set(yticks=range(len(ways)), yticklabels=[way.name for way in reversed(ways)], ylim=(-0.6, 2.65))
    axes.set(xlabel="GB on each card, without activations", xlim=(0, max(1.45 * longest, 1.15 * formulas.CARD / 1e9)))
    axes.grid(False, axis="y")
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.2), ncols=2)
    headline(axes, "With adapters the frozen weights are nearly all that is left",
             f"Llama 3 {model}, {cards} card{'s' if cards > 1 else ''}, by formula")  # fmt: skip
    return figure


# Drawn from measurements.


def draw_memory(found: Sequence[StepBytes]) -> Figure:
    """Bytes at the fullest moment of a step, by part as predicted, and in all as measured."""
    figure, axes = subplots(width=8.5, height=3.2)
    for place, step in enumerate(found):
        left = 0.0
        for index, part in enumerate(PARTS):
            drawn, size = look(index), step.predicted[part] / 1e6
            axes.barh(len(found) - place, size, left=left, color=drawn.color, hatch=drawn.hatch, height=0.6,
                      label=part if place == 0 else None)  # fmt: skip
            left += size
        axes.plot(step.measured / 1e6, len(found) - place, linestyle="", marker="D", markersize=8,
                  color=PALETTE["black"], label="measured, all together" if place == 0 else None)  # fmt: skip
    axes.set(yticks=range(len(found), 0, -1), yticklabels=[step.name for step in found], xlabel="MB, by formula")
    axes.set(xlim=(0, 1.08 * max(step.total for step in found) / 1e6))
    axes.grid(False, axis="y")
    axes.legend(loc="lower right", ncols=2)
    headline(axes, "LoRA drops gradients and moments, QLoRA most weights: activations are left",
             "A small model in float32, at the fullest moment of a step")  # fmt: skip
    return figure


def draw_rank(found: Sequence[Tuned]) -> Figure:
    """Loss on held-out text after equally many steps, by rank, for a near and a far task."""
    figure, axes = subplots(width=8.5, height=3.7)
    ranks = [each.rank for each in found if each.task == NEAR]
    for index, task in enumerate(TASKS):
        drawn, own = look(index), [each for each in found if each.task == task]
        axes.plot(range(1, len(own)), [each.after for each in own[:-1]], color=drawn.color, marker=drawn.marker,
                  label=f"{task}: adapters")  # fmt: skip
        axes.plot(len(own), own[-1].after, linestyle="", color=drawn.color, marker=drawn.marker, markersize=8,
                  markerfacecolor="none")  # fmt: skip
        axes.plot(0, own[0].before, linestyle="", color=drawn.color, marker=drawn.marker, markersize=8)
        axes.axhline(own[-1].after, color=drawn.color, linestyle="--", linewidth=0.9, label=f"{task}: all weights")
        for place, each in enumerate(own):
            share = (each.before - each.after) / (each.before - own[-1].after)
            if each.rank is not None:
                axes.annotate(f"{share:.0%}", (place + 1, each.after), xytext=(0, 8), textcoords="offset points",
                              ha="center", fontsize=9)  # fmt: skip
    labels = ["before", *(f"rank {rank}" for rank in ranks if rank is not None), "all weights"]
    axes.set(xticks=range(len(labels)), xticklabels=labels, ylabel="loss on held-out text (nats)")
    axes.margins(x=0.05, y=0.1)
    axes.legend(loc="upper right")
    steps, setting = experiments.STEPS, "of what training all weights gains"
    headline(axes, "Near the base rank 8 is nearly as good as rank 64", f"{steps} steps from the target; % {setting}")
    return figure


def draw_costs(found: Sequence[BatchCost]) -> Figure:
    """CPU time of a batch through one layer by the number of different adapters in it."""
    figure, axes = subplots(width=8.5, height=3.5)
    counts = [each.different for each in found]
    for index, (name, label) in enumerate(
        (("grouped", "grouped"), ("merged", "a merged weight for each adapter"), ("base", "the base alone"))
    ):  # fmt: skip
        drawn = look(index)
        times = [getattr(each, name) * 1e3 for each in found]
        axes.plot(counts, times, color=drawn.color, marker=drawn.marker, linestyle=drawn.linestyle, label=label)
    axes.set(xscale="log", yscale="log", xlabel=f"different adapters among {TOKENS} requests", ylabel="ms")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    log_ticks(axes.yaxis)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    setting = f"One layer of {experiments.LAYER} x {experiments.LAYER}, rank {experiments.RANK}, one thread"
    headline(axes, "Grouped, the base is paid for once, and each adapter adds two thin products", setting)
    return figure


# The committed figures: how each is made, with its numbers.


def _memory() -> tuple[Figure, dict[str, Any]]:
    found = experiments.step_bytes()
    return draw_memory(found), {each.name: {"predicted": each.predicted, "measured": each.measured} for each in found}


def _rank() -> tuple[Figure, dict[str, Any]]:
    found = experiments.rank_against_loss()
    rows = [
        {"task": each.task, "rank": each.rank, "numbers": each.numbers, "before": each.before, "after": each.after}
        for each in found
    ]
    return draw_rank(found), {"steps": experiments.STEPS, "runs": rows}


FIGURES = {"memory": _memory, "rank": _rank}
