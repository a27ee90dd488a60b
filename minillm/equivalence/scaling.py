"""Weak and strong scaling of data parallelism: measured on 1 to 8 CPU ranks, extended by the planner's arithmetic.

    weak      every rank keeps its microbatches     efficiency = t(1) / t(n)
    strong    all ranks share the same batch        efficiency = t(1) / (n · t(n))

Ranks fill emulated nodes, so the curve has a cliff where the second node begins. A ring sends 2P(n-1)/n bytes per rank
on both sides of it; beyond it some of its links are between nodes, and every round waits for those.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from minillm.comm import launch
from minillm.equivalence.planner import INTER, INTRA, MODEL, PATIENCE_S, SEQ, measure, planned, this_machine, topology
from minillm.predict import comms
from minillm.predict.planner import trainer
from minillm.predict.planner.clusters import Cluster
from minillm.predict.planner.traffic import ITEM, bytes_by_axis, parameters
from minillm.predict.planner.trainer import Host
from minillm.train.parallel_config import ParallelConfig

PER_NODE = 4
MEASURED, EXTENDED = (1, 2, 4, 8), (16, 32)
MICROBATCHES = {"weak": 1, "strong": 32}  # of each rank; of all of them
MODES = tuple(MICROBATCHES)
STEPS = 3  # timed of each


@dataclass(frozen=True)
class Row:
    """One number of ranks. seconds, two_level: predicted, with one ring and with all-reduces in two levels.

    measured_seconds, measured_bytes: None where only the model goes. bytes: that one rank sends in a step, the mean
    over ranks; crossing: those that leave the busiest node.
    """

    mode: str
    ranks: int
    nodes: int
    seconds: float
    two_level: float
    bytes: float
    crossing: int
    efficiency: float
    measured_seconds: float | None = None
    measured_bytes: float | None = None
    measured_efficiency: float | None = None


def layout_of(mode: str, ranks: int) -> ParallelConfig:
    """ValueError if the batch cannot be shared by so many ranks."""
    if mode not in MODES:
        raise ValueError(f"scaling {mode!r} is none of {', '.join(MODES)}.")
    count = MICROBATCHES[mode]
    if mode == "strong":
        if count % ranks:
            raise ValueError(f"{ranks} ranks cannot share {count} microbatches equally: use a divisor of {count}.")
        count //= ranks
    return ParallelConfig(dp=ranks, accumulate=count)


def scaling(measured: Sequence[int] = MEASURED, extended: Sequence[int] = EXTENDED) -> list[Row]:
    """Weak, then strong: rows for `measured` ranks, which are run, and for `extended`, which are only predicted."""
    if not measured:
        raise ValueError("no number of ranks to run: give at least one.")
    for ranks in (*measured, *extended):
        if ranks < 1 or (ranks > PER_NODE and ranks % PER_NODE):
            raise ValueError(f"{ranks} ranks do not fill nodes of {PER_NODE}: use 1 to {PER_NODE}, or a multiple.")
    plans = {(mode, ranks): layout_of(mode, ranks) for mode in MODES for ranks in (*measured, *extended)}
    cluster, host = this_machine(max(PER_NODE, *measured), PER_NODE)
    rows = [predicted(mode, ranks, cluster, host) for mode, ranks in plans]
    found = {}
    for ranks in measured:
        chosen = [plans[mode, ranks] for mode in MODES]
        by_rank = launch(measure, ranks, chosen, STEPS, link=topology(PER_NODE), timeout=PATIENCE_S)
        for index, mode in enumerate(MODES):
            sent = sum(sum(own[index].sent.values()) for own in by_rank) / ranks
            found[mode, ranks] = by_rank[0][index].seconds, sent
    return [_with(row, found) for row in rows]


def _with(row: Row, found: dict[tuple[str, int], tuple[float, float]]) -> Row:
    if (row.mode, row.ranks) not in found:
        return row
    seconds, sent = found[row.mode, row.ranks]
    alone = found.get((row.mode, 1))
    share = alone and _efficiency(row.mode, row.ranks, alone[0], seconds)
    return replace(row, measured_seconds=seconds, measured_bytes=sent, measured_efficiency=share)


def predicted(mode: str, ranks: int, cluster: Cluster, host: Host) -> Row:
    """What the model says of the machine that was measured, with so many ranks."""

    def seconds(ranks: int, two_level: bool = False) -> float:
        here = replace(cluster, gpus=ranks, two_level=two_level)
        one = replace(host, cores=None) if ranks > cluster.gpus else host  # a real cluster has cores for every rank
        return trainer.step(MODEL, planned(layout_of(mode, ranks)), here, SEQ, one).seconds

    plan = planned(layout_of(mode, ranks))
    numel = parameters(MODEL, plan, 0)
    each = min(PER_NODE, ranks)
    crossing = max(comms.flat_ring_crossing_bytes(numel, ITEM, ranks, each))
    sent = sum(bytes_by_axis(MODEL, plan, SEQ).values()) / ranks
    time = seconds(ranks)
    share = _efficiency(mode, ranks, seconds(1), time)
    return Row(mode, ranks, max(1, ranks // PER_NODE), time, seconds(ranks, True), sent, crossing, share)


def _efficiency(mode: str, ranks: int, alone: float, seconds: float) -> float:
    return alone / seconds / (ranks if mode == "strong" else 1)


def cliff(rows: Sequence[Row]) -> str:
    """What happens between one full node and two, in bytes."""
    full = {row.ranks: row for row in reversed(rows)}  # of weak scaling, which comes first
    inside, beyond = full[PER_NODE], full[2 * PER_NODE]
    slower = INTRA.bandwidth_bytes_per_s / INTER.bandwidth_bytes_per_s
    return (
        f"From {inside.ranks} to {beyond.ranks} ranks a rank sends {beyond.bytes / inside.bytes:.2f} times as many "
        f"bytes ({inside.bytes / 1e6:.2f} and {beyond.bytes / 1e6:.2f} MB). But {beyond.crossing / 1e6:.2f} MB now "
        f"leave each node, on links {slower:g} times slower, and each of the ring's {2 * (beyond.ranks - 1)} rounds "
        f"waits for them: the step takes {beyond.seconds / inside.seconds:.1f} times as long. In two levels, each of "
        f"the node's ranks sends {beyond.crossing / PER_NODE * _shrink(beyond.ranks) / 1e6:.2f} MB across at once: "
        f"{beyond.two_level / inside.seconds:.1f} times."
    )


def _shrink(ranks: int) -> float:
    """Bytes that leave a node in two levels, over those of one ring: 2(m-1)/m P against 2(n-1)/n P, m nodes."""
    nodes = ranks // PER_NODE
    return (nodes - 1) / nodes / ((ranks - 1) / ranks)
