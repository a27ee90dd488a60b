"""Lab 09 without ranks: every layout of 70B on 64 GPUs, published runs, and FSDP beside tensor parallelism."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations

from minillm.predict.planner import published, search
from minillm.predict.planner.architectures import Architecture, architecture
from minillm.predict.planner.clusters import GIB, Cluster, cluster
from minillm.predict.planner.layout import Layout
from minillm.predict.planner.memory import memory
from minillm.predict.planner.step import mfu, step, tensor_travel
from minillm.predict.training import sharding, tensor

# The problem of exercises 4 and 5.

SEVENTY = architecture("llama-3-70b")
SIXTY_FOUR = cluster("a100-40", 64)
SEQ, BATCH = 4096, 512
NEAR = 1.15  # times the seconds of the planner's best layout, at most


def best() -> search.Plan:
    """The planner's best layout."""
    return _best()


@cache
def _best() -> search.Plan:
    return search.rank(SEVENTY, SIXTY_FOUR, SEQ, BATCH, keep=1).best


@dataclass(frozen=True)
class Judged:
    """A layout, and what the planner's formulas say of it."""

    layout: Layout
    held: float
    seconds: float

    @property
    def fits(self) -> bool:
        return self.held <= SIXTY_FOUR.usable


def everything() -> tuple[Judged, ...]:
    """All layouts of the problem that the planner looks at."""
    return _everything()


@cache
def _everything() -> tuple[Judged, ...]:
    return tuple(judge(layout) for layout in search.layouts(SEVENTY, SIXTY_FOUR, SEQ, BATCH))


def judge(layout: Layout) -> Judged:
    held = memory(SEVENTY, layout, SEQ).total
    return Judged(layout, held, step(SEVENTY, layout, SIXTY_FOUR, SEQ).seconds)


def simple_layouts() -> Iterator[Layout]:
    """Those that exercise 4's formulas are made for: nothing computed again, plain 1F1B, stages of equal size."""
    for each in search.layouts(SEVENTY, SIXTY_FOUR, SEQ, BATCH):
        plain = each.recompute == "none" and each.chunks == 1 and each.schedule == "1f1b"
        if plain and SEVENTY.num_layers % each.pp == 0:
            yield each


def estimates(estimate: Callable) -> list[tuple[Layout, float, float]]:
    """The reader's estimate of each of them whose tp stays in a node, as `link` is a node's: bytes and seconds."""
    found = []
    for layout in simple_layouts():
        rate = SIXTY_FOUR.device.matmul_rate(SEVENTY.hidden_size / layout.tp)
        link = SIXTY_FOUR.device.link * SIXTY_FOUR.link_efficiency
        if layout.tp <= SIXTY_FOUR.per_node:
            found.append((layout, *estimate(SEVENTY, layout, SEQ, rate, link)))
    return found


# Orders of axes.


def crossing_orders(model: Architecture, machine: Cluster, layout: Layout, seq: int) -> list[tuple[tuple, float]]:
    """Seconds of a step for each order of the axes that have more than one rank, fastest first."""
    used = [axis for axis in layout.order if layout.size(axis) > 1]
    others = [axis for axis in layout.order if layout.size(axis) == 1]
    rows = []
    for order in permutations(used):
        seated = replace(layout, order=(*order, *others))
        rows.append((order, step(model, seated, machine, seq).seconds))
    return sorted(rows, key=lambda row: row[1])


def tensor_across(tp: int, per_node: int = 8) -> tuple[float, float]:
    """Seconds that a layer of 70B's tensor-parallel messages take over tp ranks of H100: innermost, and outermost."""
    machine = cluster("h100", 64, per_node=per_node)
    layout = Layout(dp=64 // tp, tp=tp)
    outer = replace(layout, order=("dp", "cp", "pp", "tp"))
    return tuple(tensor_travel(SEVENTY, each, machine, SEQ) for each in (layout, outer))


# FSDP beside tensor parallelism.


def layer_traffic(hidden: int, tokens: int, ranks: int, squares: float = 12.0) -> tuple[float, float]:
    """Bytes that a rank sends for one layer and microbatch in 16 bits: fully sharded, tensor parallel.

    tokens: of the microbatch that the whole group works on; squares: parameters of a layer / hidden².
    """
    sharded = sharding.fully_shard_traffic([round(squares * hidden**2)], 0, ranks, itemsize=2).bytes
    return sharded, tensor.layer_bytes(1, tokens, hidden, 2, ranks)


def equal_tokens(hidden: int, squares: float = 12.0) -> float:
    """Tokens of a microbatch at which both send the same: 3 · squares · H² = 4 · 2 · T · H."""
    return 3 * squares * hidden / 8


def squares(model: Architecture) -> float:
    """Parameters of a layer / hidden²."""
    return model.active_layer / model.hidden_size**2


# Published runs.


def published_rows() -> list[tuple[str, str, float, float, float, float]]:
    """(run, axes, reported, by formula, GiB held, GiB usable)."""
    rows = []
    for run in published.CHOSEN:
        found = published.compare(run)
        each = run.layout
        axes = " · ".join(f"{axis} {each.size(axis)}" for axis in ("tp", "cp", "pp", "dp", "ep") if each.size(axis) > 1)
        rows.append((run.name, axes, found.reported, found.predicted, found.memory / GIB, found.usable / GIB))
    return rows


# Design questions.


@dataclass(frozen=True)
class Design:
    """A layout on a cluster: seconds of a step, share of the peak, GiB held."""

    name: str
    layout: Layout
    seconds: float
    share: float
    held: float


def designs(model: Architecture, machine: Cluster, seq: int, layouts: dict[str, Layout]) -> list[Design]:
    rows = []
    for name, layout in layouts.items():
        seconds = step(model, layout, machine, seq).seconds
        share = mfu(model, layout, machine, seq, seconds)
        rows.append(Design(name, layout, seconds, share, memory(model, layout, seq).total / GIB))
    return rows
