"""Which axis lies inside a node: the same layout with its ranks seated in another order, predicted and measured.

    order, innermost first    tp cp pp dp       0 1 | 2 3      tensor-parallel neighbours share a node
                              dp cp pp tp       0 2 | 1 3      every all-reduce of a layer crosses

A rank keeps its place in the mesh and only its seat changes (`Topology.seats`), so both runs send the same bytes of the
same tensors, and what differs is the link that each message takes. The best and the worst of all orders are run, and
the best once more with all-reduces in two levels where a group crosses nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

from minillm.bench.planner import MODEL, PATIENCE_S, SEQ, measure, planned, this_machine, topology
from minillm.comm import launch
from minillm.predict.planner import trainer
from minillm.predict.planner.layout import AXES
from minillm.train.parallel_config import ParallelConfig

LAYOUTS = (
    ParallelConfig(dp=4, tp=2, accumulate=2),
    ParallelConfig(dp=2, tp=2, pp=2, accumulate=4),
    ParallelConfig(dp=2, tp=2, cp=2, accumulate=2, sequence=True),
    ParallelConfig(dp=2, cp=4, accumulate=2),
)
STEPS = 3  # timed of each


@dataclass(frozen=True)
class Row:
    """seconds and measured_seconds of the best order, the worst, and the best with all-reduces in two levels."""

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
    def measured_ratio(self) -> float:
        return self.measured_seconds["worst"] / self.measured_seconds["best"]


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


def compare(ranks: int = 8, per_node: Sequence[int] = (4, 2), layouts: Sequence[ParallelConfig] = LAYOUTS) -> list[Row]:
    """Every layout on nodes of so many ranks each."""
    return [row for size in per_node for row in _on(ranks, size, layouts)]


def _on(ranks: int, per_node: int, layouts: Sequence[ParallelConfig]) -> list[Row]:
    cluster, host = this_machine(ranks, per_node)
    rows = []
    for layout in layouts:
        plan = planned(layout)

        def seconds(order: Sequence[str], two_level: bool = False, plan=plan) -> float:
            here = replace(cluster, two_level=two_level)
            return trainer.step(MODEL, replace(plan, order=tuple(order)), here, SEQ, host).seconds

        by_time = sorted(permutations(AXES), key=seconds)
        orders = {"best": by_time[0], "worst": by_time[-1], "two levels": by_time[0]}
        expected = {name: seconds(order, name == "two levels") for name, order in orders.items()}
        measured = {}
        for name, order in orders.items():
            links = topology(per_node, seats=seats(layout.axes, order), two_level=name == "two levels")
            measured[name] = launch(measure, ranks, [layout], STEPS, link=links, timeout=PATIENCE_S)[0][0][2]
        rows.append(Row(str(layout), ranks // per_node, orders, expected, measured))
    return rows
