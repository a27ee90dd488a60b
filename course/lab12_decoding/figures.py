"""Lab 12's figures: passes under the roof, tokens by batch, a token with and without a cache, caches, patients."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter

from course.lab12_decoding import experiments, experiments_breaks
from course.lab12_decoding import formulas as predict
from course.lab12_decoding.experiments import GPUS, MODELS, Point, Roof
from minillm.drawing import headline, log_ticks, subplots
from minillm.palette import PALETTE, look
from minillm.predict.model import kv_bytes_per_token, parameters
from minillm.predict.roofline import attainable

PLAIN = {"edgecolor": "white", "linewidth": 0.5}

# Pure functions of parameters, for sliders.


def a_sequence(prompt: int = 5, answer: int = 4) -> Figure:
    """Passes of an answer: which tokens go in, which keys and values they meet, and which are written."""
    figure, axes = subplots(width=8.5, height=0.55 * answer + 1.2)
    for step in range(answer):
        start, end = (0, prompt) if step == 0 else (prompt + step - 1, prompt + step)
        for place in range(prompt + answer):
            new, old = start <= place < end, place < start
            face = PALETTE["orange"] if new else PALETTE["blue"] if old else "#FFFFFF"
            hatch = "//" if new else ""
            axes.barh(-step, 0.9, 0.8, place, color=face, hatch=hatch, edgecolor="#777777", linewidth=0.6)
        text = f"{end - start} in, 1 out, {end} kept"
        axes.text(prompt + answer + 0.2, -step, text, va="center", fontsize=9)
    names = [f"prompt\n{i}" if i == 0 else str(i) for i in range(prompt)] + [str(i + prompt) for i in range(answer)]
    axes.set_xticks([i + 0.45 for i in range(prompt + answer)], names, fontsize=9)
    axes.set_yticks([-i for i in range(answer)], [f"pass {i + 1}" for i in range(answer)])
    axes.set(xlim=(-0.2, prompt + answer + 3.2), xlabel="position")
    setting = "Orange, hatched: goes in, its keys are written; blue: keys kept"
    headline(axes, "After the prompt a single token goes into each pass", setting)
    axes.grid(False)
    return figure


def on_a_roof(
    gpu: str = "H100 SXM", model: str = "Llama 3 8B", batch: int = 16, prompt: int = 2048, context: int = 2048
) -> Figure:
    """Formula: where prefill of one prompt and a decode step of a batch lie under a GPU's roof."""
    card, shape = GPUS[gpu], MODELS[model]
    passes = [
        (f"prefill of {prompt} tokens", predict.work(shape, 1, prompt, 0), look(1)),
        ("decode, batch of one", predict.work(shape, 1, 1, context - 1), look(0)),
        (f"decode, batch of {batch}", predict.work(shape, batch, 1, context - 1), look(2)),
    ]
    figure, axes = subplots(width=7.5, height=3.6)
    _roof(axes, card.peak_flops, card.bandwidth, (0.3, 1e4))
    for name, cost, drawn in passes:
        speed = attainable(cost.intensity, card.peak_flops, card.bandwidth)
        share = speed / card.peak_flops
        label = f"{name}: {cost.intensity:,.{0 if cost.intensity >= 100 else 2}f} FLOP/byte, {share:.1%} of peak"
        axes.plot(cost.intensity, speed, marker=drawn.marker, color=drawn.color, linestyle="", ms=9, label=label)
    setting = f"Formula: {model} in bf16 on {gpu}, context {context:,}"
    headline(axes, "Where prefill and decoding lie under a GPU's roof", setting)
    axes.legend(loc="lower right")
    return figure


def decode_by_batch(
    gpu: str = "H100 SXM", model: str = "Llama 3 8B", context: int = 2048, kv_heads: int = 8, weight_bits: int = 16
) -> Figure:
    """Formula: decode throughput by batch on a GPU, its three limits, and the batch whose caches no longer fit."""
    card = GPUS[gpu]
    shape = replace(MODELS[model], num_kv_heads=kv_heads)
    batches = np.unique(np.logspace(0, 3.3, 60).astype(int))
    kv, weights = kv_bytes_per_token(shape), parameters(shape).total * weight_bits / 8
    read = predict.work(shape, 1, 1, context - 1).weight_bytes * weight_bits / 16  # of the embedding only a row
    rates = [_rate(shape, int(b), context, card, weight_bits) for b in batches]
    fits = (card.memory_bytes - weights) / (context * kv)
    figure, axes = subplots(width=7.5, height=3.8)
    axes.plot(batches, rates, color=look(0).color, marker="", linewidth=2, label="at most")
    axes.plot(batches, batches * card.bandwidth / read, ":", color=PALETTE["black"], marker="", label="weights alone")
    ceiling = predict.kv_ceiling(kv, context, card.bandwidth)
    axes.axhline(ceiling, linestyle="--", color=look(3).color, label=f"every cache is read: {ceiling:,.0f}")
    flops = predict.work(shape, 1, 1, context - 1).flops
    axes.axhline(card.peak_flops / flops, linestyle="-.", color=look(1).color, label="compute")
    if fits >= 1:
        axes.axvspan(fits, batches[-1], color="#DDDDDD", alpha=0.6, label=f"over {int(fits):,}: caches do not fit")
    else:
        axes.text(0.5, 0.5, "the weights do not fit on one GPU", transform=axes.transAxes, ha="center")
    axes.set(xscale="log", yscale="log", xlim=(1, batches[-1]), xlabel="batch (sequences)", ylabel="tokens per second")
    setting = f"Formula: {model}, {kv_heads} kv heads, {weight_bits}-bit weights, context {context:,}, {gpu}"
    headline(axes, "A larger batch decodes faster until caches or compute set a ceiling", setting)
    log_ticks(axes.xaxis)
    log_ticks(axes.yaxis)
    axes.legend(loc="lower right")
    return figure


def _rate(shape, batch: int, context: int, card: experiments.Gpu, weight_bits: int) -> float:
    cost = predict.work(shape, batch, 1, context - 1)
    moved = cost.bytes - cost.weight_bytes * (1 - weight_bits / 16)
    return batch / max(moved / card.bandwidth, cost.flops / card.peak_flops)


def caches(context: int = 4096, batch: int = 16) -> Figure:
    """Bytes of the cache in 16 bits beside the weights: as the models are, with as many kv heads as heads, with one."""
    figure, axes = subplots(width=8, height=3.4)
    named = [Patch(color="#BBBBBB", label="weights")]
    for place, shape in enumerate(MODELS.values()):
        kinds = {"multi-head": shape.num_heads, "grouped, 8": 8, "multi-query": 1}
        weights = parameters(shape).total * 2 / 1e9
        axes.bar(place - 0.33, weights, 0.2, color="#BBBBBB")
        for index, (kind, heads) in enumerate(kinds.items()):
            size = kv_bytes_per_token(replace(shape, num_kv_heads=heads)) * context * batch / 1e9
            drawn = {"facecolor": look(index).color, "hatch": look(index).hatch}
            frame = {"edgecolor": "#000000", "linewidth": 2} if shape.num_kv_heads == heads else PLAIN
            bar = axes.bar(place - 0.11 + 0.22 * index, size, 0.2, **drawn, **frame)
            axes.bar_label(bar, fmt="%.3g", fontsize=9)
            if not place:
                named.append(Patch(**drawn, **PLAIN, label=f"cache, {kind}"))
    axes.axhline(80, linestyle="--", color=PALETTE["black"], linewidth=1)
    axes.text(2.55, 84, "80 GB", fontsize=9, ha="right")
    axes.set_xticks(range(len(MODELS)), MODELS)
    axes.set(yscale="log", ylabel="GB")
    setting = f"Formula: {batch} sequences of {context:,} tokens; framed cache and weights: the model as it is"
    headline(axes, "Fewer kv heads shrink the cache in proportion", setting)
    axes.grid(False, axis="x")
    axes.legend(handles=named, ncols=2)
    return figure


# Of measurements, for the notebook.


def passes_under_a_roof() -> Figure:
    """Decode steps by batch and prefills by prompt under one core's measured roof."""
    return draw_roofline(experiments.sweep(), experiments.roof())


def one_against_many() -> Figure:
    """Decoding by batch on one core: tokens per second of all sequences, and the time that each waits for a token."""
    return draw_batch(experiments.sweep(), experiments.roof())


def next_token() -> Figure:
    """FLOPs and time of the next token, with a cache and recomputing everything, by the tokens there are."""
    return draw_one_more(experiments.one_more_token())


def three_decoders() -> Figure:
    """KL of three broken decoders from the right one by position, for two sizes of the cache."""
    return draw_patients(experiments_breaks.patients())


# Drawn from measurements.


def draw_roofline(points: Sequence[Point], roof: Roof) -> Figure:
    """Decode steps by batch and prefills by prompt under one core's measured roof."""
    figure, axes = subplots(width=7.5, height=3.8)
    heights = 0.6 * min(point.flops_per_s for point in points), 1.6 * roof.peak_flops
    _roof(axes, roof.peak_flops, roof.bandwidth, (0.4, 600), heights)
    for index, kind in enumerate(("decode", "prefill")):
        own = [point for point in points if point.kind == kind]
        x, y = [p.work.intensity for p in own], [p.flops_per_s for p in own]
        of = "batch" if kind == "decode" else "prompt"
        axes.plot(
            x, y, linestyle="", marker=look(index).marker, color=look(index).color, ms=7, label=f"{kind}, by {of}"
        )
        for point, at, speed in zip(own, x, y, strict=True):
            number = point.batch if kind == "decode" else point.new
            place = {"xytext": (0, -16), "ha": "center"} if kind == "prefill" else {"xytext": (6, -10)}
            axes.annotate(str(number), (at, speed), textcoords="offset points", fontsize=9, **place)
    name = str(roof.dtype).split(".")[1]
    setting = f"One core, {name}, processor time, weights of {points[0].work.weight_bytes / 1e6:.0f} MB"
    headline(axes, "Only a large batch brings decoding near the peak", setting)
    axes.legend(loc="lower right")
    return figure


def _roof(
    axes: Axes, peak: float, bandwidth: float, reach: tuple[float, float], heights: tuple[float, float] | None = None
) -> None:
    x = np.logspace(np.log10(reach[0]), np.log10(reach[1]), 200)
    roof = [attainable(each, peak, bandwidth) for each in x]
    axes.plot(x, roof, color=PALETTE["black"], marker="", label=f"roof, ridge at {peak / bandwidth:.3g} FLOP/byte")
    axes.axvline(peak / bandwidth, color="#999999", linestyle=":", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="arithmetic intensity (FLOP/byte)", ylabel="speed")
    axes.set_ylim(heights)
    for axis in (axes.xaxis, axes.yaxis):
        log_ticks(axis)
    axes.yaxis.set_major_formatter(EngFormatter(unit="FLOP/s", sep=" "))


def draw_batch(points: Sequence[Point], roof: Roof) -> Figure:
    """Decoding by batch: tokens per second of all sequences, and seconds of a step, which each of them waits."""
    own = [point for point in points if point.kind == "decode"]
    batches = [point.batch for point in own]
    limit = [point.work.seconds(roof.peak_flops, roof.bandwidth) for point in own]
    figure, (left, right) = subplots(1, 2, width=9, height=3.6)
    drawn = {"color": look(0).color, "marker": look(0).marker, "label": "measured"}
    dashed = {"color": look(0).color, "marker": "", "linestyle": "--"}
    left.plot(batches, [point.tokens_per_s for point in own], **drawn)
    left.plot(batches, [b / s for b, s in zip(batches, limit, strict=True)], **dashed, label="at most, by the roof")
    linear = [own[0].tokens_per_s * b for b in batches]
    left.plot(batches, linear, ":", color="#777777", marker="", label="batch × the speed of one")
    right.plot(batches, [point.seconds * 1e3 for point in own], **drawn)
    right.plot(batches, [s * 1e3 for s in limit], **dashed, label="at least, by the roof")
    left.set(xscale="log", yscale="log", xlabel="batch (sequences)", ylabel="tokens per second, all together")
    right.set(xscale="log", yscale="log", xlabel="batch (sequences)", ylabel="time of a step (ms)")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(b) for b in batches])
        log_ticks(axes.yaxis)
        axes.legend()
    left.set_title("All sequences together")
    right.set_title("What each sequence waits for a token")
    setting = f"One core, {str(roof.dtype).split('.')[1]}, processor time; one step gives each sequence a token"
    headline(
        figure, "Batching decodes more tokens per second, but in a large batch each sequence waits longer", setting
    )
    return figure


def draw_one_more(found: Mapping[int, Mapping[str, Mapping[str, float]]]) -> Figure:
    """FLOPs and time of the next token by how many there are, with a cache and recomputing everything."""
    figure, (left, right) = subplots(1, 2, width=9, height=3.4)
    sizes = list(found)
    for index, way in enumerate(("recomputed", "cached")):
        drawn = {"color": look(index).color, "marker": look(index).marker}
        left.plot(sizes, [found[n][way]["flops"] for n in sizes], **drawn, linestyle="", label=f"{way}, counted")
        expected = [found[n][way]["predicted"] for n in sizes]
        left.plot(sizes, expected, "--", color=look(index).color, marker="", label=f"{way}, formula")
        right.plot(sizes, [found[n][way]["seconds"] * 1e3 for n in sizes], **drawn, label=way)
    left.set(yscale="log", ylabel="computing the next token", xlabel="tokens so far", title="FLOPs")
    left.yaxis.set_major_formatter(EngFormatter(unit="FLOP", sep=" "))
    right.set(ylabel="the next token (ms)", xlabel="tokens so far", title="Time, measured", ylim=(0, None))
    for axes in (left, right):
        axes.legend()
    headline(figure, "Without a cache the next token costs a pass over all tokens before it")
    return figure


def draw_patients(found: Mapping[str, Mapping[int, experiments_breaks.Symptoms]]) -> Figure:
    """How far each broken decoder's distribution is from the right one along the text, for two sizes of the cache."""
    figure, panels = subplots(1, len(found), width=9, height=3.2, sharey=True)
    for axes, (name, rooms) in zip(panels, found.items(), strict=True):
        for index, (room, seen) in enumerate(rooms.items()):
            decoded, nine = seen.kl[1:], np.ones(9)  # the logits before these are the prefill's, and right
            places = [experiments_breaks.PROMPT + 1 + i for i in range(len(decoded))]
            smooth = np.convolve(decoded, nine, "same") / np.convolve(np.ones(len(decoded)), nine, "same")
            drawn = look(index)
            line = "-" if index == 0 else "--"
            axes.plot(places, smooth + 1e-7, color=drawn.color, linestyle=line, marker="", label=f"{room} places")
        axes.axvline(experiments_breaks.PROMPT + 0.5, color="#999999", linestyle=":")
        axes.set(yscale="log", xlabel="position (dotted: prompt ends)", title=f"Decoder {name}", ylim=(1e-5, 1))
    panels[0].set_ylabel("KL from the right decoder (nats)")
    panels[0].legend(title="room in the cache")
    headline(
        figure,
        "Three broken decoders, each wrong in its own way",
        "Each point is the mean of up to nine tokens around it",
    )
    return figure


# Committed figures.


def _points(points: Sequence[Point], roof: Roof) -> dict[str, Any]:
    rows = [
        {"kind": p.kind, "batch": p.batch, "new": p.new, "kept": p.kept, "intensity": p.work.intensity}
        | {"seconds": p.seconds, "tokens_per_s": p.tokens_per_s, "flops_per_s": p.flops_per_s}
        | {"seconds_at_least": p.work.seconds(roof.peak_flops, roof.bandwidth)}
        for p in points
    ]
    lines = {"dtype": str(roof.dtype), "peak_flops": roof.peak_flops, "bandwidth_bytes_per_s": roof.bandwidth}
    return {
        "cores": 1,
        "roof": lines | {"ridge": roof.ridge},
        "weight_bytes": points[0].work.weight_bytes,
        "rows": rows,
    }


def _figure_roofline() -> tuple[Figure, dict[str, Any]]:
    points, roof = experiments.sweep(10), experiments.roof()
    return draw_roofline(points, roof), _points(points, roof)


def _figure_batch() -> tuple[Figure, dict[str, Any]]:
    points, roof = experiments.sweep(10), experiments.roof()
    return draw_batch(points, roof), _points([p for p in points if p.kind == "decode"], roof)


def _figure_cache() -> tuple[Figure, dict[str, Any]]:
    found = experiments.one_more_token()
    return draw_one_more(found), {"by_tokens_so_far": {str(size): ways for size, ways in found.items()}}


def _figure_gpu() -> tuple[Figure, dict[str, Any]]:
    card, shape = GPUS["H100 SXM"], MODELS["Llama 3 8B"]
    rates = {str(2**i): _rate(shape, 2**i, 2048, card, 16) for i in range(11)}
    turning = predict.turning_batch(shape, 2048, card.peak_flops, card.bandwidth)
    return decode_by_batch(), {"predicted": True, "gpu": asdict(card), "turning_batch": turning, "tokens_per_s": rates}


def _figure_patients() -> tuple[Figure, dict[str, Any]]:
    found = experiments_breaks.patients()
    numbers = {name: {str(room): asdict(seen) for room, seen in rooms.items()} for name, rooms in found.items()}
    return draw_patients(found), numbers


FIGURES = {
    "roofline": _figure_roofline,
    "batch": _figure_batch,
    "cache": _figure_cache,
    "gpu": _figure_gpu,
    "patients": _figure_patients,
}
