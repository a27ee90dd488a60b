"""Lab 18's figures: TPOT over links, a hand-over behind layers, prompts among decode steps, and what sliders move."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course.lab18_distributed_serving import experiments, formulas
from course.lab18_distributed_serving.experiments import Handed, Linked, Played
from minillm.drawing import headline, log_ticks, subplots
from minillm.palette import PALETTE, look

# Pure functions of parameters, for sliders.


def hand_over_or_recompute(model: str = "70B", tp: int = 4, hit: float = 0.0) -> Figure:
    """Seconds until a prompt's keys are on the side that decodes: over three kinds of link, and computed again."""
    figure, axes = subplots(width=8.5, height=3.5)
    prompts = [2**power for power in range(8, 16)]
    for index, (name, rate) in enumerate(formulas.LINKS.items()):
        drawn = look(index)
        seconds = [formulas.handed_seconds(model, tokens, hit, tp, rate) * 1e3 for tokens in prompts]
        axes.plot(
            prompts, seconds, color=drawn.color, marker=drawn.marker, label=f"over {name}, {rate / 1e9:g} GB/s a rank"
        )
    again = [formulas.recompute_seconds(model, tokens, hit, tp) * 1e3 for tokens in prompts]
    axes.plot(prompts, again, color=PALETTE["black"], linestyle="--", marker="", label="computed again")
    axes.set(xscale="log", yscale="log", xlabel="tokens of the prompt", ylabel="ms")
    axes.set_xticks(prompts, [f"{tokens:,}" for tokens in prompts])
    axes.minorticks_off()
    log_ticks(axes.yaxis)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    cached = f", {hit:.0%} of it cached there" if hit else ""
    again = formulas.recompute_seconds(model, 4096, hit, tp)
    rates = formulas.LINKS.items()
    slower = [name for name, rate in rates if formulas.handed_seconds(model, 4096, hit, tp, rate) > again]
    message = "Handing over is quicker than computing again over all of these links"
    if slower:
        message = f"Handing over is quicker than computing again, but not over {' or '.join(slower)}"
    headline(axes, message, f"Llama 3 {model}, tp {tp} on both sides, H100{cached}; formula; at 4,096 tokens")
    return figure


def split_or_together(ttft_ms: float = 1000.0, tpot_ms: float = 40.0) -> Figure:
    """Requests per second of 16 H100 within limits on both means, by the prompt's length: split, and together."""
    figure, axes = subplots(width=8.5, height=3.5)
    found = formulas.by_prompt(ttft_ms, tpot_ms)
    for index, (name, kind) in enumerate((("prefill and decode apart", True), ("together", False))):
        drawn = look(index)
        rates = [plans[kind].rate if kind in plans else float("nan") for plans in found.values()]
        axes.plot(range(len(found)), rates, color=drawn.color, marker=drawn.marker, label=name)
    for place, plans in enumerate(found.values()):
        if True in plans:
            plan = plans[True]
            cards = plan.prefill * plan.prefill_tp * plan.prefill_pp
            label = f"{cards} + {plan.cards - cards}"
            above = False not in plans or plan.rate > plans[False].rate
            offset = (0, 8 if above else -16)
            axes.annotate(label, (place, plan.rate), xytext=offset, textcoords="offset points", ha="center", fontsize=9)
    axes.set(xticks=range(len(found)), xticklabels=[f"{tokens:,}" for tokens in found], yscale="log")
    axes.set(xlabel="tokens of a prompt; answers of 250", ylabel="requests per second")
    axes.margins(x=0.06, y=0.15)
    log_ticks(axes.yaxis)
    axes.legend(loc="upper right")
    headline(axes, "Apart, the cards sustain more, until one prompt nearly fills the limit on TTFT",
             f"Llama 3 70B, 16 H100: prefill + decode; TTFT {ttft_ms:.0f}, TPOT {tpot_ms:.0f} ms; formula")  # fmt: skip
    return figure


# Drawn from measurements.


def draw_links(found: Sequence[Linked]) -> Figure:
    """Seconds per token on two ranks by the latency of an emulated link, measured and predicted, beside one rank."""
    figure, axes = subplots(width=8.5, height=3.2)
    alone, *linked = found
    places = range(len(linked))
    one, other = look(0), look(1)
    axes.bar(places, [each.measured * 1e3 for each in linked], 0.5, color=one.color, label="two ranks, measured")
    for place, each in zip(places, linked, strict=True):
        axes.plot([place - 0.32, place + 0.32], [each.predicted * 1e3] * 2, color=PALETTE["black"], linestyle="--",
                  marker="", label="predicted" if place == 0 else None)  # fmt: skip
    axes.axhline(alone.measured * 1e3, color=other.color, label="one rank, measured")
    names = ["no link" if not each.link.latency_s else f"{each.link.latency_s * 1e3:g} ms" for each in linked]
    axes.set(xticks=places, xticklabels=names, xlabel="latency of the emulated link", ylabel="ms per token")
    axes.grid(False, axis="x")
    axes.legend(loc="upper left")
    setting = f"{experiments.DEPTH} layers whose weights take {experiments.READ_S * 1e3:.0f} ms to read, emulated"
    headline(axes, "Two ranks write a token sooner than one, unless the link is slow", setting)
    return figure


def draw_handover(found: Sequence[Handed]) -> Figure:
    """Layers of the rank that prefills and what the link carries, sent at the end and layer by layer."""
    figure, panels = subplots(len(found), 1, width=9, height=4.0, sharex=True)
    for axes, each in zip(panels, found, strict=True):
        layers, arrivals = (ledger.spans for ledger in each.ledgers)
        start, free = layers[0].start, 0.0
        for layer, (span, arrival) in enumerate(zip(layers, arrivals, strict=True)):
            posted = span.end if each is found[-1] else layers[-1].end
            begin = max(posted, free)  # the link carries one layer at a time
            _box(axes, 0.55, span.start - start, span.end - start, str(layer), 0)
            _box(axes, 0.0, begin - start, arrival.end - start, str(layer), 1)
            free = arrival.end
        axes.set_title(f"{each.name.capitalize()}: predicted {each.predicted * 1e3:.0f} ms, measured "
                       f"{each.measured * 1e3:.0f} ms")  # fmt: skip
        axes.set_yticks([0.2, 0.75], ["link", "layers"])
        axes.grid(False)
    panels[-1].set(xlabel="time (ms), link and layers emulated", xlim=(0, None))
    headline(figure, "Sent layer by layer, only the last layer's keys are waited for")
    return figure


def _box(axes: Axes, low: float, begin: float, end: float, label: str, index: int) -> None:
    """Seconds from begin to end, as a labelled box of 0.4 height."""
    drawn = look(index)
    axes.broken_barh([(begin * 1e3, (end - begin) * 1e3)], (low, 0.4), color=drawn.color, edgecolor="white")
    ink = "white" if index == 0 else "black"
    axes.text((begin + end) / 2 * 1e3, low + 0.2, label, ha="center", va="center", fontsize=9, color=ink)


def draw_interference(found: Sequence[Played], start: float = 0.15, end: float = 1.05) -> Figure:
    """Steps over time of each way to serve, and the longest gap between two tokens."""
    figure, panels = subplots(len(found), 1, width=9, height=5.0, sharex=True)
    kinds = {"decode": look(0), "prompt": look(1), "both": look(2)}
    for axes, played in zip(panels, found, strict=True):
        for card, begin, stop, kind in played.boxes:
            if stop > start and begin < end:
                low = 0.0 if card == "decode" else 0.55
                drawn = kinds[kind]
                hatch = drawn.hatch if kind != "decode" else None
                box = {"facecolor": drawn.color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
                axes.broken_barh([(begin * 1e3, (stop - begin) * 1e3)], (low, 0.45), **box)
        median, longest = experiments.spread(played.gaps)
        ttft = sum(played.first) / len(played.first)
        axes.set_title(f"{played.name.capitalize()}: gaps of {median * 1e3:.0f} ms, at most {longest * 1e3:.0f} ms; "
                       f"first tokens after {ttft * 1e3:.0f} ms")  # fmt: skip
        apart = any(card == "prefill" for card, *_ in played.boxes)
        axes.set_yticks([0.22, 0.77] if apart else [0.22], ["decode", "prefill"] if apart else ["cards"])
        axes.set(ylim=(-0.05, 1.05 if apart else 0.5))
        axes.grid(False)
    panels[-1].set(xlabel="time (ms), simulated by the roofline", xlim=(start * 1e3, end * 1e3))
    names = {"decode": "decode step", "prompt": "prompt alone", "both": "decode step with a chunk"}
    entries = [
        Patch(facecolor=drawn.color, hatch=drawn.hatch if k != "decode" else None, edgecolor="white", label=names[k])
        for k, drawn in kinds.items()
    ]
    figure.legend(handles=entries, loc="outside lower center", ncols=3)
    headline(figure, "A whole prompt stops every answer, chunks slow all of them, separate cards do neither")
    return figure


# The committed figures: how each is made, with its numbers.


def _handover() -> tuple[Figure, dict[str, Any]]:
    found = experiments.handover_on_a_clock()
    rows = [{"name": each.name, "predicted_s": each.predicted, "measured_s": each.measured} for each in found]
    return draw_handover(found), {"emulated": True, "rows": rows}


def _interference() -> tuple[Figure, dict[str, Any]]:
    found = experiments.interference()
    rows = [
        {"name": each.name, "median_gap_s": experiments.spread(each.gaps)[0], "longest_gap_s": max(each.gaps),
         "ttft_s": list(each.first)}
        for each in found
    ]  # fmt: skip
    return draw_interference(found), {"simulated": True, "rows": rows}


def _split() -> tuple[Figure, dict[str, Any]]:
    rows = [
        {"prompt": tokens, **asdict(plan)}
        for tokens, plans in formulas.by_prompt(1000.0, 40.0).items()
        for plan in plans.values()
    ]
    return split_or_together(), {"predicted": True, "rows": rows}


FIGURES = {"handover": _handover, "interference": _interference, "split": _split}
