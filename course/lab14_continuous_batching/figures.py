"""Lab 14's figures: batches over time, chunks against gaps, latencies under each policy, recompute against swap."""

from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from course.kit.answers import answers_of
from course.lab14_continuous_batching import experiments_engines as engines
from course.lab14_continuous_batching import figures_flight as lab_14_flight
from course.lab14_continuous_batching import formulas as predict
from course.lab14_continuous_batching.experiments import Flight
from course.shared.step_cost import H100_8B
from minillm.bench.load import skewed, uniform
from minillm.drawing import headline, log_ticks, subplots
from minillm.palette import PALETTE, look
from minillm.serve import POLICIES

ANSWERS = answers_of("14_continuous_batching")


PALE = (PALETTE["orange"], PALETTE["sky"], PALETTE["purple"], PALETTE["yellow"])  # numbers on these are black

# Pure functions of parameters, for sliders.


def batches_over_time(requests: int = 24, max_num_seqs: int = 6, sigma: float = 1.0, longest: int = 48) -> Figure:
    """Requests by place and step: static batches above, continuous below; sigma 0 makes all answers equally long."""
    lengths = _lengths(requests, sigma, longest)
    figure, panels = subplots(2, 1, width=9, height=4.2, sharex=True)
    static, continuous = predict.static_steps(lengths, max_num_seqs), predict.continuous_steps(lengths, max_num_seqs)
    places = {"static": _static(lengths, max_num_seqs), "continuous": _continuous(lengths, max_num_seqs)}
    for axes, (name, bars) in zip(panels, places.items(), strict=True):
        for request, (place, start) in enumerate(bars):
            drawn = look(request)
            axes.barh(place, lengths[request], 0.86, start, color=drawn.color, edgecolor="white", linewidth=0.8)
            if lengths[request] > static / 50:  # else there is no room for its number
                ink = "black" if drawn.color in PALE else "white"
                middle = start + lengths[request] / 2
                axes.text(middle, place, str(request), ha="center", va="center", fontsize=9, color=ink)
        steps = static if name == "static" else continuous
        axes.axvline(steps, color=PALETTE["black"], linewidth=1, linestyle=":")
        idle = 1 - sum(lengths) / (max_num_seqs * steps)
        axes.set_title(f"{name.capitalize()}: {steps} decode steps, {idle:.0%} of the places empty (numbers: requests)")
        axes.set(
            ylabel="place in the batch",
            xlim=(0, static * 1.02),
            yticks=range(max_num_seqs),
            ylim=(max_num_seqs - 0.5, -0.5),
        )
        axes.grid(False, axis="y")
    panels[-1].set_xlabel("step")
    headline(figure, "A static batch waits for its longest answer, a continuous one refills each place at once")
    return figure


def recompute_or_swap(
    link_gb_per_s: float = 16.0, kv_heads: int = 8, block_size: int = 16, copy_us: float = 0.0
) -> Figure:
    """What a preemption adds, by the tokens the sequence had: an 8B model on one H100 at its peaks (formula).

    copy_us: what starting the copy of one block costs.
    """
    cost = replace(H100_8B, link=link_gb_per_s * 1e9, kv_bytes=2 * 32 * kv_heads * 128 * 2, copy_s=copy_us * 1e-6)
    tokens = [256 * n for n in range(1, 129)]
    figure, axes = subplots(width=8, height=3.4)
    swapped = [2e3 * cost.swap(-(-n // block_size), block_size) for n in tokens]
    lines = {"recompute": [1e3 * cost.recompute(n) for n in tokens], "swap out and in": swapped}
    for index, (name, values) in enumerate(lines.items()):
        axes.plot(tokens, values, color=look(index).color, linestyle=look(index).linestyle, marker="", label=name)
    where = cost.crossover(block_size)
    if 0 < where < tokens[-1]:
        axes.axvline(where, color=PALETTE["vermillion"], linewidth=1, linestyle=":")
        note = f"equal at {where:,.0f} tokens"
        axes.annotate(note, (where, 0), xytext=(6, 6), textcoords="offset points", fontsize=9)
    axes.set(xlabel="tokens that had been computed", ylabel="added time (ms)", xlim=(0, tokens[-1]), ylim=(0, None))
    setting = f"Formula: an 8B model on one H100, link of {link_gb_per_s:g} GB/s, {kv_heads} kv heads"
    headline(axes, "The speed of the link decides whether swapping beats recomputing", setting)
    axes.legend()
    return figure


def _lengths(requests: int, sigma: float, longest: int) -> list[int]:
    make = {"prompt_tokens": 1, "vocab_size": 2, "max_tokens": longest}
    return engines.answers(skewed(requests, sigma=sigma, **make) if sigma else uniform(requests, **make))


def _static(lengths: list[int], max_num_seqs: int) -> list[tuple[int, int]]:
    start, bars = 0, []
    for first in range(0, len(lengths), max_num_seqs):
        batch = lengths[first : first + max_num_seqs]
        bars += [(place, start) for place in range(len(batch))]
        start += max(batch)
    return bars


def _continuous(lengths: list[int], max_num_seqs: int) -> list[tuple[int, int]]:
    free_at, bars = [0] * max_num_seqs, {}
    for step, batch in enumerate(ANSWERS.continuous_batches(lengths, max_num_seqs)):
        for request in batch:
            if request not in bars:
                place = min(range(max_num_seqs), key=lambda s: (free_at[s] > step, s))
                bars[request], free_at[place] = (place, step), step + lengths[request]
    return [bars[request] for request in range(len(lengths))]


def chunk_sizes() -> Figure:
    """The worst gap of 16 decoding sequences and the long prompt's TTFT by chunk size: formula and simulated."""
    return _chunks()[0]


def worst_gaps() -> Figure:
    """Worst gap of 120 requests under four policies, recomputed and swapped: share that had no longer one."""
    return draw_gaps(engines.crowds())


# Drawn from recorded runs.


def draw_stalls(rows: list[dict[str, Any]], unmixed: dict[str, float] | None = None) -> Figure:
    """Chunk size against the worst gap of decoding sequences, and the long prompt's time to first token."""
    figure, panels = subplots(1, 2, width=9, height=3.3)
    chunks = [numbers["chunk"] for numbers in rows]
    for axes, key, predicted, name in (
        (panels[0], "gap", "predicted", "worst gap of 16 sequences (ms)"),
        (panels[1], "ttft", "predicted_ttft", "the prompt's TTFT (ms)"),
    ):
        axes.plot(chunks, [1e3 * r[predicted] for r in rows], "--", marker="", color=look(1).color, label="formula")
        axes.plot(chunks, [1e3 * r[key] for r in rows], "o", color=look(0).color, label="simulated")
        axes.set_xscale("log", base=2)
        axes.set_xticks(chunks, [f"{chunk:,}" for chunk in chunks], fontsize=9)
        axes.minorticks_off()
        axes.set(xlabel="chunk (tokens)", ylabel=name, ylim=(0, None))
    if unmixed is not None:
        panels[0].set_ylim(0, 1.15e3 * unmixed["gap"])
        style_of = {"color": PALETTE["vermillion"], "marker": "X", "linestyle": "", "markersize": 8}
        panels[0].plot(512, 1e3 * unmixed["gap"], label="chunk 512, phases never mixed", **style_of)
    panels[0].set_title("A prompt of 8,192 tokens arrives while 16 decode")
    panels[1].set_title("How long the prompt itself takes")
    panels[0].legend()
    panels[1].legend()
    headline(figure, "Larger chunks make decoding sequences wait and soon hasten the prompt no more")
    return figure


def draw_gaps(flights: dict[tuple[str, str], Flight]) -> Figure:
    """Worst gap of each request under four policies, recomputed and swapped: share that had no longer one."""
    figure, panels = subplots(1, 2, width=9, height=3.6, sharex=True, sharey=True)
    for (policy, how), flight in flights.items():
        values = sorted(1e3 * history.worst_gap for history in flight.histories.values())
        share = [(place + 1) / len(values) for place in range(len(values))]
        drawn = look(list(POLICIES).index(policy))
        axes = panels[int(how == "swap")]
        axes.step(values, share, color=drawn.color, linestyle=drawn.linestyle, label=policy, marker="")
    for axes, title in zip(panels, ("Preempted and recomputed", "Preempted and swapped"), strict=True):
        axes.set(xlabel="worst gap of a request (ms)", xscale="log", ylim=(0, 1.02), title=title)
        log_ticks(axes.xaxis)
    panels[0].set_ylabel("share of requests with no longer gap")
    panels[1].legend(loc="lower right", title="preempted first")
    headline(figure, "Whom the policy preempts decides who waits (120 requests, one trace, simulated clock)")
    return figure


# Committed figures: name -> (figure, numbers).


def _flight() -> tuple[Figure, dict[str, Any]]:
    flown = lab_14_flight.flight()
    numbers = {"steps": len(flown.records), "preemptions": flown.preemptions, "computed": flown.computed}
    return lab_14_flight.view(), numbers


def _batches() -> tuple[Figure, dict[str, Any]]:
    lengths = _lengths(24, 1.0, 48)
    steps = {"static": predict.static_steps(lengths, 6), "continuous": predict.continuous_steps(lengths, 6)}
    return batches_over_time(), {"lengths": lengths, "max_num_seqs": 6, **steps}


def _chunks() -> tuple[Figure, dict[str, Any]]:
    rows, unmixed = engines.stalls(engines.CHUNKS), engines.unmixed(512)
    return draw_stalls(rows, unmixed), {"rows": rows, "unmixed": unmixed}


def _policies() -> tuple[Figure, dict[str, Any]]:
    flights = engines.crowds()
    numbers = {
        f"{policy}, {how}": {
            "preemptions": flight.preemptions,
            "recomputed_tokens": flight.computed - flight.needed,
            "swapped_blocks": flight.swapped,
            "seconds": flight.seconds,
            **{what: vars(flight.spread(what)) for what in ("ttft", "tpot", "worst_gap")},
        }
        for (policy, how), flight in flights.items()
    }
    return draw_gaps(flights), numbers


FIGURES = {"flight": _flight, "seats": _batches, "chunks": _chunks, "policies": _policies}
