"""Lab 01's measurements: bytes by three witnesses, the ring-tree crossover, two levels over a slow link."""

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from minillm import comm, measure
from minillm.comm import Group, Link, Mesh, Topology, launch
from minillm.measure.rates import LinkFit, fit_link
from minillm.predict import comms

Program = Callable[[torch.Tensor, Group], Any]
KB, MB = 1_000, 1_000_000
SIZES = tuple(4 * KB * 8**k for k in range(5))  # 4 kB to 16 MB
EMULATED_SIZES = (8 * KB, 32 * KB, 128 * KB, 512 * KB, 2048 * KB)
SLOW = Link(latency_s=10e-3, bandwidth_bytes_per_s=10e6, name="slow")
BETWEEN_NODES = Link(latency_s=5e-3, bandwidth_bytes_per_s=10e6, name="between nodes")


def tree_all_reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Tree reduce to rank 0, then tree broadcast from it."""
    comm.tree_reduce(x, group)
    return comm.tree_broadcast(x, group)


ALL_REDUCES: dict[str, tuple[Program, Callable[..., comms.Cost]]] = {
    "ring": (comm.ring_all_reduce, comms.ring_all_reduce),
    "tree": (tree_all_reduce, comms.tree_all_reduce),
    "recursive doubling": (comm.recursive_doubling_all_reduce, comms.recursive_doubling_all_reduce),
}


# Rank programs.


def bytes_moved(group: Group, programs: Mapping[str, Program], num_elements: int) -> dict[str, tuple[int, int]]:
    """(bytes this rank sent by the ledger, bytes of all ranks on the loopback) of each program on fp32 numbers.

    The loopback belongs to the whole machine, and others can only add to it: the least of three runs counts.
    """
    moved = {}
    for name, program in programs.items():
        on_the_wire = []
        for _ in range(3):
            x = torch.ones(num_elements)
            group.barrier()
            with measure.ledger() as led, measure.wire() as counter:
                group.barrier()
                program(x, group)
                group.barrier()
            on_the_wire.append(counter.sent)
        moved[name] = (led.bytes(), min(on_the_wire))
    return moved


def best_seconds(
    group: Group, programs: Mapping[str, Program], sizes: Sequence[int], repeats: int = 6, batch: int = 2
) -> dict[str, list[float]]:
    """Seconds of each program by tensor size in bytes: the slowest rank's time, the best of `repeats` sweeps.

    batch: calls that follow each other in one timing, so that starting together costs little.
    """
    best = {name: [math.inf] * len(sizes) for name in programs}
    for _ in range(repeats):
        for name, program in programs.items():
            for index, size in enumerate(sizes):
                x = torch.zeros(size // 4)
                group.barrier()
                start = time.monotonic()
                for _ in range(batch):
                    program(x, group)
                seconds = (time.monotonic() - start) / batch
                best[name][index] = min(best[name][index], max(group.gather_objects(seconds)))
    return best


# Ring against tree.


def ring_against_tree(link: Link | None = None, nproc: int = 4) -> dict[str, Any]:
    """Times of three all-reduces by size, measured; and predicted from alpha and beta.

    On the real link alpha and beta are fitted to the ring's own rounds, so the other two lines are true predictions;
    on an emulated link they are known.
    """
    sizes, how = (EMULATED_SIZES, (2, 1)) if link else (SIZES, (6, 2))
    programs = {name: program for name, (program, _) in ALL_REDUCES.items()}
    measured = launch(best_seconds, nproc, programs, sizes, *how, link=link)[0]
    fit = fit_rounds(sizes, measured["ring"], nproc)
    latency, bandwidth = (link.latency_s, link.bandwidth_bytes_per_s) if link else _line(fit)
    costs = {name: cost for name, (_, cost) in ALL_REDUCES.items()}
    predicted = {name: [c(s // 4, 4, nproc).time(latency, bandwidth) for s in sizes] for name, c in costs.items()}
    others = [name for name in costs if name != "ring"]
    return {
        "world_size": nproc,
        "emulated": link is not None,
        "latency_s": latency,
        "bandwidth_bytes_per_s": bandwidth,
        "fit_error": fit.error,
        "sizes": list(sizes),
        "measured_s": measured,
        "predicted_s": predicted,
        "predicted_crossover_bytes": {
            name: comms.crossover_bytes(costs["ring"], costs[name], nproc, latency, bandwidth) for name in others
        },
        "measured_crossover_bytes": {name: crossover(sizes, measured["ring"], measured[name]) for name in others},
    }


def fit_rounds(sizes: Sequence[int], ring_seconds: Sequence[float], nproc: int) -> LinkFit:
    """Alpha and beta of one round: a ring all-reduce is 2(N-1) rounds of messages of P/N bytes."""
    rounds = 2 * (nproc - 1)
    return fit_link(nproc, [(size // nproc, t / rounds) for size, t in zip(sizes, ring_seconds, strict=True)])


def crossover(sizes: Sequence[int], frugal: Sequence[float], quick: Sequence[float]) -> float | None:
    """Size in bytes from which on `frugal` is the faster one, interpolated between sizes; None if it never is."""
    lead = [math.log(q / f) for f, q in zip(frugal, quick, strict=True)]  # above 0: frugal is faster
    if lead[-1] <= 0:
        return None
    last = max((i for i, value in enumerate(lead) if value <= 0), default=None)
    if last is None:
        return float(sizes[0])
    share = -lead[last] / (lead[last + 1] - lead[last])
    return math.exp(math.log(sizes[last]) + share * math.log(sizes[last + 1] / sizes[last]))


# Two levels.


NODE_SIZES = (32 * KB, 256 * KB, 2 * MB)


def flat_against_two_level(flat: Program = comm.ring_all_reduce, levels: Callable | None = None) -> dict[str, Any]:
    """4 ranks on 2 emulated nodes: seconds of a flat ring and of the two-level all-reduce, measured and predicted.

    levels: a learner's function of (x, group, node, across); minillm's own if None.
    """
    topology = Topology(ranks_per_node=2, inter=BETWEEN_NODES)
    return beside_prediction(launch(_on_two_nodes, 4, flat, levels, link=topology)[0])


def _on_two_nodes(group: Group, flat: Program, levels: Callable | None) -> dict[str, list[float]]:
    mesh = Mesh(group, across=2, node=2)  # the last axis is the node: neighbouring ranks

    def over_levels(x: torch.Tensor, group: Group) -> torch.Tensor:
        return levels(x, group, mesh.node, mesh.across) if levels else two_level(x, group)

    return best_seconds(group, {"flat ring": flat, "two levels": over_levels}, NODE_SIZES, repeats=2, batch=1)


def beside_prediction(measured: dict[str, list[float]]) -> dict[str, Any]:
    """Seconds by NODE_SIZES, measured, with those that alpha and beta of the link between nodes predict."""
    wan = _line(BETWEEN_NODES)
    flat = [comms.ring_all_reduce(size // 4, 4, 4).time(*wan) for size in NODE_SIZES]
    levels = [comms.hierarchical_all_reduce(size // 4, 4, 4, 2).inter.time(*wan) for size in NODE_SIZES]
    return {
        "emulated": True,
        "latency_s": BETWEEN_NODES.latency_s,
        "bandwidth_bytes_per_s": BETWEEN_NODES.bandwidth_bytes_per_s,
        "sizes": list(NODE_SIZES),
        "measured_s": measured,
        "predicted_s": {"flat ring": flat, "two levels": levels},  # inside the node nothing is slowed down
    }


def two_level(x: torch.Tensor, group: Group) -> torch.Tensor:
    """minillm's two-level all-reduce on nodes of 2 ranks."""
    return comm.hierarchical_all_reduce(x, group, ranks_per_node=2)


# Bytes.

ELEMENTS = 2_000_000  # 8 MB of fp32
COLLECTIVES: dict[str, tuple[Program, Callable[..., comms.Cost]]] = {
    "all-reduce": (comm.ring_all_reduce, comms.ring_all_reduce),
    "reduce-scatter": (comm.ring_reduce_scatter, comms.ring_reduce_scatter),
    "all-gather": (
        lambda x, group: comm.ring_all_gather(x.chunk(group.world_size)[group.rank], group),
        comms.ring_all_gather,
    ),
    "broadcast": (comm.tree_broadcast, comms.tree_broadcast),
    "all-to-all": (comm.pairwise_all_to_all, comms.pairwise_all_to_all),
    "parameter server": (comm.parameter_server_all_reduce, comms.parameter_server_all_reduce),
    "tree reduce": (comm.tree_reduce, comms.tree_reduce),
    "recursive doubling": (comm.recursive_doubling_all_reduce, comms.recursive_doubling_all_reduce),
    "two levels": (two_level, lambda *shape: comms.hierarchical_all_reduce(*shape, 2).total),
}
TORCH_TWINS = {
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "broadcast": "broadcast",
}


def costs(nproc: int, names: Sequence[str] = tuple(COLLECTIVES), num_elements: int = ELEMENTS) -> dict[str, comms.Cost]:
    """What the formulas predict of each collective on `num_elements` numbers of 4 bytes."""
    return {name: COLLECTIVES[name][1](num_elements, 4, nproc) for name in names}


def bytes_of_collectives(nproc: int = 4, num_elements: int = ELEMENTS) -> dict[str, Any]:
    """Bytes that minillm's collectives send: predicted, by the ledger, on the wire."""
    return bytes_of({name: program for name, (program, _) in COLLECTIVES.items()}, nproc, num_elements)


def bytes_of(programs: Mapping[str, Program], nproc: int = 4, num_elements: int = ELEMENTS) -> dict[str, Any]:
    """The same of anybody's programs, called as in COLLECTIVES."""
    ranks = launch(bytes_moved, nproc, programs, num_elements)
    return beside_costs(ranks, costs(nproc, tuple(programs), num_elements), 4 * num_elements)


def bits_of_ring(group: Group, all_reduce: Program = comm.ring_all_reduce) -> tuple[bool, float]:
    """(all ranks end with the same bits, largest difference to the sum in fp64) of random numbers."""
    x = torch.randn(4 << 10, generator=torch.Generator().manual_seed(group.rank))
    mine = all_reduce(x.clone(), group)
    inputs = group.all_gather(x).view(group.world_size, -1)
    everyone = group.all_gather(mine).view(group.world_size, -1)
    return bool((everyone == everyone[0]).all()), (mine - inputs.double().sum(0)).abs().max().item()


def one_all_reduce(group: Group, all_reduce: Program = comm.ring_all_reduce) -> measure.Ledger:
    """What one all-reduce of 400 kB sends, and when; the one before it connects the ranks."""
    x = torch.ones(100_000)
    all_reduce(x, group)
    group.barrier()
    with measure.ledger() as led:
        all_reduce(x, group)
    return led


def off_by_one(x: torch.Tensor, group: Group) -> torch.Tensor:
    """A reduce-scatter with a bug."""
    n, r = group.world_size, group.rank
    chunks = list(x.clone().chunk(n))
    arriving = torch.empty_like(chunks[0])
    for s in range(n - 1):
        group.exchange(send=(chunks[(r - s) % n], (r + 1) % n), recv=(arriving, (r - 1) % n))
        chunks[(r - s - 1) % n] += arriving
    return chunks[(r + 1) % n]


def one_place_off(group: Group, all_gather: Program) -> tuple[torch.Tensor, torch.Tensor]:
    """(an all-reduce built on `off_by_one`, the right sum)."""
    x = torch.arange(8.0) * 10**group.rank
    return all_gather(off_by_one(x, group), group), comm.ring_all_reduce(x.clone(), group)


def torch_wire(group: Group, num_elements: int = ELEMENTS) -> dict[str, int]:
    """Bytes on the loopback of torch.distributed's own calls, least of three runs each."""
    warnings.simplefilter("ignore", FutureWarning)  # newer torch renames two of them, to ..._single
    x = torch.ones(num_elements)
    part, out = torch.empty(num_elements // group.world_size), torch.empty(num_elements)
    mine = x.chunk(group.world_size)[group.rank]
    calls = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(out, mine),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(part, x),
        "all_to_all_single": lambda: dist.all_to_all_single(out, x),
        "broadcast": lambda: dist.broadcast(x, src=0),
    }
    found = {}
    for name, call in calls.items():
        counts = []
        for _ in range(3):
            dist.barrier()
            with measure.wire() as counter:
                dist.barrier()
                call()
                dist.barrier()
            counts.append(counter.sent)
        found[name] = min(counts)
    return found


def beside_costs(
    ranks: Sequence[dict[str, tuple[int, int]]], costs: Mapping[str, comms.Cost], payload_bytes: int
) -> dict[str, Any]:
    """What `bytes_moved` found on every rank beside what was predicted; `busiest` is the rank that sends most."""
    rows = []
    for name, cost in costs.items():
        sent = [rank[name][0] for rank in ranks]
        row = {"name": name, "predicted": cost.total_bytes, "ledger": sum(sent), "wire": ranks[0][name][1]}
        rows.append(row | {"busiest_predicted": max(cost.sent_per_rank), "busiest_ledger": max(sent)})
    return {"world_size": len(ranks), "payload_bytes": payload_bytes, "rows": rows}


def _line(link: Link | LinkFit) -> tuple[float, float]:
    return link.latency_s, link.bandwidth_bytes_per_s
