"""What ranks run in the collective tests: cases drawn in the parent, run on every rank, compared with torch's.

Kept apart from the tests because ranks import it: it needs neither pytest nor hypothesis.
"""

import random
from dataclasses import dataclass

import torch
import torch.distributed as dist

import minillm.comm as comm
from minillm.measure import ledger

SEGMENT_BYTES = 2 << 20  # one message of a ring that adds holds no more than this
ROOTED = ("tree_broadcast", "tree_reduce", "parameter_server_all_reduce", "Group.broadcast")
EVEN = ("Group.reduce_scatter", "Group.all_to_all", "pairwise_all_to_all")  # dimension 0 must divide
NAMES = (
    "ring_all_reduce", "ring_reduce_scatter", "ring_all_gather", "tree_broadcast", "tree_reduce",
    "recursive_doubling_all_reduce", "hierarchical_all_reduce", "pairwise_all_to_all", "parameter_server_all_reduce",
    "Group.all_reduce", "Group.broadcast", "Group.all_gather", "Group.reduce_scatter", "Group.all_to_all",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One collective call. `name` is a function of minillm.comm, or "Group." and a method's name."""

    name: str
    shape: tuple[int, ...]
    layout: str  # contiguous, transposed, strided, offset
    dtype: torch.dtype
    op: str = "sum"
    root: int = 0
    ranks_per_node: int = 1
    async_op: bool = False
    uneven: bool = False  # all-gather into `out`, from chunks of different sizes
    seed: int = 0

    @property
    def kind(self) -> str:
        return self.name.removeprefix("Group.")


def split(count: int, parts: int) -> list[int]:
    return [count // parts + (i < count % parts) for i in range(parts)]


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in another memory layout."""
    if layout == "transposed" and x.dim() >= 2:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided" and x.dim() >= 1:
        wide = x.new_zeros((*x.shape[:-1], 2 * x.shape[-1]))
        wide[..., ::2] = x
        return wide[..., ::2]
    if layout == "offset":
        return x.new_zeros(x.numel() + 3)[3:].view(x.shape).copy_(x)
    return x.clone()


def values(case: Case, rank: int, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """What `rank` puts in: small whole numbers, so that sums are exact in every dtype and any order."""
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)
    x = torch.randint(-8, 9, case.shape if shape is None else shape, generator=generator)
    if case.dtype.is_complex:
        return torch.complex(x.float(), (x + 1).float()).to(case.dtype)
    return x > 0 if case.dtype == torch.bool else x.to(case.dtype)


def start(case: Case, group: comm.Group, x: torch.Tensor):
    """Call the collective; returns its result or its handle."""
    options = {"out": x.new_empty(case.shape)} if case.uneven else {}
    options |= {"op": case.op} if "reduce" in case.name else {}
    options |= {"root": case.root} if case.name in ROOTED else {}
    options |= {"ranks_per_node": case.ranks_per_node} if case.kind == "hierarchical_all_reduce" else {}
    options |= {"async_op": True} if case.async_op else {}
    if case.name.startswith("Group."):
        return getattr(group, case.kind)(x, **options)
    return getattr(comm, case.name)(x, group, **options)


def expected(case: Case, group: comm.Group) -> torch.Tensor:
    """The result by the definition, from all ranks' inputs."""
    n, kind = group.world_size, case.kind
    if case.uneven:
        return torch.cat([values(case, rank, (size,)) for rank, size in enumerate(split(case.shape[0], n))])
    inputs = [values(case, rank) for rank in range(n)]
    if kind.endswith("broadcast"):
        return inputs[case.root]
    if kind.endswith("all_gather"):
        return torch.cat([x.reshape(1) if x.dim() == 0 else x for x in inputs])
    if kind.endswith("all_to_all"):
        return torch.cat([x.tensor_split(n)[group.rank] for x in inputs])
    stacked = torch.stack(inputs)
    total = stacked.amax(0) if case.op == "max" else stacked.amin(0) if case.op == "min" else stacked.sum(0)
    total = (total / n if case.op == "avg" else total).to(case.dtype)
    if kind == "ring_reduce_scatter":
        return total.flatten().tensor_split(n)[group.rank]
    if kind == "reduce_scatter":
        return total.tensor_split(n)[group.rank]
    return inputs[group.rank] if kind == "tree_reduce" and group.rank != case.root else total


def by_torch(case: Case, group: comm.Group) -> torch.Tensor | None:
    """The result of torch.distributed's own collective; None where gloo has none for this dtype or operation."""
    n, kind, pg = group.world_size, case.kind, group.process_group
    if case.op == "avg" or case.uneven or not case.shape or case.dtype in (torch.bool, torch.complex64):
        return None
    op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[case.op]
    x = values(case, group.rank)
    if kind.endswith("broadcast"):
        dist.broadcast(x, group.ranks[case.root], pg)
    elif kind == "tree_reduce":
        dist.reduce(x, group.ranks[case.root], op, pg)
        x = x if group.rank == case.root else values(case, group.rank)  # torch leaves partial sums elsewhere
    elif kind.endswith("all_gather"):
        parts = [torch.empty_like(x) for _ in range(n)]
        dist.all_gather(parts, x, pg)
        x = torch.cat(parts)
    elif kind.endswith("all_to_all"):
        mixed, x = x, torch.empty_like(x)
        dist.all_to_all_single(x, mixed, group=pg)
    else:
        dist.all_reduce(x, op, pg)
        if kind == "ring_reduce_scatter":
            x = x.flatten().tensor_split(n)[group.rank]
        elif kind == "reduce_scatter":
            x = x.tensor_split(n)[group.rank]
    return x


def sent(case: Case, n: int) -> tuple[list[int], list[int]]:
    """(bytes, messages) that each rank sends, by playing the algorithm's definition message by message."""
    item, root, kind, everybody = case.dtype.itemsize, case.root, case.kind, list(range(n))
    numel = torch.Size(case.shape).numel()
    wire: list[tuple[int, int]] = []  # (sender, elements)

    def pieces(ranks: list[int], count: int) -> int:
        return max(1, -(-split(count, len(ranks))[0] * item // SEGMENT_BYTES))

    def scatter(ranks: list[int], count: int) -> None:
        for place, rank in enumerate(ranks):  # every chunk but its own passes through a rank
            others = [size for chunk, size in enumerate(split(count, len(ranks))) if chunk != place]
            wire.extend((rank, piece) for size in others for piece in split(size, pieces(ranks, count)))

    def gather(ranks: list[int], count: int, cut: int = 1) -> None:
        for place, rank in enumerate(ranks):  # every chunk but the right neighbour's own
            chunks = enumerate(split(count, len(ranks)))
            others = [size for chunk, size in chunks if chunk != (place + 1) % len(ranks)]
            wire.extend((rank, piece) for size in others for piece in split(size, cut))

    def both(ranks: list[int], count: int) -> None:
        scatter(ranks, count)
        gather(ranks, count, pieces(ranks, count))

    if kind in ("ring_all_reduce", "all_reduce"):
        both(everybody, numel)
    elif kind in ("ring_reduce_scatter", "reduce_scatter"):
        scatter(everybody, numel)
    elif kind.endswith("all_gather"):
        gather(everybody, numel if case.uneven else numel * n)
    elif kind.endswith("broadcast"):
        have = 1  # places that have x after so many rounds
        while have < n:
            wire.extend(((place + root) % n, numel) for place in range(have) if place + have < n)
            have *= 2
    elif kind == "tree_reduce":
        wire.extend((rank, numel) for rank in everybody if rank != root)
    elif kind == "recursive_doubling_all_reduce":
        power = max(p for p in (1, 2, 4, 8) if p <= n)
        wire.extend((rank, numel) for rank in range(power) for bit in (1, 2, 4) if bit < power)
        wire.extend((place, numel) for rank in range(power, n) for place in (rank, rank - power))
    elif kind == "hierarchical_all_reduce":
        g = case.ranks_per_node
        for first in range(0, n, g):
            scatter(everybody[first : first + g], numel)
            gather(everybody[first : first + g], numel)
        for local, count in enumerate(split(numel, g)):
            both(everybody[local::g], count)
    elif kind.endswith("all_to_all"):
        wire.extend((rank, numel // n) for rank in everybody for _ in range(n - 1))
    elif kind == "parameter_server_all_reduce":
        wire.extend((place, numel) for rank in everybody if rank != root for place in (rank, root))
    else:
        raise ValueError(f"no enumeration for {kind}")
    sizes = [[count * item for sender, count in wire if sender == rank and count] for rank in everybody]
    return [sum(rank) for rank in sizes], [len(rank) for rank in sizes]


def check(case: Case, group: comm.Group) -> str:
    """Run one case on this rank; returns what is wrong, or nothing."""
    n, kind = group.world_size, case.kind
    shape = (split(case.shape[0], n)[group.rank],) if case.uneven else None
    x = laid_out(values(case, group.rank, shape), case.layout)
    before = x.clone()
    with ledger() as led:
        result = start(case, group, x)
        result = result.wait() if case.async_op else result
    want = expected(case, group)
    if result.shape != want.shape or result.dtype != want.dtype or not torch.equal(result, want):
        return f"is {result.tolist()}, by definition {want.tolist()}"
    peer = by_torch(case, group)
    if peer is not None and not torch.equal(result, peer):
        return f"is {result.tolist()}, by torch {peer.tolist()}"
    in_place = kind.endswith(("all_reduce", "broadcast", "tree_reduce"))
    if in_place and result is not x:
        return "did not return its own tensor"
    if not in_place and (not torch.equal(x, before) or (result.numel() and result.data_ptr() == x.data_ptr())):
        return "changed or returned its input"
    want_bytes, want_messages = sent(case, n)
    if (led.bytes(), led.messages) != (want_bytes[group.rank], want_messages[group.rank]):
        return f"sent {led.bytes()} bytes in {led.messages} messages, not {want_bytes} in {want_messages}"
    if led.calls != {kind: 1} or led.events[0].shape != tuple(x.shape) or not led.events[0].counted:
        return f"was recorded as {led.events}"
    return ""


def run_cases(group: comm.Group, cases: list[Case]) -> list[str]:
    """Every rank runs all cases in the same order."""
    problems = [(case, check(case, group)) for case in cases]
    return [f"rank {group.rank} of {group.world_size}: {case} {problem}" for case, problem in problems if problem]


def run_in_flight(group: comm.Group, batches: list[list[Case]], seed: int) -> list[str]:
    """A batch is started on three groups before any handle is waited for, in an order of each rank's own."""
    n = group.world_size
    some = group.subgroup(range(0, n, 2), "even")
    rest = group.subgroup(range(1, n), "all but the first")
    groups, order, found = [group, some, rest], random.Random(seed + group.rank), []
    for batch in batches:
        handles = []
        for i, case in enumerate(batch):
            where = groups[i % 3]
            if where.rank >= 0:
                x = laid_out(values(case, where.rank), case.layout)
                handles.append((case, where, start(case, where, x)))
        order.shuffle(handles)
        for case, where, handle in handles:
            result, want = handle.wait(), expected(case, where)
            if not torch.equal(result, want) or not handle.done() or handle.wait() is not result:
                found.append(f"rank {where.rank} in {where.name}: {case} is {result.tolist()}, not {want.tolist()}")
    return found


def run_messages(group: comm.Group, count: int, seed: int) -> list[str]:
    """Each pair exchanges `count` messages of random sizes, all in flight at once, waited for in any order."""
    n, r, found = group.world_size, group.rank, []
    sizes, order = random.Random(seed), random.Random(seed + group.rank)
    plan = [(a, b, sizes.choice([0, 1, 7, 1000, 40_000])) for _ in range(count) for a in range(n) for b in range(n)]
    handles = []
    with ledger() as led:
        for i, (src, dst, size) in enumerate(plan):
            want = torch.arange(size) + i
            if r in (src, dst) and src != dst:
                buffer = want if r == src else torch.empty(size, dtype=torch.int64)
                call = group.send if r == src else group.recv
                handles.append((call(buffer, dst if r == src else src, async_op=True), buffer, want))
        order.shuffle(handles)
        for handle, buffer, want in handles:
            handle.wait()
            if not torch.equal(buffer, want):
                found.append(f"rank {r} received {buffer[:3]}..., not {want[:3]}...")
    total = sum(8 * size for src, dst, size in plan if src == r != dst)
    if led.bytes() != total or led.calls != {"send": count * (n - 1), "recv": count * (n - 1)}:
        found.append(f"rank {r} recorded {led.bytes()} bytes of {total} and {led.calls}")
    return found
