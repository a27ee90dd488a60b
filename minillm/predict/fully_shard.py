"""What ZeRO stage 3 sends and holds: closed forms for `minillm.train.FullyShard`, exact to the byte.

A model is `blocks`, the elements of each block, and `rest`, those of everything else. N ranks; each unit is padded to
P = N·⌈elements / N⌉ elements, of which a rank keeps P/N.

    per microbatch   2 all-gathers and 1 reduce-scatter of every unit          3·ΣP·(N-1)/N elements sent by each rank
    at rest          weights, gradients and Adam's moments                     16·ΣP/N bytes
    at the peak      besides, the weights of `prefetch` + 1 consecutive units  (the rest comes first and last)
                     and the gradients of two blocks (one on its way, one being made) and of the rest

Every unit is gathered before its forward and before its backward. The last of forward stays for backward, which begins
with it: the rest, needed at both ends of forward, so that its two gathers both lie there. Frozen weights are gathered,
but send no gradients. Rajbhandari et al. 2020, §7.2.2 (3Ψ), §5.3 (16Ψ/N).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from minillm.predict.model import Shape, parameters


@dataclass(frozen=True)
class Traffic:
    """Of one rank in one step. bytes: sent."""

    all_gathers: int
    reduce_scatters: int
    bytes: int


@dataclass(frozen=True)
class Held:
    """Bytes on one rank: 1/N of each kind, and the most that whole weights and whole gradients take, at any time."""

    parameter: int
    gradient: int
    optimizer: int
    gathered: int
    whole_gradients: int


def unit_sizes(shape: Shape) -> tuple[list[int], int]:
    """Elements of each block, and of the rest: embedding, final norm and head."""
    count, layers = parameters(shape), shape.num_layers
    rest = count.embedding + count.head + shape.hidden_size
    return [(count.total - rest) // layers] * layers, rest


def padded(elements: int, world_size: int) -> int:
    if world_size < 1:
        raise ValueError(f"world_size {world_size} must be at least 1.")
    return -(-elements // world_size) * world_size


def traffic(
    blocks: Sequence[int],
    rest: int,
    world_size: int,
    *,
    itemsize: int = 4,
    reduce_itemsize: int | None = None,
    microbatches: int = 1,
) -> Traffic:
    """Accumulation does not help: every microbatch gathers twice and reduces once (P55)."""
    units = [padded(elements, world_size) for elements in (*blocks, rest)]
    per_element = 2 * itemsize + (reduce_itemsize or itemsize)
    sent = sum(units) * per_element * (world_size - 1) // world_size
    return Traffic(2 * len(units) * microbatches, len(units) * microbatches, sent * microbatches)


def pipelined_bytes(parts: Sequence[Sequence[int]], world_size: int, microbatches: int, itemsize: int = 4) -> int:
    """What a rank sends in a step if its `parts` of a pipeline, each of groups of so many elements, are fully sharded:
    every group is gathered for the forward and the backward of each microbatch, and reduce-scattered once."""
    elements = sum(padded(group, world_size) for part in parts for group in part)
    return elements * itemsize * (world_size - 1) // world_size * (2 * microbatches + 1)


def held(
    blocks: Sequence[int],
    rest: int,
    world_size: int,
    *,
    itemsize: int = 4,
    shard_itemsize: int = 4,
    moments: int = 2,
    prefetch: int = 1,
) -> Held:
    """itemsize: of gathered weights; shard_itemsize: of the shards, their gradients and their moments (4: float32)."""
    units = [padded(elements, world_size) for elements in (rest, *blocks, rest)]
    shard = sum(units[1:]) // world_size * shard_itemsize
    window = min(prefetch + 1, len(blocks) + 1)  # the rest is one unit, at whichever end
    most = max(sum(units[first : first + window]) for first in range(len(units) - window + 1))
    made = [padded(elements, world_size) for elements in blocks]
    pair = max((sum(made[place : place + 2]) for place in range(max(1, len(made) - 1))), default=0)
    gradients = max(pair + units[0], 2 * units[0])  # flattening copies: the rest's own, at the end, is there twice
    return Held(shard, shard, moments * shard, most * itemsize, gradients * itemsize)
