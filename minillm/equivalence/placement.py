"""Which axis lies inside a node: the same layout with its ranks seated in another order, predicted and measured.

    order, innermost first    tp cp pp dp       0 1 | 2 3      tensor-parallel neighbours share a node
                              dp cp pp tp       0 2 | 1 3      every all-reduce of a layer crosses

A rank keeps its place in the mesh and only its seat changes (`Topology.seats`), so both runs send the same bytes of the
same tensors, and what differs is the link that each message takes. The best and the worst of all orders are run, and
the best once more with all-reduces in two levels where a group crosses nodes; the last two only if the prediction
tells them from the best.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

from minillm.comm import launch
from minillm.equivalence.planner import MODEL, PATIENCE_S, SEQ, planned, this_machine, time_steps, topology
from minillm.predict.planner import trainer
from minillm.predict.planner.clusters import Cluster
from minillm.predict.planner.layout import AXES
from minillm.predict.planner.trainer import Host
from minillm.train.parallel_config import ParallelConfig

LAYOUTS = (
    ParallelConfig(dp=4, tp=2, accumulate=2),
    ParallelConfig(dp=2, tp=2, pp=2, accumulate=4),
    ParallelConfig(dp=2, tp=2, cp=2, accumulate=2, sequence=True),
    ParallelConfig(dp=2, cp=4, accumulate=2),
)
STEPS = 3  # timed of each
NEAR = 0.05  # predictions that differ by less are one


@dataclass(frozen=True)
class Row:
    """seconds of the best order, the worst, and the best with all-reduces in two levels; measured_seconds of those that
    were run."""

    layout: str
    nodes: int
    orders: dict[str, tuple[str, ...]]
    seconds: dict[str, float]
    measured_seconds: dict[str, float]

    @property
    def ratio(self) -> float:
        """Predicted: how many times longer the worst order takes than the best."""
        return self.seconds["worst"] / self.seconds["best"]

    @property
    def measured_ratio(self) -> float | None:
        """None where every order takes as long."""
        worst = self.measured_seconds.get("worst")
        return worst and worst / self.measured_seconds["best"]


def seats(sizes: Mapping[str, int], order: Sequence[str]) -> tuple[int, ...]:
    """The seat of each rank of a mesh if seats are dealt out in `order`, innermost axis first.

    sizes: of the mesh's axes, outermost first, as `ParallelConfig.axes` has them.
    """
    found = []
    for place in product(*(range(size) for size in sizes.values())):
        at, seat, stride = dict(zip(sizes, place, strict=True)), 0, 1
        for axis in order:
            seat += stride * at[axis]
            stride *= sizes[axis]
        found.append(seat)
    return tuple(found)


def compare(
    ranks: int = 8,
    per_node: Sequence[int] = (4, 2),
    layouts: Sequence[ParallelConfig] = LAYOUTS,
    tell: Callable[[str], None] = lambda line: None,
) -> Iterator[Row]:
    """Every layout on nodes of so many ranks each, as soon as it has been run. tell: hears what is run next."""
    for size in per_node:
        tell(f"measuring links between {ranks // size} nodes")
        cluster, host = this_machine(ranks, size)
        for layout in layouts:
            expected = predicted(layout, cluster, host)
            yield _run(expected, layout, ranks, size, tell)


def predicted(layout: ParallelConfig, cluster: Cluster, host: Host) -> Row:
    """Nothing of it measured yet."""
    plan = planned(layout)

    def seconds(order: Sequence[str], two_level: bool = False) -> float:
        here = replace(cluster, two_level=two_level)
        return trainer.step(MODEL, replace(plan, order=tuple(order)), here, SEQ, host).seconds

    by_time = sorted(permutations(AXES), key=seconds)
    orders = {"best": by_time[0], "worst": by_time[-1], "two levels": by_time[0]}
    expected = {name: seconds(order, name == "two levels") for name, order in orders.items()}
    return Row(str(layout), cluster.nodes, orders, expected, {})


def worth_running(row: Row) -> list[str]:
    """The best order, and what is predicted to take another time."""
    best = row.seconds["best"]
    return [name for name, seconds in row.seconds.items() if name == "best" or abs(seconds / best - 1) > NEAR]


def _run(row: Row, layout: ParallelConfig, ranks: int, per_node: int, tell: Callable[[str], None]) -> Row:
    measured = {}
    for name in worth_running(row):
        tell(f"{row.layout}, {row.nodes} nodes, {name}: {STEPS + 1} steps of about {row.seconds[name]:.1f} s")
        links = topology(per_node, seats=seats(layout.axes, row.orders[name]), two_level=name == "two levels")
        measured[name] = launch(time_steps, ranks, layout, STEPS, link=links, timeout=PATIENCE_S)[0]
    return replace(row, measured_seconds=measured)
