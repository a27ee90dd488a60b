"""minillm's collectives, made of messages, against torch.distributed's on the same backend (gloo, or NCCL on GPUs).

Both run in the same processes, on the same tensors, one thread per rank; on the CPU minillm's messages take sockets of
their own (`comm/backends/sockets.py`) over the same loopback interface. One launch per world size measures everything.
A time is that of the slowest rank. `size` is the whole tensor: what an all-reduce reduces, what an all-gather ends up
with, what a reduce-scatter starts from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from minillm.bench import comm_host
from minillm.bench.counts import settling
from minillm.bench.harness import BenchRow, Comparison, bench_row, check_repeats, seconds_per_call, side_by_side
from minillm.comm import (
    Group,
    launch,
    pairwise_all_to_all,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_broadcast,
)
from minillm.comm.backends.native import all_gather_single, reduce_scatter_single

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 8 * MIB, 32 * MIB)
WORLD_SIZES = (2, 4)
BYTES_PER_SAMPLE = 32 * MIB  # one call alone would time how the ranks come out of the barrier, too
MAX_CALLS = 20

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Contest:
    """One collective, twice. prepare(x, group) -> (ours, theirs): each does it once on x and returns the result."""

    name: str
    peer: str
    prepare: Callable[[torch.Tensor, Group], tuple[Call, Call]]


def run(
    world_sizes: Sequence[int] = WORLD_SIZES,
    sizes: Sequence[int] = SIZES,
    repeats: int = 9,
    timeout: float = 120.0,
    host: bool = False,
) -> list[BenchRow]:
    """All contests for all world sizes and sizes (bytes, float32). host: what the host alone costs (`comm_host.py`)."""
    check_repeats(repeats)
    if not all(n > 1 for n in world_sizes):
        raise ValueError(f"world sizes {list(world_sizes)} must be 2 or more: a rank alone has nobody to talk to")
    if host:
        return [row for world_size in world_sizes for row in comm_host.rows(world_size, repeats)]
    for size in sizes:
        if size <= 0 or any(size % (4 * n) for n in world_sizes):
            raise ValueError(f"size {size} must be a positive multiple of 4 bytes times the ranks {list(world_sizes)}")
    rows = []
    for world_size in world_sizes:
        ranks = launch(measure, world_size, tuple(sizes), repeats, timeout=timeout, device=None)
        backend = ranks[0][0]
        cases = [(contest, size) for contest in CONTESTS for size in sizes]
        for (contest, size), *found in zip(cases, *(comparisons for _, comparisons in ranks), strict=True):
            name = f"{contest.name}, {world_size} ranks, {format_size(size)}"
            rows.append(bench_row(name, f"{backend} {contest.peer}", slowest(found), "ms", scale=1e3))
    return rows


def measure(group: Group, sizes: Sequence[int], repeats: int) -> tuple[str, list[Comparison]]:
    """On each rank: every contest at every size. Returns the backend's name and what this rank's clock says."""
    torch.set_num_threads(1)
    torch.manual_seed(group.rank)
    return group.backend, [_compare(contest, size, group, repeats) for contest in CONTESTS for size in sizes]


def _compare(contest: Contest, size: int, group: Group, repeats: int) -> Comparison:
    x = torch.randint(-8, 9, (size // 4,), device=group.device).float()  # whole numbers: any order of adding is exact
    ours, theirs = contest.prepare(x, group)
    settle = settling(group.device)
    calls = max(1, min(MAX_CALLS, BYTES_PER_SAMPLE // size))

    def check() -> bool:
        return all(group.gather_objects(torch.equal(ours(), theirs())))

    samples = (seconds_per_call(call, calls, before=group.barrier, after=settle) for call in (ours, theirs))
    return side_by_side(check, *samples, repeats=repeats)


def slowest(found: Sequence[Comparison]) -> Comparison:
    """One comparison of all ranks': a collective has taken as long as its slowest rank."""
    pairs = zip(*(comparison.pairs for comparison in found), strict=True)
    times = tuple((max(mine for mine, _ in same), max(other for _, other in same)) for same in pairs)
    return Comparison(all(comparison.correct for comparison in found), times)


def format_size(size: int) -> str:
    return f"{size // MIB} MiB" if size % MIB == 0 else f"{size / KIB:g} KiB"


def _all_reduce(x: torch.Tensor, group: Group) -> tuple[Call, Call]:
    mine, other = x.clone(), x.clone()  # in place: repeated sums grow, which costs nothing

    def theirs() -> torch.Tensor:
        dist.all_reduce(other, group=group.process_group)
        return other

    return lambda: ring_all_reduce(mine, group), theirs


def _all_gather(x: torch.Tensor, group: Group) -> tuple[Call, Call]:
    part = x.tensor_split(group.world_size)[group.rank].clone()
    mine, other = torch.empty_like(x), torch.empty_like(x)

    def theirs() -> torch.Tensor:
        all_gather_single(other, part, group=group.process_group)
        return other

    return lambda: ring_all_gather(part, group, out=mine), theirs


def _reduce_scatter(x: torch.Tensor, group: Group) -> tuple[Call, Call]:
    mine, other = (x.new_empty(x.numel() // group.world_size) for _ in range(2))

    def theirs() -> torch.Tensor:
        reduce_scatter_single(other, x, group=group.process_group)
        return other

    return lambda: ring_reduce_scatter(x, group, out=mine), theirs


def _broadcast(x: torch.Tensor, group: Group) -> tuple[Call, Call]:
    mine, other = x.clone(), x.clone()

    def theirs() -> torch.Tensor:
        dist.broadcast(other, group=group.process_group, group_src=0)
        return other

    return lambda: tree_broadcast(mine, group, root=0), theirs


def _all_to_all(x: torch.Tensor, group: Group) -> tuple[Call, Call]:
    mine, other = torch.empty_like(x), torch.empty_like(x)

    def theirs() -> torch.Tensor:
        dist.all_to_all_single(other, x, group=group.process_group)
        return other

    return lambda: pairwise_all_to_all(x, group, out=mine), theirs


CONTESTS = (
    Contest("ring all-reduce", "all_reduce", _all_reduce),
    Contest("ring all-gather", all_gather_single.__name__, _all_gather),
    Contest("ring reduce-scatter", reduce_scatter_single.__name__, _reduce_scatter),
    Contest("tree broadcast", "broadcast", _broadcast),
    Contest("pairwise all-to-all", "all_to_all_single", _all_to_all),
)
