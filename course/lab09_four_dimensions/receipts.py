"""Lab 09's claims, each once: the notebook prints them, the tour and the tests run `CLAIMS`.

Every function yields the rows of one receipt; without arguments it measures for itself, and then bytes only.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from course.kit.answers import answers_of
from course.kit.receipts import Row, formula, row, titled
from course.lab09_four_dimensions import experiments, experiments_breaks
from course.lab09_four_dimensions import experiments_plan as plans
from course.lab09_four_dimensions.experiments import LAYOUTS, PLACED, LayoutRun, Point
from course.shared.table import Table, table
from minillm.equivalence import CONTEXT_CASES, SPLIT_CASES, compare
from minillm.predict.planner import published
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import GIB, cluster
from minillm.predict.planner.layout import Layout
from minillm.predict.planner.memory import token_bytes
from minillm.train.parallel_config import ParallelConfig

Runs = Mapping[str, Sequence[LayoutRun]]
ANSWERS = answers_of("09_four_dimensions")
LATTICE = (
    ParallelConfig(dp=2, tp=2, sequence=True),
    ParallelConfig(dp=2, cp=2, zero=1),
    ParallelConfig(dp=1, cp=4),
    ParallelConfig(tp=2, pp=2, accumulate=2),
    ParallelConfig(cp=2, pp=2, accumulate=2),
    ParallelConfig(cp=2, tp=2, sequence=True, zero=3),
)


@cache
def _bytes_only() -> Runs:
    return experiments.on_links(timed=0)


# The mesh.


@titled("one layer of 70B, tp 8, a microbatch of 4,096 tokens", open_rows=1)
def wrong_link(guess_times: float | None = None) -> Iterator[Row]:
    inside, across = plans.tensor_across(8)
    yield formula("times as long across eight nodes as in one", across / inside, guess=guess_times)
    yield formula("    eight in one node", inside, "s")
    yield formula("    one in each of eight nodes", across, "s")


@titled("groups of four meshes on 4 ranks", open_rows=1)
def torch_mesh(found: Sequence[dict[str, Any]] | None = None, mesh_groups: Callable | None = None) -> Iterator[Row]:
    found, mesh_groups = found or experiments.meshes(), mesh_groups or ANSWERS.mesh_groups
    for axes in experiments.MESHES:
        theirs = [(rank[str(axes)]["place"], rank[str(axes)]["groups"]) for rank in found]
        own = [mesh_groups(rank, axes) for rank in range(len(found))]
        sizes = " · ".join(f"{axis} {size}" for axis, size in axes.items())
        yield row(f"{sizes}: ranks whose places and groups agree", len(found), sum(map(_same, own, theirs)))
    flat = [rank[str(experiments.MESHES[1])]["dp_cp"] for rank in found]
    yield row("dp x cp flattened, on every rank", [0, 1, 2, 3], flat[0] if flat.count(flat[0]) == len(flat) else flat)


def _same(own: tuple[dict, dict], theirs: tuple[dict, dict]) -> bool:
    groups = [{axis: [int(rank) for rank in each] for axis, each in found[1].items()} for found in (own, theirs)]
    return own[0] == theirs[0] and groups[0] == groups[1]


# Links.


@titled("bytes between nodes in a step, all ranks", open_rows=2)
def bytes_between_nodes(runs: Runs | None = None, crossing_bytes: Callable | None = None) -> Iterator[Row]:
    """Bytes between nodes, by the messages that were sent. crossing_bytes: the reader's, for dp 2, tp 2."""
    runs, crossing_bytes = runs or _bytes_only(), crossing_bytes or ANSWERS.crossing_bytes
    for name in PLACED:
        for state, where in zip(experiments.CROSSING, ("inside", "across"), strict=True):
            due = _between(name, state, crossing_bytes)
            sent = sum(run.carried[state].get(experiments.INTER.name, 0) for run in runs[name])
            yield row(f"{name}: with {experiments.inner_axis(name)} {where}", due, sent, "B", 1e-3)
    everything = {state: sum(_all(runs, state)) for state in experiments.CROSSING}
    yield row("the same bytes in all, on either seat", True, len(set(everything.values())) == 1)


def _between(name: str, state: str, crossing_bytes: Callable) -> int:
    """The reader's function on the mesh as the ranks are seated: the inner axis last, or the outer one."""
    layout, sent = LAYOUTS[name], experiments.bytes_by_axis(name)
    if name == "dp 2, cp 2":
        return experiments.between_nodes(name, state)
    axes = {axis: size for axis, size in layout.axes.items() if size > 1}
    seated = axes if state == "inner inside" else dict(reversed(axes.items()))
    groups = layout.world_size // 2  # of two ranks each, and a border of a pipeline carries two messages
    each = {axis: sent.get(axis, 0) / (2 * groups) for axis in axes}
    return round(sum(crossing_bytes(seated, experiments.PER_NODE, each).values()))


def _all(runs: Runs, state: str) -> Iterator[int]:
    return (sum(run.carried[state].values()) for name in PLACED for run in runs[name])


@titled("seconds of a step, emulated links", open_rows=1)
def placement(runs: Runs) -> Iterator[Row]:
    spent = [runs[name][0].seconds for name in PLACED]
    slower = tuple(each["inner across"] / each["inner inside"] for each in spent)
    inner_axes = ", ".join(map(experiments.inner_axis, PLACED))
    yield row(f"times as long across nodes as inside one: {inner_axes}", None, slower, noisy=True)
    for name in PLACED:
        seconds, alone = runs[name][0].seconds, runs[name][0].seconds["no link"]
        inner = experiments.inner_axis(name)
        due = {
            state: alone + experiments.link_seconds(LAYOUTS[name], state) for state in ("inner inside", "inner across")
        }
        times = seconds["inner across"] / seconds["inner inside"]
        expected = due["inner across"] / due["inner inside"]
        yield row(f"{name}: {inner} across / {inner} inside, times", expected, times, "", 0.25, noisy=True)
        for state, each in due.items():
            yield row(f"    {inner} {state.split()[1]}", each, seconds[state], "s", 0.25, noisy=True)


@titled("bytes of a step by axis, all ranks", open_rows=2, show="over pp")
def by_axis(runs: Runs | None = None) -> Iterator[Row]:
    runs = runs or _bytes_only()
    for name, layout in LAYOUTS.items():
        due, sent = experiments.bytes_by_axis(name), experiments.measured_by_axis(runs[name], layout)
        if not layout.is_hybrid:  # one group does both
            due = {"dp": sum(due.values())}
        for axis in sorted(due, key=due.get, reverse=True):
            yield row(f"{name}: over {axis}", due[axis], sent.get(axis), "B")


@titled("bytes of a layer per rank", open_rows=1)
def fsdp_or_tensor(runs: Runs | None = None) -> Iterator[Row]:
    runs = runs or _bytes_only()
    whole = {
        name: sum(experiments.measured_by_axis(runs[name], LAYOUTS[name]).values()) for name in ("dp 4, zero 3", "tp 4")
    }
    width, batch = experiments.MODEL.hidden_size, 8 * experiments.SEQ
    due = {name: sum(experiments.bytes_by_axis(name).values()) for name in whole}
    share, expected = whole["tp 4"] / whole["dp 4, zero 3"], due["tp 4"] / due["dp 4, zero 3"]
    yield row(f"4 ranks, H {width}, {batch} tokens: tensor parallel / FSDP, bytes by ledger", expected, share, "", 1e-6)
    hidden = plans.SEVENTY.hidden_size
    tokens = round(plans.equal_tokens(hidden))
    sharded, tensor = plans.layer_traffic(hidden, tokens, 8)
    yield row(
        f"H {hidden:,}, T = 4.5 H = {tokens:,} tokens, 8 ranks: tensor parallel / FSDP",
        1.0,
        tensor / sharded,
        "",
        1e-3,
        kind="computed",
    )
    yield formula("    each, bf16", sharded / 1e9, "GB")
    yield formula(
        "    tokens at which both send the same, for a 70B layer (12.8 H² parameters)",
        plans.equal_tokens(hidden, plans.squares(plans.SEVENTY)),
    )


# Plans.


def what_there_is() -> Table:
    """The fields that exercise 4 needs, of 70B in one layout."""
    model, layout = plans.SEVENTY, Layout(dp=2, tp=8, pp=4, zero=1, microbatches=16)
    rows = [
        ("model.num_layers", "layers", f"{model.num_layers}"),
        ("model.active_layer", "parameters of a layer", f"{model.active_layer:,.0f}"),
        ("model.table", "parameters of the embedding table, and of the head", f"{model.table:,}"),
        ("model.hidden_size", "H", f"{model.hidden_size:,}"),
        ("layout.dp, .zero, .tp, .cp, .pp", "sizes, and the ZeRO stage", "2, 1, 8, 1, 4"),
        ("layout.micro_batch", "sequences of a microbatch", f"{layout.micro_batch}"),
        ("layout.microbatches", "of each data-parallel rank and step", f"{layout.microbatches}"),
        ("token_bytes(model, layout)", "bytes a layer keeps per token on a rank", f"{token_bytes(model, layout):,.0f}"),
    ]
    return table("70B as dp 2, zero 1, tp 8, pp 4", ("name", "what it is", "here"), rows)


@titled("70B on 64 GPUs of 40 GB", open_rows=3)
def dropped(found: Sequence[tuple[Layout, float, float]] | None = None) -> Iterator[Row]:
    """What is left of all simple layouts with tp in a node once those that do not fit are dropped."""
    found = plans.estimates(ANSWERS.estimate) if found is None else found
    kept = [each for each in found if each[1] <= plans.SIXTY_FOUR.usable]
    yield formula("fit by your estimate, of all simple layouts with tp in a node", (len(kept), len(found)))
    if kept:
        layout, held, seconds = min(kept, key=lambda each: each[2])
        yield formula(f"    quickest: {layout}, {held / GIB:.1f} GiB", seconds, "s")
        yield formula("    the same by the planner, which knows more terms", plans.judge(layout).seconds, "s")
    agree = sum((held <= plans.SIXTY_FOUR.usable) == plans.judge(each).fits for each, held, _ in found)
    yield row("the planner, which knows buffers too, agrees on what fits", len(found), agree, kind="computed")


COMMON = {
    "tp 8, pp 8": Layout(tp=8, pp=8, chunks=10, microbatches=512),
    "fully sharded, full recomputation": Layout(dp=32, zero=3, cp=2, microbatches=16, recompute="full"),
    "tp 16 over two nodes": Layout(dp=4, zero=3, tp=16, microbatches=128, recompute="full"),
}


@titled("70B on 64 GPUs of 40 GB: yours and others", open_rows=3)
def plans_table(mine: Layout) -> Iterator[Row]:
    best = plans.best()
    for name, layout in {"yours": mine, "the planner's": best.layout, **COMMON}.items():
        each = plans.judge(layout)
        fits = "" if each.fits else ", which does not fit"
        what = f"{name}: {layout}, {each.held / GIB:.1f} GiB{fits}: seconds, times the planner's"
        yield formula(what, (round(each.seconds, 1), round(each.seconds / best.step.seconds, 2)))


@titled("your plan, innermost axis first", open_rows=2)
def orders(mine: Layout) -> Iterator[Row]:
    """Seconds of the reader's plan in each order of its axes: the fastest, the slowest, those between."""
    fastest, *others = plans.crossing_orders(plans.SEVENTY, plans.SIXTY_FOUR, mine, plans.SEQ)
    for order, seconds in (fastest, *others[-1:], *others[:-1]):
        yield formula(", ".join(order), seconds, "s")


@titled("published runs")
def published_runs() -> Iterator[Row]:
    """Published runs: utilisation by formula at most 15 % off what was reported."""
    for run in published.RUNS:
        found = published.compare(run)
        yield row(f"{found.run}: formula / reported", 1.0, found.predicted / found.reported, "", 0.15)


def published_table() -> Table:
    heads = ("run", "axes", "reported", "formula", "off", "GiB of usable")
    rows = []
    for name, axes, reported, predicted, held, usable in plans.published_rows():
        off = round(predicted / reported - 1, 3) + 0.0  # no minus before a zero
        rows.append((name, axes, f"{reported:.1%}", f"{predicted:.1%}", f"{off:+.1%}", f"{held:.0f} of {usable:.0f}"))
    return table("share of the peak: what was reported, and what the planner's formulas say", heads, rows)


# Breaks.


@titled("a colleague's hybrid step on 4 ranks", open_rows=4)
def bug_hunt(found: Sequence | None = None) -> Iterator[Row]:
    found = found or experiments_breaks.bug_hunt()
    for outcome in found:
        yield row(f"{outcome.mesh}: largest relative error of a gradient", None, outcome.worst)
    for outcome in found:
        yield row(f"{outcome.mesh}: loss that of one process, to 1e-10", True, outcome.loss < 1e-10)


@titled("minillm's own layouts of 4 ranks against one process", open_rows=1)
def lattice() -> Iterator[Row]:
    cases = {"tied": CONTEXT_CASES["tied"]}, {"tied": SPLIT_CASES["tied"]}
    found = compare(LATTICE, lambda layout: cases[layout.cp == 1], steps=1)
    for layout, outcome in zip(LATTICE, found, strict=True):
        yield row(f"{layout}: gradients, norm, weights within 1e-10", True, outcome.ok)


# Scaling, and where it loses.


@titled("data parallelism, two ranks to a node", open_rows=1)
def scaling(points: Sequence[Point] | None = None) -> Iterator[Row]:
    points = points or experiments.scaling(timed=0)
    timed = [point for point in points if point.seconds is not None]
    alone = {point.mode: point.measured_seconds for point in timed if point.ranks == 1}
    two, four = (point for point in points if point.mode == "weak" and point.ranks in (2, 4))
    cliff = "weak, 4 ranks beside 2: times the bytes that a rank sends"
    if two.measured_seconds and four.measured_seconds:
        times = four.measured_bytes / two.measured_bytes, four.measured_seconds / two.measured_seconds
        yield row(f"{cliff}, times the seconds of a step", None, times, noisy=True)
    else:
        yield row(cliff, four.bytes / two.bytes, four.measured_bytes / two.measured_bytes, "", 1e-6)
    for point in timed:
        name = f"{point.mode}, {point.ranks} rank{'s' * (point.ranks > 1)}"
        if point.measured_seconds is None:
            yield formula(f"{name}: step, not measured", point.seconds, "s")
            continue
        due = point.seconds if point.ranks > 1 else None
        yield row(f"{name}: step", due, point.measured_seconds, "s", 0.3, noisy=True)
        if due:
            share = 1 / (point.ranks if point.mode == "strong" else 1)
            yield row("    efficiency", None, share * alone[point.mode] / point.measured_seconds)
    for point in points:
        if point.measured_bytes is not None and point.ranks > 1:
            name = f"{point.mode}, {point.ranks} ranks: bytes that a rank sends"
            yield row(name, point.bytes, point.measured_bytes, "B", 1e-6)
    yield formula("4 ranks on two nodes: bytes that leave each", points[2].crossing, "B")


@titled("one node of 4 ranks, eight sequences", open_rows=1)
def simple_wins(runs: Runs) -> Iterator[Row]:
    names = ("dp 4", "dp 2, tp 2", "tp 4", "pp 2, tp 2")
    spent = tuple(runs[name][0].seconds["one node"] for name in names)
    yield row(f"step: {' | '.join(names)}", None, spent, "s", noisy=True)
    for name in names:
        run, layout = runs[name][0], LAYOUTS[name]
        due = run.seconds["no link"] + experiments.link_seconds(layout, "one node")
        sent = sum(experiments.bytes_by_axis(name).values()) / 1e6
        yield row(f"{name}: step; {sent:.1f} MB sent by all", due, run.seconds["one node"], "s", 0.3, noisy=True)


# Design questions.


def _designs(title: str, rows: Sequence[plans.Design], usable: float) -> Table:
    heads = ("", "layout", "seconds per step", "share of the peak", f"GiB of {usable:.0f}")
    cells = [
        (each.name, str(each.layout), f"{each.seconds:.2f}", f"{each.share:.1%}", f"{each.held:.0f}") for each in rows
    ]
    return table(title, heads, cells)


def design_405b() -> Table:
    machine = cluster("h100", 16384)
    layouts = {
        "as trained": Layout(dp=128, zero=2, tp=8, pp=16, chunks=8, microbatches=16),
        "tp across nodes": Layout(dp=64, zero=2, tp=16, pp=16, chunks=8, microbatches=32),
        "no pipeline": Layout(dp=2048, zero=3, tp=8, microbatches=1),
        "no chunks": Layout(dp=128, zero=2, tp=8, pp=16, microbatches=16),
        "dp innermost": Layout(dp=128, zero=2, tp=8, pp=16, chunks=8, microbatches=16, order=("dp", "cp", "pp", "tp")),
    }
    rows = plans.designs(architecture("llama-3-405b"), machine, 8192, layouts)
    return _designs("405B on 16,384 H100, 2,048 sequences of 8,192 tokens", rows, machine.usable / GIB)


def design_13b() -> Table:
    machine = cluster("a100-80", 32)
    layouts = {
        "ZeRO 3": Layout(dp=32, zero=3, microbatches=8),
        "ZeRO 2": Layout(dp=32, zero=2, microbatches=8),
        "ZeRO 1": Layout(dp=32, zero=1, microbatches=8),
        "tp 8, dp 4": Layout(dp=4, zero=1, tp=8, microbatches=64),
        "tp 2, dp 16": Layout(dp=16, zero=1, tp=2, microbatches=16),
        "pp 4, dp 8": Layout(dp=8, zero=1, pp=4, microbatches=32),
    }
    rows = plans.designs(architecture("llama-2-13b"), machine, 4096, layouts)
    return _designs("13B on 32 A100, 256 sequences of 4,096 tokens", rows, machine.usable / GIB)


CLAIMS = (torch_mesh, bytes_between_nodes, by_axis, fsdp_or_tensor, dropped, published_runs, bug_hunt, lattice, scaling)
