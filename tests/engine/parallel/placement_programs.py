"""What ranks run in the tests of placements."""

import math

import torch

from minillm.measure import ledger
from minillm.parallel.sharding.gather import gather
from minillm.parallel.sharding.placement import (
    FlatShard,
    Partial,
    Placement,
    Replicate,
    Shard,
    global_norm,
    sum_partial,
)  # fmt: skip

KINDS = {"replicated": (5, 4), "rows": (7, 3), "columns": (4, 5), "kv": (6, 2), "norm": (6,), "scalar": ()}
NORMS = (1.0, 2.0, 3.5, math.inf)


def wholes(dtype=torch.float64) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw, dtype=dtype) for name, shape in KINDS.items()}


def outer(name: str, rank: int, world_size: int):
    """How a tensor-parallel rank holds each kind; "kv" has one part for every two ranks."""
    parts = max(1, world_size // 2)
    copies = world_size // parts
    return {
        "replicated": Replicate(rank),
        "scalar": Replicate(rank),
        "rows": Shard(0, rank, world_size),
        "columns": Shard(1, rank, world_size),
        "kv": Partial(Shard(0, rank // copies, parts, rank % copies)),
        "norm": Partial(Replicate(rank)),
    }[name]


def placements(tp: int, tp_rank: int, dp: int, dp_rank: int, flat: bool) -> dict[str, Placement]:
    """tp outside; inside of it dp as FSDP cuts: all parameters one after the other, in equal parts; or replicated."""
    found = {name: Placement(torch.Size(shape), (outer(name, tp_rank, tp),)) for name, shape in KINDS.items()}
    sizes = [place.part_shape.numel() for place in found.values()]
    part = -(-sum(sizes) // dp)
    begin = 0
    for (name, place), size in zip(list(found.items()), sizes, strict=True):
        inner = FlatShard.of_range(begin, begin + size, dp_rank * part, (dp_rank + 1) * part)
        found[name] = place.within(inner if flat else Replicate(dp_rank))
        begin += size
    return found


def spread(group, tp: int, flat: bool) -> dict:
    """Cut, gathered and measured on tp x dp ranks."""
    dp = group.world_size // tp
    tp_rank, dp_rank = group.rank % tp, group.rank // tp
    axes = [group.subgroup([d * tp + t for t in range(tp)], f"tp{d}") for d in range(dp)]
    places, whole = placements(tp, tp_rank, dp, dp_rank, flat), wholes()
    parts = {name: places[name].cut(whole[name]) for name in whole}
    found = {"whole": gather(parts, places, group), "counted": [n for n in places if places[n].is_counted]}
    with ledger() as led:
        found["norms"] = [global_norm(parts, places, group, p).item() for p in NORMS]
    found["calls"] = dict(led.calls)
    copies = {"norm": tp, "kv": tp // max(1, tp // 2)}  # ranks over which shares are added up
    shares = {name: part * (tp_rank + 1) / _ranks_sum(name, tp_rank, tp, copies) for name, part in parts.items()}
    shares = {name: shares[name] if name in copies else parts[name].clone() for name in parts}
    with ledger() as led:
        sum_partial(shares, places, axes[dp_rank])
    found["sum calls"] = dict(led.calls)
    found["summed"] = gather(shares, places, group)
    only = dict(list(parts.items())[: 2 + group.rank])  # a pipeline's ranks hold different tensors
    found["some"] = sorted(gather(only, places, group))
    alike = {name: Placement(tensor.shape, (Replicate(group.rank),)) for name, tensor in whole.items()}
    drifted = {name: tensor + group.rank for name, tensor in whole.items()}
    with ledger() as led:
        kept = gather(drifted, alike, group)
    found["replicas"] = led.bytes(), all(torch.equal(kept[name], drifted[name]) for name in drifted)
    return found


def _ranks_sum(name: str, tp_rank: int, tp: int, copies: dict[str, int]) -> int:
    """The sum of rank + 1 over the ranks that hold the same part."""
    size = copies.get(name, 1)
    first = tp_rank // size * size
    return sum(rank + 1 for rank in range(first, first + size))
