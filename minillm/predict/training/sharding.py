"""What data parallelism holds and sends, with everything replicated, with ZeRO stages 1 and 2, and fully sharded (3).

N = world_size, K microbatches per step, Ψ parameters, P = bytes of all of them. Rings cut as `comms.py` says; what is
sharded is padded to a multiple of N elements: each bucket in stages 1 and 2, each unit (a block, or the rest) in 3.

    stage   sent by a rank per step       weights at rest   gradients at rest   optimizer state
    0       2·P·(N-1)/N                   P                 P                   master + moments
    1       2·P·(N-1)/N                   P                 P                   (master + moments)/N
    2       (K + 1)·P·(N-1)/N             P                 P/N                 (master + moments)/N
    3       3·K·P·(N-1)/N                 P/N               P/N                 (master + moments)/N

With Adam and nothing padded a rank of stages 1 and 2 holds 8Ψ + 8Ψ/N and 4Ψ + 12Ψ/N bytes in float32, 4Ψ + 12Ψ/N and
2Ψ + 14Ψ/N with 16-bit weights and gradients and float32 masters; a rank of stage 3 holds 16Ψ/N (Rajbhandari et al.
2020, §5). At its peak stage 2 has two buckets besides. Stage 3 has the weights of `prefetch` + 1 consecutive units, and
the gradients of two blocks (one on its way, one being made) and of the rest. It gathers every unit before its forward
and before its backward (§7.2.2: 3Ψ). The last unit of forward stays for backward, which begins with it: that is the
rest, which both ends of forward need, so both of its gathers lie there. Frozen weights are gathered, but send no
gradients.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minillm.predict import comms
from minillm.predict.comms import Cost
from minillm.predict.model import ADAM_FP32, Shape, StateBytes, parameters


def gradient_bytes(num_bytes: float, world_size: int) -> float:
    """2P(N-1)/N: what each rank sends in a step to average P bytes of gradients. The batch does not occur in it, nor
    does the size of a bucket, nor, with `no_sync`, the number of microbatches."""
    return 2 * num_bytes * (world_size - 1) / world_size


def bucket_sizes(tensor_sizes: Iterable[int], cap: float, first_cap: float | None = None) -> list[int]:
    """Sizes of the buckets for tensors in the order in which their gradients become ready: the tensor that fills a
    bucket closes it, so a bucket holds at least its cap, as in torch's DDP. All sizes are in the same unit."""
    if not cap > 0 or (first_cap is not None and not first_cap > 0):
        raise ValueError(f"cap {cap} and first_cap {first_cap} must be above 0")
    buckets, filling, limit = [], 0, first_cap or cap
    for size in tensor_sizes:
        filling += size
        if filling >= limit:
            buckets.append(filling)
            filling, limit = 0, cap
    return [*buckets, filling] if filling else buckets


# Bytes of one step, exactly: `elements` are those of each bucket, `sent_per_rank` of the result what a ledger counts.


def all_reduce(elements: Iterable[int], itemsize: int, world_size: int) -> Cost:
    """One ring all-reduce per bucket. itemsize: bytes of an element as it is sent; 2 with the bf16 and fp16 hooks."""
    return _sum((comms.ring_all_reduce(n, itemsize, world_size) for n in elements), world_size)


def int8(elements: Iterable[int], world_size: int) -> Cost:
    """All-to-all, then all-gather of n/N int8 and a float32 scale: about a quarter of float32's 2P(N-1)/N."""
    rows = [math.ceil(n / world_size) + 4 for n in elements]
    both = (
        comms.pairwise_all_to_all(row * world_size, 1, world_size)
        + comms.ring_all_gather(row * world_size, 1, world_size)
        for row in rows
    )
    return _sum(both, world_size)


def top_k(elements: Iterable[int], share: float, itemsize: int, world_size: int) -> Cost:
    """All-gather of ceil(share n) values and int32 places: k (N-1)(itemsize + 4) bytes. Of float32's all-reduce that is
    the share of k/n times N: twice with two ranks, and nothing is saved once N reaches n/k."""
    sent = [math.ceil(share * n) * world_size for n in elements]
    both = (comms.ring_all_gather(k, 4, world_size) + comms.ring_all_gather(k, itemsize, world_size) for k in sent)
    return _sum(both, world_size)


def power_sgd(shapes: Iterable[Sequence[tuple[int, ...]]], rank: int, itemsize: int, world_size: int) -> Cost:
    """shapes: of the parameters in each bucket. All-reduce of every P [n, rank] and of uncompressed parameters, then of
    every Q [m, rank]: r(n+m) instead of nm elements for a matrix [n, m] (Vogels et al. 2019)."""
    total = _sum((), world_size)
    for bucket in shapes:
        first, second = 0, 0
        for shape in bucket:
            n, size = (shape[0] if shape else 1), math.prod(shape)
            if len(shape) > 1 and rank * (n + size // n) < size:
                first, second = first + rank * n, second + rank * (size // n)
            else:
                first += size
        total += all_reduce([first, second], itemsize, world_size)
    return total


def padded(elements: int, world_size: int) -> int:
    """The number of elements, rounded up to a multiple of world_size."""
    if world_size < 1:
        raise ValueError(f"world_size {world_size} must be at least 1.")
    return -(-elements // world_size) * world_size


def padded_all(numels: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Elements of each bucket, rounded up to a multiple of world_size."""
    return tuple(padded(numel, world_size) for numel in numels)


@dataclass(frozen=True)
class Zero:
    """What ZeRO stages 1 and 2 hold and send, in bytes on each rank.

    buckets: padded elements of each, in the order in which they are reduced.
    """

    buckets: tuple[int, ...]
    world_size: int
    stage: int
    state: StateBytes = ADAM_FP32
    accumulate: int = 1

    def __post_init__(self):
        if self.stage not in (1, 2) or self.world_size < 1 or self.accumulate < 1:
            raise ValueError(
                f"stage {self.stage}, {self.world_size} ranks, {self.accumulate} microbatches: use stage 1 or 2 and at "
                "least 1 of each."
            )
        for size in self.buckets:
            if size % self.world_size:
                raise ValueError(f"a bucket of {size} elements has no {self.world_size} equal parts: use padded_all().")

    @property
    def elements(self) -> int:
        return sum(self.buckets)

    @property
    def reductions(self) -> int:
        """How often a bucket is reduced in one step."""
        return self.accumulate if self.stage == 2 else 1

    @property
    def collectives(self) -> dict[str, int]:
        """Calls per step, without the all-reduce of gradient clipping."""
        return {"reduce_scatter": self.reductions * len(self.buckets), "all_gather": len(self.buckets)}

    @property
    def sent(self) -> int:
        """What each rank sends in one step, by the ring algorithms: every part but one, once per collective."""
        others = self.elements // self.world_size * (self.world_size - 1)
        return others * (self.reductions * self.state.gradient + self.state.parameter)

    @property
    def parameter(self) -> int:
        return self.elements * self.state.parameter

    @property
    def optimizer(self) -> int:
        return self.elements // self.world_size * (self.state.master + self.state.moments)

    @property
    def gradient(self) -> int:
        """Bytes of gradients between backward and step."""
        return self.elements * self.state.gradient // (1 if self.stage == 1 else self.world_size)

    @property
    def gradient_peak(self) -> int:
        """Bytes of gradients while backward runs. In stage 2, when bucket i is full: the shards so far (in a second
        microbatch all of them, and the part that arrives), bucket i - 1 which is on its way, and bucket i."""
        if self.stage == 1:
            return self.gradient
        most = 0
        for i, filling in enumerate(self.buckets):
            leaving = self.buckets[i - 1] if i else 0
            shards = sum(self.buckets[:i]) if self.accumulate == 1 else self.elements + leaving
            most = max(most, shards // self.world_size + leaving + filling)
        return max(most * self.state.gradient, self.gradient)

    @property
    def peak(self) -> int:
        """Bytes of model states at their fullest moment."""
        return self.parameter + self.gradient_peak + self.optimizer


@dataclass(frozen=True)
class FullyShardTraffic:
    """Collectives of one rank in one step, and the bytes it sends."""

    all_gathers: int
    reduce_scatters: int
    bytes: int


@dataclass(frozen=True)
class FullyShardHeld:
    """Bytes on one rank: 1/N of each kind, and the most that whole weights and whole gradients take, at any time."""

    parameter: int
    gradient: int
    optimizer: int
    gathered: int
    whole_gradients: int


def fully_shard_units(shape: Shape) -> tuple[list[int], int]:
    """Elements of each block, and of the rest: embedding, final norm and head."""
    count, layers = parameters(shape), shape.num_layers
    rest = count.embedding + count.head + shape.hidden_size
    return [(count.total - rest) // layers] * layers, rest


def fully_shard_traffic(
    blocks: Sequence[int],
    rest: int,
    world_size: int,
    *,
    itemsize: int = 4,
    reduce_itemsize: int | None = None,
    microbatches: int = 1,
) -> FullyShardTraffic:
    """Traffic of a step. Accumulation saves none of it: every microbatch gathers twice and reduces once."""
    units = [padded(elements, world_size) for elements in (*blocks, rest)]
    per_element = 2 * itemsize + (reduce_itemsize or itemsize)
    sent = sum(units) * per_element * (world_size - 1) // world_size
    return FullyShardTraffic(2 * len(units) * microbatches, len(units) * microbatches, sent * microbatches)


def pipelined_fully_shard_bytes(
    parts: Sequence[Sequence[int]], world_size: int, microbatches: int, itemsize: int = 4, reshard: bool = True
) -> int:
    """What a rank sends in a step if its `parts` of a pipeline, each of groups of so many elements, are fully sharded:
    every group is gathered for the forward and the backward of each microbatch (reshard False: once), and
    reduce-scattered once."""
    elements = sum(padded(group, world_size) for part in parts for group in part)
    gathers = 2 * microbatches if reshard else 1
    return elements * itemsize * (world_size - 1) // world_size * (gathers + 1)


def pipelined_gathered(parts: Sequence[Sequence[int]], world_size: int, itemsize: int = 4, reshard: bool = True) -> int:
    """Bytes of whole weights that a rank of such a pipeline holds at most: of one part, or (reshard False) of all."""
    held = [itemsize * sum(padded(group, world_size) for group in part) for part in parts]
    return max(held) if reshard else sum(held)


def fully_shard_held(
    blocks: Sequence[int],
    rest: int,
    world_size: int,
    *,
    itemsize: int = 4,
    shard_itemsize: int = 4,
    moments: int = 2,
    prefetch: int = 1,
) -> FullyShardHeld:
    """What a rank holds. Bytes per element: itemsize of gathered weights, shard_itemsize of shards, gradients,
    moments."""
    units = [padded(elements, world_size) for elements in (rest, *blocks, rest)]
    shard = sum(units[1:]) // world_size * shard_itemsize
    window = min(prefetch + 1, len(blocks) + 1)  # the rest is one unit, at whichever end
    most = max(sum(units[first : first + window]) for first in range(len(units) - window + 1))
    made = [padded(elements, world_size) for elements in blocks]
    pair = max((sum(made[place : place + 2]) for place in range(max(1, len(made) - 1))), default=0)
    gradients = max(pair + units[0], 2 * units[0])  # flattening copies: the rest's own, at the end, is there twice
    return FullyShardHeld(shard, shard, moments * shard, most * itemsize, gradients * itemsize)


def _sum(costs: Iterable[Cost], world_size: int) -> Cost:
    return sum(costs, Cost(0, 0, (0,) * world_size))
