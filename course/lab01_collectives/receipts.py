"""Stop 01: every collective once on real ranks: the right values, the predicted bytes and messages, on the wire too."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from minillm import comm
from minillm.comm import Group, Link, Topology, launch
from minillm.labkit.receipts import Row, row
from minillm.measure import ledger, wire
from minillm.predict import comms

WORLD, ELEMENTS = 4, 2 << 20  # 8 MiB of fp32
COLLECTIVES: dict[str, tuple[Callable, comms.Cost]] = {
    "ring reduce-scatter": (comm.ring_reduce_scatter, comms.ring_reduce_scatter(ELEMENTS, 4, WORLD)),
    "ring all-gather": (
        lambda x, group: comm.ring_all_gather(x.tensor_split(group.world_size)[group.rank], group),
        comms.ring_all_gather(ELEMENTS, 4, WORLD),
    ),
    "ring all-reduce": (comm.ring_all_reduce, comms.ring_all_reduce(ELEMENTS, 4, WORLD)),
    "tree broadcast": (comm.tree_broadcast, comms.tree_broadcast(ELEMENTS, 4, WORLD)),
    "tree reduce": (comm.tree_reduce, comms.tree_reduce(ELEMENTS, 4, WORLD)),
    "recursive doubling": (
        comm.recursive_doubling_all_reduce,
        comms.recursive_doubling_all_reduce(ELEMENTS, 4, WORLD),
    ),
    "two-level all-reduce": (
        lambda x, group: comm.hierarchical_all_reduce(x, group, ranks_per_node=2),
        comms.hierarchical_all_reduce(ELEMENTS, 4, WORLD, 2).total,
    ),
    "pairwise all-to-all": (comm.pairwise_all_to_all, comms.pairwise_all_to_all(ELEMENTS, 4, WORLD)),
    "parameter server": (comm.parameter_server_all_reduce, comms.parameter_server_all_reduce(ELEMENTS, 4, WORLD)),
}
LINK = Link(latency_s=2e-3, bandwidth_bytes_per_s=20e6, name="between nodes")


def rows() -> Iterator[Row]:
    """Bytes by ledger (exact) and by wire (3 %), values, and the two-level all-reduce on an emulated slow link."""
    ranks = launch(_run_all, WORLD)
    for name, (_, cost) in COLLECTIVES.items():
        sent = [rank[name]["bytes"] for rank in ranks]
        yield row(f"{name}: bytes sent by each rank", _short(cost.sent_per_rank), _short(sent), "B")
        yield row(f"{name}: bytes on the wire", cost.total_bytes, ranks[0][name]["wire"], "B", tolerance=0.03)
        yield row(f"{name}: the right values on every rank", True, all(rank[name]["right"] for rank in ranks))

    seconds = launch(_flat_and_two_level, WORLD, link=Topology(2, LINK))
    flat, two_level = (max(rank[i] for rank in seconds) for i in range(2))
    wan = (LINK.latency_s, LINK.bandwidth_bytes_per_s)
    yield row(
        "emulated slow link between nodes: flat ring",
        comms.ring_all_reduce(ELEMENTS // 2, 4, WORLD).time(*wan),
        flat,
        "s",
        tolerance=0.5,
    )
    yield row(
        "emulated slow link between nodes: two levels",
        comms.hierarchical_all_reduce(ELEMENTS // 2, 4, WORLD, 2).inter.time(*wan),
        two_level,
        "s",
        tolerance=0.5,
    )


def _short(values: Iterable[int]) -> int | list[int]:
    """One number where all ranks have the same."""
    values = list(values)
    return values[0] if len(set(values)) == 1 else values


def _run_all(group: Group) -> dict[str, dict[str, Any]]:
    """Each collective on 8 MiB: bytes this rank sent, bytes on the loopback, and whether the values are right.

    The loopback belongs to the whole machine, and what others send can only add: the least of three runs counts.
    """
    inputs = [_numbers(rank) for rank in range(group.world_size)]
    found = {}
    for name, (collective, _) in COLLECTIVES.items():
        on_the_wire = []
        for _ in range(3):
            x = inputs[group.rank].clone()
            group.barrier()
            with ledger() as led, wire() as counter:
                group.barrier()
                result = collective(x, group)
                group.barrier()
            on_the_wire.append(counter.sent)
        right = torch.equal(result, _expected(name, inputs, group.rank))
        found[name] = {"bytes": led.bytes(), "wire": min(on_the_wire), "right": right}
    return found


def _numbers(rank: int) -> torch.Tensor:
    """Small whole numbers, so that sums are exact in any order."""
    return torch.randint(-64, 64, (ELEMENTS,), generator=torch.Generator().manual_seed(rank)).float()


def _expected(name: str, inputs: list[torch.Tensor], rank: int) -> torch.Tensor:
    total, n = torch.stack(inputs).sum(0), len(inputs)
    special = {
        "ring reduce-scatter": lambda: total.tensor_split(n)[rank],
        "ring all-gather": lambda: torch.cat([x.tensor_split(n)[r] for r, x in enumerate(inputs)]),
        "tree broadcast": lambda: inputs[0],
        "tree reduce": lambda: total if rank == 0 else inputs[rank],
        "pairwise all-to-all": lambda: torch.cat([x.tensor_split(n)[rank] for x in inputs]),
    }
    return special.get(name, lambda: total)()


def _flat_and_two_level(group: Group) -> tuple[float, float]:
    """Seconds of a 4 MiB all-reduce over one ring and over two levels, two nodes of two ranks."""
    x = torch.ones(ELEMENTS // 2)
    seconds = []
    for collective in (comm.ring_all_reduce, lambda x, g: comm.hierarchical_all_reduce(x, g, ranks_per_node=2)):
        group.barrier()
        start = time.perf_counter()
        collective(x, group)
        seconds.append(time.perf_counter() - start)
    return seconds[0], seconds[1]


CLAIMS = (rows,)
