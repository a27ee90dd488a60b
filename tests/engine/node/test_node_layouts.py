"""Training in every layout on the pretended node: right numbers, one device, no host wait in a step, no memory kept.

One launch for each number of ranks: starting ranks takes longer than their steps.
"""

import os

import pytest

from minillm.comm import Group, launch
from minillm.equivalence import cases_of, compare
from minillm.train.parallel_config import ParallelConfig
from tests.engine.node.launching import all_launches_on_a_node, on_node
from tests.engine.node.steps import steps
from tests.engine.oracle.layouts import one_per_axis

# Host waits that are known, by caller.
POSITIONS = ("oracle.py:_positions_of",)  # of this test itself
TILES = (*POSITIONS, "tiled.py:_tensor")  # in float64 tiles are computed by Python, whose bounds come from the host
EXPERTS = ("dispatch.py:__call__", "nodes.py:__call__")  # once a layer: how many rows come from each rank


def known_waits(layout: ParallelConfig) -> tuple[str, ...]:
    waits: tuple[str, ...] = ()
    if layout.cp > 1:
        waits += TILES if layout.context == "gather" else POSITIONS
    return waits + EXPERTS if layout.ep > 1 else waits


LAYOUTS = [
    *(ParallelConfig(dp=2, zero=zero, accumulate=2) for zero in range(4)),
    ParallelConfig(tp=2, sequence=True),
    *(ParallelConfig(cp=2, pad=True, context=context) for context in ("zigzag", "ulysses", "gather")),
    *(ParallelConfig(pp=2, accumulate=2, schedule=schedule) for schedule in ("1f1b", "zero_bubble_v")),
    ParallelConfig(dp=2, ep=2, zero=2),
    ParallelConfig(dp=4, dp_replicate=2, zero=3),
    ParallelConfig(dp=2, tp=2, sequence=True, zero=3),
    ParallelConfig(dp=2, pp=2, accumulate=2, zero=1),
    ParallelConfig(tp=2, pp=2, accumulate=2, schedule="dualpipe"),
    ParallelConfig(dp=4, ep=4, ep_nodes=2),
]
SIZES = sorted({layout.world_size for layout in LAYOUTS})


def all_steps(group: Group, layouts: list[ParallelConfig]) -> None:
    for layout in layouts:
        case = next(iter(cases_of(layout).values()))
        try:
            steps(group, layout, case, *known_waits(layout))
        except RuntimeError as error:
            raise RuntimeError(f"{layout}: {error}") from error


@pytest.mark.full
@pytest.mark.parametrize("size", SIZES)
def test_a_step_neither_waits_nor_keeps_memory(size: int) -> None:
    layouts = [layout for layout in LAYOUTS if layout.world_size == size]
    launch(on_node(all_steps, keeps_tensors=False), size, layouts, device="cuda", timeout=300)


@pytest.mark.full
def test_the_oracle_gets_the_numbers_of_one_process() -> None:
    chosen = one_per_axis(1)
    if not os.environ.get("MINILLM_PROOF"):  # all of them take six minutes on two busy cores
        chosen = {layout: chosen[layout] for layout in list(chosen)[:: len(chosen) // 8]}
    with all_launches_on_a_node():
        rows = compare(list(chosen), chosen.__getitem__, steps=2)
    assert len(rows) == len(chosen) and not [row for row in rows if not row.ok]


def test_two_replicas_train_on_a_node() -> None:
    """Fast: one launch."""
    launch(on_node(all_steps), 2, [ParallelConfig(dp=2, zero=1)], device="cuda")
