"""Lab 07's claims, each once: the notebook prints them, the tour and the tests run `CLAIMS`.

Every function yields the rows of its receipt; without arguments it measures for itself.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from course.kit.receipts import Row, formula, row, titled
from course.lab07_long_context import experiments, experiments_breaks
from course.lab07_long_context import experiments_links as links
from course.lab07_long_context.experiments import LONG, WORLD, Step
from course.shared.table import Table, seconds, table
from minillm.predict.training import context
from minillm.predict.training.context import AttentionShape, Hardware

FLOPS, INSIDE, ACROSS = 400e12, 400e9, 50e9


@cache
def _accidents() -> list[dict[str, Any]]:
    return experiments_breaks.accidents()


@titled("131,072 tokens, one head of 128, bf16", open_rows=1)
def one_head(guess_gb: float | None = None) -> Iterator[Row]:
    found = experiments.one_head_bytes()
    yield formula("stored probabilities: 2·S² bytes", found["scores"] / 1e9, "GB", guess=guess_gb)
    yield formula("    of 32 heads", 32 * found["scores"] / 1e9, "GB")
    yield formula("in tiles: q, k, v, output and 4 bytes per query", found["tiles"] / 1e9, "GB")


@titled("one layer, forward and backward, float32", open_rows=1, show="twice the length")
def memory(found: dict[str, list[int]] | None = None) -> Iterator[Row]:
    found = found or experiments.peaks()
    for (name, sizes), times in zip(found.items(), (4, 2), strict=True):
        ratios = [after / before for before, after in pairwise(sizes)]
        yield row(f"{name}: peak at twice the length, times", times, ratios[-1], tolerance=0.05)
        yield row(f"    bytes at {', '.join(f'{s:,}' for s in experiments.LENGTHS)}", None, tuple(sizes), "B")


@titled("float32 against float64, 1,024 tokens", open_rows=1)
def exact(found: dict[str, float] | None = None) -> Iterator[Row]:
    found = found or experiments.errors()
    both = found["tiles"] < 1e-6, max(found["lse"], found["kernel's lse"]) < 1e-6
    yield row("tiles, and log-sum-exp beside torch's kernel: below 1e-6", (True, True), both)
    yield row("    largest relative difference: tiles, torch's kernel", None, (found["tiles"], found["SDPA"]))


@titled("share of all causal work, 4 ranks", open_rows=1, show="busiest rank / idlest")
def work(found: dict[str, list[float]] | None = None) -> Iterator[Row]:
    found = found or experiments.work()
    for rank in reversed(range(WORLD)):
        share = context.work_share(rank, WORLD, "contiguous")
        yield row(f"contiguous, rank {rank}: (2r+1)/N²", share, found["contiguous"][rank], tolerance=0.1)
    busiest = max(found["zigzag"]) / min(found["zigzag"])
    yield row("zigzag: busiest rank / idlest", 1.0, busiest, tolerance=0.01)
    yield row("    the busiest rank's share: 1/N", 1 / WORLD, max(found["zigzag"]), tolerance=0.01)


@titled("4 ranks, 1,024 tokens, one layer: sent per rank, forward and backward")
def traffic(found: dict[tuple[str, int], tuple[int, int]] | None = None) -> Iterator[Row]:
    found = found or experiments.traffic()
    both = context.forward_traffic, context.backward_traffic
    for name in dict.fromkeys(name for name, _ in found):
        shapes = {kv_heads: experiments.SHAPES[kv_heads] for other, kv_heads in found if other == name}
        due = tuple(tuple(each(name, shape, WORLD).bytes for each in both) for shape in shapes.values())
        sent = tuple(tuple(found[name, kv_heads]) for kv_heads in shapes)
        yield row(f"{name}, {' and '.join(map(str, shapes))} kv heads", due, sent, "B")


@titled("one long sequence, on one process and on 4 ranks", open_rows=1, show="loss|norm")
def long_step(found: dict[int, list[Step]] | None = None) -> Iterator[Row]:
    """Without arguments of a quarter of the length: it takes a sixteenth of the time."""
    seq = LONG if found else LONG // 4
    found = found or experiments.one_and_four_ranks(seq)
    (alone,), ranks = found[1], found[WORLD]
    held = max(step.activations for step in ranks)
    yield row("activations of a rank, 4 ranks / one: 1/4", 1 / WORLD, held / alone.activations, tolerance=0.1)
    yield row("    bytes on one process, on each of 4", None, (alone.activations, held), "B")
    yield row("    at most a third", True, held <= alone.activations / 3)
    yield row("sent per rank: blocks, and their gradients", experiments.long_bytes(seq), ranks[0].sent, "B")
    yield row("loss", alone.loss, ranks[0].loss, "", 1e-5)
    yield row("norm of the gradient", alone.grad_norm, ranks[0].grad_norm, "", 1e-3)


@titled("a forward ring of 4 ranks, emulated link and work", open_rows=1, show="behind")
def overlap(clocks: dict[tuple[str, bool], links.Clock] | None = None) -> Iterator[Row]:
    clocks = clocks or links.on_a_clock()
    for (name, hidden), clock in clocks.items():
        how = "sent behind the work" if hidden else "sent, then worked"
        label = f"{name} link, {how}"
        yield row(label, clock.predicted_s, clock.measured_s, "s", tolerance=0.1, noisy=True)


@titled("forward attention: 4 devices / one")
def short(found: dict[tuple[str, int], dict[str, float]]) -> Iterator[Row]:
    for (name, seq), times in found.items():
        label = f"{name}, {seq:,} tokens: times as long as on one rank"
        yield row(label, times["formula"] / times["one"], times["four"] / times["one"], "", 0.5, noisy=True)


@titled("dp 1, cp 4: one step", open_rows=1)
def kv_never_exchanged(found: Sequence[dict[str, Any]] | None = None) -> Iterator[Row]:
    found = [rank["kv_never_exchanged"] for rank in found or _accidents()]
    yield row("not reduced: another gradient on every rank, off by more than 0.5", True, _least(found, "skipped") > 0.5)
    yield row("gradients summed over cp: off from one process by less than 1e-12", True, found[0]["summed"] < 1e-12)
    yield row("not reduced: relative error of ranks 0 to 3", None, tuple(rank["skipped"] for rank in found))


@titled("cp 4, prompt tokens without loss", open_rows=1, show="ranks' means")
def mean_of_means(found: Sequence[dict[str, Any]] | None = None) -> Iterator[Row]:
    found = [rank["mean_of_means"] for rank in found or _accidents()]
    yield row("tokens that count, ranks 0 to 3", (0, 8, 16, 16), tuple(rank["tokens"] for rank in found))
    yield row("mean over all tokens: off by less than 1e-12", True, found[0]["mean over all tokens"] < 1e-12)
    yield row("mean of the ranks' means: off by more than 0.05", True, found[0]["mean of means"] > 0.05)
    yield row("    relative error of the gradient", None, found[0]["mean of means"])


@titled("relative error of each rank's output", open_rows=1)
def offsets(found: Sequence[dict[str, Any]] | None = None) -> Iterator[Row]:
    found = [rank["from_zero"] for rank in found or _accidents()]
    yield row("of ranks 0 to 3", None, tuple(found))
    yield row("rank 0: below 1e-12", True, found[0] < 1e-12)
    yield row("ranks 1 to 3: all above 0.1", True, min(found[1:]) > 0.1)


@titled("4 ranks against one process", open_rows=4)
def bug_hunt(found: Sequence[dict[str, Any]] | None = None) -> Iterator[Row]:
    found = [rank["bug_hunt"] for rank in found or _accidents()]
    yield row("output: relative error below 1e-12", True, max(rank["output"] for rank in found) < 1e-12)
    for name in ("dq", "dk", "dv"):
        yield row(f"{name} on ranks 0 to 3: relative errors", None, tuple(rank[name] for rank in found))


def _least(found: Sequence[dict[str, float]], name: str) -> float:
    return min(rank[name] for rank in found)


# Design questions.


def design_million() -> Table:
    """One layer's forward attention of an 8B model on 1M tokens and 64 GPUs, by variant, and what it holds."""
    shape, n = AttentionShape(1, 2**20, 32, 8, 128, itemsize=2), 64
    slow, fast = Hardware(FLOPS, 1e-5, ACROSS), Hardware(FLOPS, 1e-5, INSIDE)
    rows = []
    for name in ("ring", "zigzag", "hybrid", "gather"):
        busiest = max(context.flops(name, shape, n, 8)) / FLOPS
        times = [context.forward_seconds(name, shape, n, machine, 8) for machine in (slow, fast)]
        room = context.buffer_bytes(name, shape, n, 8) / 1e9
        rows.append((name, seconds(busiest), *map(seconds, times), f"{room:.2f} GB"))
    rows.append(("ulysses", "32 heads do not divide over 64", "", "", ""))
    heads = ("", "busiest rank's work", "with links of 50 GB/s", "with 400 GB/s", "K and V in buffers")
    return table("1M tokens, 64 GPUs, one layer forward", heads, rows)


def design_layout() -> Table:
    """The same model on 128k tokens: a ring over 64 across nodes, or over 8 inside one."""
    rows = []
    for cp, bandwidth, where in ((64, ACROSS, "across nodes"), (8, INSIDE, "inside a node")):
        shape = AttentionShape(1, 2**17, 32, 8, 128, itemsize=2)
        step = context.ring_flops(shape, cp)[0][1] / FLOPS
        link = Hardware(FLOPS, 1e-5, bandwidth).link(shape.block_bytes(cp))
        hides = context.hiding_length(32, 8, Hardware(FLOPS, 0, bandwidth), 2)
        rows.append((f"cp {cp}, {where}", f"{2**17 // cp:,}", seconds(step), seconds(link), f"{hides:,.0f}"))
    heads = ("", "tokens per GPU", "work on a block", "its journey", "hidden from, tokens per GPU")
    return table("128k tokens on 64 GPUs, one block of a forward ring", heads, rows)


def attention_share(seq: int = 2**20, parameters: float = 8e9, layers: int = 32, width: int = 4096) -> float:
    """Of a training step's FLOPs, what attention takes: 12·layers·width·S/2 per token beside 6 per parameter."""
    attention = 12 * layers * width * seq / 2
    return attention / (attention + 6 * parameters)


CLAIMS = (memory, exact, work, traffic, long_step, overlap, kv_never_exchanged, mean_of_means, offsets, bug_hunt)
