"""All layouts of a model on a cluster: those that fit, fastest first, and why the others are slower.

Enumerated: tp (a divisor of the heads, powers of two), cp (powers of two), pp (any divisor of the GPUs that leaves at
most an eighth of the layer slots empty), ep (divisors of the experts), ZeRO 0 to 3, microbatches of 1 to 8 sequences,
chunks (interleaved pipelines), DualPipe where experts are spread, and what is recomputed. Data parallelism
takes whatever is left.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from minillm.predict.planner.architectures import Architecture
from minillm.predict.planner.clusters import GIB, Cluster
from minillm.predict.planner.layout import RECOMPUTE, Layout
from minillm.predict.planner.memory import Memory, memory
from minillm.predict.planner.step import Step, mfu, step

MICRO_BATCHES = (1, 2, 4, 8)
EMPTY_SLOTS = 1 / 8  # at most, of a pipeline's layer slots
TIE = 0.005  # layouts within this share of each other's time count as equally fast; then the simpler one comes first
CAUSES = {
    "compute": "computes more (recomputation, uneven stages or narrow matrix products)",
    "elementwise": "reads and writes more activations (recomputation, no sequence parallelism)",
    "tp": "waits longer for tensor-parallel collectives",
    "cp": "waits longer for keys and values of other ranks",
    "ep": "waits longer for all-to-alls between experts",
    "bubble": "idles longer in the pipeline's bubble",
    "pp": "waits longer for messages between stages",
    "dp": "waits longer for gradients and weights of the data-parallel group",
    "optimizer": "reads and writes more optimizer state per rank",
}


@dataclass(frozen=True)
class Plan:
    """One layout and what is predicted for it."""

    layout: Layout
    memory: Memory
    step: Step
    mfu: float
    tokens_per_s: float


@dataclass(frozen=True)
class Ranking:
    """plans: those that fit, best first. tried: layouts looked at."""

    plans: list[Plan]
    tried: int

    @property
    def best(self) -> Plan:
        return self.plans[0]


def rank(model: Architecture, cluster: Cluster, seq: int, batch: int, keep: int = 10) -> Ranking:
    """The `keep` best meshes that fit, each with its best setting: fastest first, of those equally fast the simplest.

    batch: sequences per step.

    ValueError if no layout has so many ranks and sequences, or if nothing fits: by how much the closest misses.
    """
    if seq < 1 or batch < 1:
        raise ValueError(f"a sequence of {seq} tokens and a batch of {batch} sequences: give at least 1 of each.")
    fitting: list[tuple[float, float, Layout, Memory]] = []
    closest, tried = None, 0
    for layout in layouts(model, cluster, seq, batch):
        tried += 1
        held = memory(model, layout, seq)
        if held.total <= cluster.usable:
            fitting.append((step(model, layout, cluster, seq).seconds, held.total, layout, held))
        elif closest is None or held.total < closest[1].total:
            closest = (layout, held)
    if not tried:
        raise ValueError(
            f"no layout divides {cluster.gpus} GPUs, {model.num_layers} layers and a batch of {batch} sequences: "
            "try a batch that is a multiple of the GPUs, or another number of GPUs."
        )
    if not fitting:
        raise ValueError(_nothing_fits(model, cluster, *closest))
    fitting.sort(key=lambda each: (round(math.log(each[0]) / TIE), _complexity(each[2]), each[1]))
    axes: dict[tuple, tuple[Layout, Memory]] = {}  # the best setting of each mesh
    for _, _, layout, held in fitting:
        axes.setdefault((layout.dp, layout.tp, layout.cp, layout.pp, layout.ep), (layout, held))
    plans = [_plan(model, cluster, seq, layout, held) for layout, held in list(axes.values())[:keep]]
    return Ranking(plans, tried)


def explain(best: Plan, other: Plan) -> str:
    """Why `other` is slower: the cause that costs it most, and what it has that `best` has not."""
    ours, theirs = asdict(best.step), asdict(other.step)
    cause = max(CAUSES, key=lambda name: theirs[name] - ours[name])
    late = other.step.seconds - best.step.seconds
    if late <= TIE * best.step.seconds:
        return f"as fast within {TIE:.1%}, but not simpler"
    return f"{late / best.step.seconds:+.1%}: {CAUSES[cause]}, {theirs[cause] - ours[cause]:+.3g} s"


def layouts(model: Architecture, cluster: Cluster, seq: int, batch: int) -> Iterator[Layout]:
    """All layouts that have as many ranks as the cluster has GPUs and split the batch evenly."""
    for tp in _powers(min(cluster.gpus, 2 * cluster.per_node, model.num_heads)):
        if model.num_heads % tp:
            continue
        for pp in _stages(model, cluster.gpus // tp if cluster.gpus % tp == 0 else 0):
            rest = cluster.gpus // (tp * pp)
            for cp in _powers(min(rest, max(1, seq // 2048))):
                if rest % cp == 0 and (cp == 1 or seq % (2 * cp) == 0) and batch % (rest // cp) == 0:
                    yield from _settings(model, tp, pp, cp, rest // cp, batch // (rest // cp))


def _settings(model: Architecture, tp: int, pp: int, cp: int, dp: int, sequences: int) -> Iterator[Layout]:
    slots = -(-model.num_layers // pp)
    experts = [ep for ep in _powers(max(1, model.experts)) if (dp * cp) % ep == 0 and max(1, model.experts) % ep == 0]
    for micro in MICRO_BATCHES:
        if sequences % micro:
            continue
        count = sequences // micro
        chunks = [1] + [c for c in range(2, slots + 1) if pp > 1 and slots % c == 0 and count % pp == 0]
        for parts in chunks:
            if parts > 1 and -(-model.num_layers // (pp * parts)) * parts != slots:
                continue
            for zero in range(4) if dp * cp > 1 else (0,):
                for ep in experts:
                    for recompute in RECOMPUTE:
                        yield Layout(dp, zero, tp, cp, pp, ep, parts, micro, count, recompute)
                        if ep > 1 and parts == 1 and zero < 2 and pp % 2 == 0 and count >= 2 * pp:
                            yield Layout(dp, zero, tp, cp, pp, ep, 1, micro, count, recompute, schedule="dualpipe")


def _complexity(layout: Layout) -> int:
    """How much a layout has that can go wrong: axes, interleaving, sharding, recomputation."""
    axes = sum(size > 1 for size in (layout.tp, layout.cp, layout.pp, layout.ep))
    return 2 * axes + (layout.chunks > 1) + layout.zero + list(RECOMPUTE).index(layout.recompute)


def _plan(model: Architecture, cluster: Cluster, seq: int, layout: Layout, held: Memory) -> Plan:
    time = step(model, layout, cluster, seq)
    share = mfu(model, layout, cluster, seq, time.seconds)
    return Plan(layout, held, time, share, layout.batch * seq / time.seconds)


def _nothing_fits(model: Architecture, cluster: Cluster, layout: Layout, held: Memory) -> str:
    missing = held.total - cluster.usable
    kinds = asdict(held)
    most = max(kinds, key=kinds.__getitem__)
    state = held.weights + held.gradients + held.optimizer
    needed = round(state * cluster.gpus / cluster.usable) // cluster.per_node * cluster.per_node + cluster.per_node
    advice = (
        f"states alone need about {needed} GPUs of this kind"
        if state > cluster.usable
        else "a shorter sequence, more context-parallel ranks or a larger device would help"
    )
    return (
        f"no layout of {model.name} fits into {cluster.gpus} x {cluster.device.name}: the closest ({layout}) takes "
        f"{held.total / GIB:.1f} of {cluster.usable / GIB:.1f} usable GiB per GPU, {missing / GIB:.1f} too many, most "
        f"of them {most} ({kinds[most] / GIB:.1f}); {advice}."
    )


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def _stages(model: Architecture, ranks: int) -> list[int]:
    """Numbers of pipeline stages that divide `ranks` and leave few layer slots empty."""
    fitting = []
    for pp in range(1, min(ranks, model.num_layers) + 1):
        if ranks % pp == 0 and -(-model.num_layers // pp) * pp * (1 - EMPTY_SLOTS) <= model.num_layers:
            fitting.append(pp)
    return fitting
