"""Training in every layout on the pretended node: right numbers, one device, no host wait in a step, no memory kept.

One launch for each number of ranks: starting ranks takes longer than their steps.
"""

import pytest

from minillm.comm import Group, launch
from minillm.equivalence import cases_of, compare
from minillm.train.parallel_config import ParallelConfig
from tests.engine.node.launching import all_launches_on_a_node, on_node
from tests.engine.node.steps import steps
from tests.engine.oracle.layouts import one_per_axis

# Host waits that are known: "file.py:function" -> of which layouts, and why.
POSITIONS = ("oracle.py:_positions_of", "transformer.py:forward")  # positions come from the host, once a forward pass
PERMUTED = (*POSITIONS, "exchange.py:_places", "exchange.py:__call__", "tiled.py:_tensor")  # and once a layer
DISPATCH = ("dispatch.py:of", "experts.py:forward")  # how many rows go to each expert and come from each rank
NODES = (*DISPATCH, "permute.py:sort_by_expert", "nodes.py:__call__")


def known_waits(layout: ParallelConfig) -> tuple[str, ...]:
    waits: tuple[str, ...] = ()
    if layout.cp > 1:
        waits += POSITIONS if layout.context in ("ring", "zigzag") else PERMUTED
    if layout.ep > 1:
        waits += NODES if layout.ep_nodes > 1 else DISPATCH
    return waits


HYBRIDS = [
    *(ParallelConfig(dp=2, tp=2, sequence=True, zero=zero) for zero in (0, 3)),
    *(ParallelConfig(dp=2, pp=2, accumulate=2, zero=zero) for zero in (1, 3)),
    ParallelConfig(tp=2, pp=2, accumulate=2, schedule="dualpipe"),
    ParallelConfig(dp=2, cp=2, pad=True, context="zigzag", zero=2),
    ParallelConfig(dp=2, ep=2, tp=2, sequence=True),
]
LAYOUTS = [*one_per_axis(1), *HYBRIDS]
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
    chosen = one_per_axis(1) | {layout: {"tied": cases_of(layout)["tied"]} for layout in HYBRIDS if layout.ep == 1}
    with all_launches_on_a_node():
        rows = compare(list(chosen), chosen.__getitem__, steps=2)
    assert len(rows) == len(chosen) and not [row for row in rows if not row.ok]


def test_two_replicas_train_on_a_node() -> None:
    """Fast: one launch."""
    launch(on_node(all_steps), 2, [ParallelConfig(dp=2, zero=1)], device="cuda")
