"""What attention over a sequence that is cut over ranks costs: work, messages, memory and time of each variant.

Symbols: B = batch, S = the whole sequence, s = S / N its part on each of N ranks, H, H_kv = heads of queries and keys,
d = head_dim, e = bytes of an element. One layer, one microbatch; a block is K and V of one rank: 2·B·H_kv·s·d·e bytes.

    variant     bytes that a rank sends forward                       backward
    ring        (N-1) blocks, each behind the work on another         (N-1) blocks and N gradients of blocks
    zigzag      the same; every rank has the same work
    gather      (N-1) blocks in one all-gather, nothing behind it     (N-1) blocks in one reduce-scatter
    ulysses     2·B·(H + max(H_kv, N))·s·d·e·(N-1)/N                  as forward; falls with N, ends at N = H
    hybrid      Ulysses among n ranks, a ring of N/n over what each of them then holds

A query at position p meets p + 1 keys, so rank r of N contiguous parts has (2r+1)/N² of the work. Sources: Liu, Zaharia
and Abbeel 2023 (ring), Brandon et al. 2023 (striped) and Llama Team 2024, §3.3.2 (zigzag, gather), Jacobs et al. 2023
(Ulysses), Fang and Zhao 2024 (hybrid).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from minillm.predict import comms

VARIANTS = ("ring", "zigzag", "ulysses", "hybrid", "gather")
FORWARD = 4  # FLOPs of forward per pair of positions, head and element of a head: 2 products
Span = tuple[int, int]


@dataclass(frozen=True)
class AttentionShape:
    """What one attention layer of a microbatch sees, before it is cut. itemsize: bytes of an element."""

    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int = 4
    window: int | None = None

    @property
    def exact(self) -> int:
        """Bytes per element of accumulated values: float32 or wider."""
        return max(4, self.itemsize)

    def block_bytes(self, world_size: int) -> int:
        """Bytes of K and V of one rank's positions."""
        return 2 * self.batch * self.kv_heads * (self.seq // world_size) * self.head_dim * self.itemsize


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in one layer. bytes: sent; calls: operations, as the ledger counts them; messages: point to
    point."""

    bytes: int = 0
    calls: int = 0
    messages: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.bytes + other.bytes, self.calls + other.calls, self.messages + other.messages)


@dataclass(frozen=True)
class Hardware:
    """A rank's FLOP/s in attention, and its link: seconds per message and bytes per second."""

    flops: float
    latency_s: float
    bandwidth: float

    def link(self, num_bytes: float) -> float:
        return comms.seconds(1, num_bytes, self.latency_s, self.bandwidth)


# Work.


def spans(seq: int, rank: int, world_size: int, order: str = "zigzag") -> list[Span]:
    """[start, stop) of the stretches of a sequence that a rank holds."""
    if order == "contiguous" or world_size == 1:
        size = seq // world_size
        return [(rank * size, (rank + 1) * size)]
    size = seq // (2 * world_size)
    return [(part * size, (part + 1) * size) for part in (rank, 2 * world_size - 1 - rank)]


def pairs(queries: Sequence[Span], keys: Sequence[Span], window: int | None = None) -> int:
    """Pairs of a query and a key at its own or an earlier position, within the window."""
    return sum(
        _pairs(*q, *k) - (_pairs(q[0] - window, q[1] - window, *k) if window else 0) for q in queries for k in keys
    )


def _pairs(first: int, stop: int, key_first: int, key_stop: int) -> int:
    def upto(end: int) -> int:
        length, reach = key_stop - key_first, max(0, end - key_first)
        short = min(reach, length)
        return short * (short + 1) // 2 + (reach - short) * length

    return upto(stop) - upto(first)


def work_share(rank: int, world_size: int, order: str = "zigzag") -> float:
    """Share of all causal work that a rank has, for a long sequence: (2r+1)/N² in contiguous order, 1/N in zigzag."""
    return (2 * rank + 1) / world_size**2 if order == "contiguous" else 1 / world_size


def ring_flops(shape: AttentionShape, world_size: int, order: str = "zigzag") -> list[list[int]]:
    """flops[rank][step]: of a rank on the block that reaches it in that step; a row's sum is the rank's work."""
    held = [spans(shape.seq, rank, world_size, order) for rank in range(world_size)]
    each = FORWARD * shape.batch * shape.heads * shape.head_dim
    return [
        [each * pairs(held[rank], held[(rank - step) % world_size], shape.window) for step in range(world_size)]
        for rank in range(world_size)
    ]


def flops(variant: str, shape: AttentionShape, world_size: int, node: int = 2) -> list[int]:
    """FLOPs of each rank. Ulysses: equal, whatever the order; a hybrid as zigzag, with fewer and longer parts."""
    check_variant(variant, shape, world_size, node)
    ranks = _exchanging(variant, world_size, node)
    rings = ring_flops(_inside(shape, ranks), world_size // ranks, "contiguous" if variant == "ring" else "zigzag")
    return [sum(steps) for steps in rings for _ in range(ranks)]


# Messages.


def forward_traffic(variant: str, shape: AttentionShape, world_size: int, node: int = 2) -> Traffic:
    """What a rank sends in a layer's forward pass, exact."""
    check_variant(variant, shape, world_size, node)
    if variant == "gather":
        return Traffic((world_size - 1) * shape.block_bytes(world_size), 1, world_size - 1)
    ranks = _exchanging(variant, world_size, node)
    around = _ring(_inside(shape, ranks), world_size // ranks)
    return _exchanges(shape, world_size, ranks) + around if variant in ("ulysses", "hybrid") else around


def backward_traffic(variant: str, shape: AttentionShape, world_size: int, node: int = 2) -> Traffic:
    """What a rank sends in a layer's backward pass, exact. Recomputed blocks send `forward_traffic` once more."""
    again = forward_traffic(variant, shape, world_size, node)
    if variant == "gather":
        return again
    ranks = _exchanging(variant, world_size, node)
    return again + _ring_gradients(_inside(shape, ranks), world_size // ranks)


def _ring(shape: AttentionShape, world_size: int) -> Traffic:
    return Traffic((world_size - 1) * shape.block_bytes(world_size), world_size - 1, world_size - 1)


def _ring_gradients(shape: AttentionShape, world_size: int) -> Traffic:
    if world_size == 1:
        return Traffic()
    block = shape.block_bytes(world_size) // shape.itemsize * shape.exact
    return Traffic(world_size * block, world_size, world_size)


def _exchanges(shape: AttentionShape, world_size: int, ranks: int) -> Traffic:
    """q, k, v and the output by all-to-all over `ranks` of `world_size`."""
    heads = 2 * shape.heads + 2 * kv_heads_of(shape, ranks)
    size = heads * shape.batch * (shape.seq // world_size) * shape.head_dim * shape.itemsize
    return Traffic(size * (ranks - 1) // ranks, 4, 4 * (ranks - 1))


def kv_heads_of(shape: AttentionShape, ranks: int) -> int:
    """Heads of keys that Ulysses exchanges: repeated where there are fewer than ranks."""
    return shape.kv_heads if shape.kv_heads % ranks == 0 else ranks


def _exchanging(variant: str, world_size: int, node: int) -> int:
    """Ranks that exchange heads for sequence: of all, of a node, or 1, which is no exchange."""
    return {"ulysses": world_size, "hybrid": node}.get(variant, 1)


def _inside(shape: AttentionShape, ranks: int) -> AttentionShape:
    """What attention sees between the exchanges of `ranks`."""
    return replace(shape, heads=shape.heads // ranks, kv_heads=kv_heads_of(shape, ranks) // ranks)


# Memory.


def buffer_bytes(variant: str, shape: AttentionShape, world_size: int, node: int = 2) -> int:
    """Bytes of K and V that a rank holds in addition at the fullest moment of forward. A ring holds the block in use
    and the one that arrives; gather holds all blocks as they arrive and again in the order of the sequence; Ulysses
    holds what it sends and receives."""
    check_variant(variant, shape, world_size, node)
    block = shape.block_bytes(world_size)
    if variant == "gather":
        return (1 + 2 * world_size) * block
    if variant == "ulysses":
        return 2 * shape.batch * shape.heads * (shape.seq // world_size) * shape.head_dim * shape.itemsize
    if variant == "hybrid":
        return 2 * _inside(shape, node).block_bytes(world_size // node)
    return 2 * block if world_size > 1 else block


# Time.


def ring_seconds(compute: Sequence[Sequence[float]], link: float, *, overlap: bool = True) -> float:
    """Seconds until every rank is done with a forward ring. compute[rank][step]; link: seconds of a block on its way.

    A rank sends a block on as soon as it begins to work on it, and begins the next step when this one is done and the
    next block has arrived. With equal steps: N - 1 times max(compute, link), and the last block's work.
    """
    ranks = len(compute)
    begins = [0.0] * ranks
    for step in range(ranks - 1):
        if overlap:
            arrives = [begins[rank - 1] + link for rank in range(ranks)]
            done = [begins[rank] + compute[rank][step] for rank in range(ranks)]
            begins = [max(done[rank], arrives[rank]) for rank in range(ranks)]
        else:
            arrives = [max(begins[rank - 1], begins[rank]) + link for rank in range(ranks)]
            begins = [arrives[rank] + compute[rank][step] for rank in range(ranks)]
    return max(begins[rank] + compute[rank][-1] for rank in range(ranks))


def hiding_length(heads: int, kv_heads: int, hardware: Hardware, itemsize: int = 4, *, causal: bool = True) -> float:
    """Tokens per rank from which a ring's link time hides behind its work, latency aside: 4·H·s²·d FLOPs (half of them
    under a causal mask in zigzag order) take as long as 2·H_kv·s·d elements on the link. It does not depend on N."""
    return 2 * kv_heads * itemsize * hardware.flops / (4 * heads * hardware.bandwidth) * (2 if causal else 1)


def forward_seconds(variant: str, shape: AttentionShape, world_size: int, hardware: Hardware, node: int = 2) -> float:
    """Seconds of a layer's attention, until the slowest rank is done. All-to-all and all-gather hide behind nothing."""
    check_variant(variant, shape, world_size, node)
    if variant in ("ulysses", "hybrid"):
        ranks = _exchanging(variant, world_size, node)
        sent = _exchanges(shape, world_size, ranks)
        exchanging = sent.messages * hardware.latency_s + sent.bytes / hardware.bandwidth
        return exchanging + _ring_forward(_inside(shape, ranks), world_size // ranks, "zigzag", hardware)
    if variant == "gather":
        sent = forward_traffic(variant, shape, world_size)
        gathering = sent.messages * hardware.latency_s + sent.bytes / hardware.bandwidth
        return gathering + max(flops(variant, shape, world_size)) / hardware.flops
    return _ring_forward(shape, world_size, "contiguous" if variant == "ring" else "zigzag", hardware)


def _ring_forward(shape: AttentionShape, world_size: int, order: str, hardware: Hardware) -> float:
    compute = [[work / hardware.flops for work in steps] for steps in ring_flops(shape, world_size, order)]
    return ring_seconds(compute, hardware.link(shape.block_bytes(world_size)))


def ranking(shape: AttentionShape, world_size: int, hardware: Hardware, node: int = 2) -> dict[str, float]:
    """`forward_seconds` of the variants that there are for this shape, the fastest first."""
    seconds = {}
    for variant in VARIANTS:
        try:
            seconds[variant] = forward_seconds(variant, shape, world_size, hardware, node)
        except ValueError:
            continue  # heads or length that do not divide
    return dict(sorted(seconds.items(), key=lambda item: item[1]))


def check_variant(variant: str, shape: AttentionShape, world_size: int, node: int = 2) -> None:
    """ValueError if the variant cannot cut this shape over so many ranks."""
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r} is unknown: use one of {', '.join(VARIANTS)}.")
    if world_size < 1:
        raise ValueError(f"world_size {world_size} must be at least 1.")
    if variant == "hybrid" and world_size % node:
        raise ValueError(f"node {node} does not divide world_size {world_size}: use a divisor.")
    ranks = _exchanging(variant, world_size, node)
    if shape.heads % ranks or (shape.kv_heads % ranks and ranks % shape.kv_heads):
        raise ValueError(f"{shape.heads} heads and {shape.kv_heads} kv heads do not divide over {ranks} ranks.")
    rings = world_size // ranks
    halves = 2 if variant in ("zigzag", "hybrid", "gather") and rings > 1 else 1
    if shape.seq % (halves * rings) or shape.seq % world_size:
        raise ValueError(f"a sequence of {shape.seq} does not divide into equal parts for {world_size} ranks.")
