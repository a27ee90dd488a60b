"""Closed forms of data parallelism: buckets, bytes per rank with and without compression.

Symbols: N = world_size, P = bytes of all gradients, n = elements of one bucket. Rings cut as `comms.py` says.
"""

import math
from collections.abc import Iterable, Sequence

from minillm.predict import comms
from minillm.predict.comms import Cost


def gradient_bytes(num_bytes: float, world_size: int) -> float:
    """2P(N-1)/N: what each rank sends in a step to average P bytes of gradients. The batch does not occur in it, nor
    does the size of a bucket, nor, with `no_sync`, the number of microbatches."""
    return 2 * num_bytes * (world_size - 1) / world_size


def bucket_sizes(tensor_sizes: Iterable[int], cap: float, first_cap: float | None = None) -> list[int]:
    """Sizes of the buckets for tensors in the order in which their gradients become ready: the tensor that fills a
    bucket closes it, so that it holds at least its cap (all sizes in one unit; torch's DDP packs likewise)."""
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
    """shapes: of the parameters in each bucket. All-reduce of every P [n, rank] and of what goes whole, then of every
    Q [m, rank]: r(n+m) instead of nm elements for a matrix [n, m] (Vogels et al. 2019)."""
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


def _sum(costs: Iterable[Cost], world_size: int) -> Cost:
    return sum(costs, Cost(0, 0, (0,) * world_size))
