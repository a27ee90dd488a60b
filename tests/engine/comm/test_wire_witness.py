"""The kernel's loopback counters, which nothing of minillm writes, see the bytes that the formulas promise."""

import pytest
import torch

from minillm.comm import launch, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from minillm.measure import ledger, wire
from minillm.predict import comms

pytestmark = pytest.mark.wire

NUMEL = 6_000_000  # 24 MB of float32


def witness(group, name):
    n = group.world_size
    x = torch.ones(NUMEL // n if name == "ring_all_gather" else NUMEL)
    call = {"ring_all_reduce": ring_all_reduce, "ring_reduce_scatter": ring_reduce_scatter}.get(name, ring_all_gather)
    call(x.clone(), group)  # connections are made
    seen = []
    for _ in range(4):
        group.barrier()
        with ledger() as led, wire() as on_wire:
            group.barrier()  # nobody sends before everybody has read the counters
            call(x, group)
            group.barrier()
        seen.append(on_wire.sent)
        group.barrier()
    return min(seen), led.bytes(name)  # other programs only ever add to the counters


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["ring_all_reduce", "ring_reduce_scatter", "ring_all_gather"])
def test_loopback_counters_agree(name: str, world_size: int) -> None:
    results = launch(witness, world_size, name)
    cost = getattr(comms, name)(NUMEL, 4, world_size)
    assert tuple(sent for _, sent in results) == cost.sent_per_rank
    share = (2 if name == "ring_all_reduce" else 1) * (world_size - 1) / world_size
    assert cost.total_bytes == world_size * share * NUMEL * 4
    assert results[0][0] == pytest.approx(cost.total_bytes, rel=0.03)
