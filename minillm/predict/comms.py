"""What a collective costs, before anyone runs it: bytes, rounds and seconds.

Every algorithm here is a sequence of *rounds*. In one round each rank sends at most one message and all messages
travel at once, so a round lasts as long as its largest message (the alpha-beta model, Hockney 1994):

    time = rounds * alpha + critical_bytes / beta

    alpha  latency of one round, seconds            critical_bytes  sum over rounds of the largest message, bytes
    beta   bandwidth of one rank's link, bytes/s    sent_per_rank   what the wire counters see, exact integers

Symbols: N = world_size, P = num_elements * itemsize = bytes of the whole tensor. A tensor that does not divide is cut
like `torch.tensor_split`: the first n % N chunks hold one element more. The cost of reducing (gamma) is left out.

Sources: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005); Chan,
Heimlich, Purkayastha, van de Geijn, "Collective communication: theory, practice, and experience" (2007); Patarasuk,
Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Rounds on the critical path, bytes on it, and the bytes each rank sends. `a + b` is "first a, then b"."""

    rounds: int
    critical_bytes: int
    sent_per_rank: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes all ranks send together: what a loopback counter shows."""
        return sum(self.sent_per_rank)

    def time(self, latency_s: float, bandwidth_bytes_per_s: float) -> float:
        """Seconds under the alpha-beta model (Hockney 1994): rounds * alpha + critical_bytes / beta."""
        return seconds(self.rounds, self.critical_bytes, latency_s, bandwidth_bytes_per_s)

    def __add__(self, then: Cost) -> Cost:
        if len(self.sent_per_rank) != len(then.sent_per_rank):
            raise ValueError(f"cannot add costs of {len(self.sent_per_rank)} and {len(then.sent_per_rank)} ranks")
        sent = tuple(a + b for a, b in zip(self.sent_per_rank, then.sent_per_rank, strict=True))
        return Cost(self.rounds + then.rounds, self.critical_bytes + then.critical_bytes, sent)


def seconds(rounds: float, critical_bytes: float, latency_s: float, bandwidth_bytes_per_s: float) -> float:
    """The alpha-beta model (Hockney 1994): rounds * alpha + critical_bytes / beta."""
    if latency_s < 0:
        raise ValueError(f"latency_s is {latency_s}; a latency cannot be negative")
    if bandwidth_bytes_per_s <= 0:
        raise ValueError(f"bandwidth_bytes_per_s is {bandwidth_bytes_per_s}; give a bandwidth above zero")
    return rounds * latency_s + critical_bytes / bandwidth_bytes_per_s


def ring_seconds(num_bytes: float, world_size: int, latency_s: float, bandwidth_bytes_per_s: float) -> float:
    """Seconds of one turn of a ring, a reduce-scatter or an all-gather, of a tensor of num_bytes in equal chunks. The
    same as `ring_all_gather(...).time(...)`, without listing what each of thousands of ranks sends."""
    rounds = world_size - 1
    return seconds(rounds, rounds * num_bytes / world_size, latency_s, bandwidth_bytes_per_s)


# Rings: N - 1 rounds, and in each of them every chunk is on the wire once.


def ring_reduce_scatter(num_elements: int, itemsize: int, world_size: int) -> Cost:
    """P(N-1)/N bytes per rank in N-1 rounds; rank r ends owning the sum of chunk r (Patarasuk & Yuan 2009).

    Rank r sends chunks r-1, r-2, ..., r-N+1 (mod N): every chunk but its own.
    """
    chunks = _chunk_bytes(num_elements, itemsize, world_size)
    sent = tuple(sum(chunks) - own for own in chunks)
    return Cost(world_size - 1, (world_size - 1) * max(chunks), sent)


def ring_all_gather(num_elements: int, itemsize: int, world_size: int) -> Cost:
    """P(N-1)/N bytes per rank in N-1 rounds, P being the *gathered* tensor (Thakur et al. 2005, ring all-gather).

    Rank r sends chunks r, r-1, ..., r-N+2 (mod N): every chunk but the one of its right neighbour.
    """
    chunks = _chunk_bytes(num_elements, itemsize, world_size)
    sent = tuple(sum(chunks) - chunks[(rank + 1) % world_size] for rank in range(world_size))
    return Cost(world_size - 1, (world_size - 1) * max(chunks), sent)


def ring_all_reduce(num_elements: int, itemsize: int, world_size: int) -> Cost:
    """2P(N-1)/N bytes per rank in 2(N-1) rounds: reduce-scatter, then all-gather (Patarasuk & Yuan 2009).

    No all-reduce of messages between ranks sends less on average over them, so the ring is bandwidth-optimal; its
    rounds grow with N, so small tensors suffer.
    """
    args = (num_elements, itemsize, world_size)
    return ring_reduce_scatter(*args) + ring_all_gather(*args)


# Trees: few rounds, whole tensors.


def tree_broadcast(num_elements: int, itemsize: int, world_size: int, root: int = 0) -> Cost:
    """P(N-1) bytes in total, ceil(log2 N) rounds of P bytes each (binomial tree; Thakur et al. 2005, Chan et al. 2007).

    With v = (rank - root) mod N, in round k every v < 2^k sends the whole tensor to v + 2^k, if that rank exists.
    """
    size = _tensor_bytes(num_elements, itemsize, world_size, root)
    rounds = _log2_ceil(world_size)
    sent = [0] * world_size
    for v in range(world_size):
        children = sum(v < 2**k and v + 2**k < world_size for k in range(rounds))
        sent[(v + root) % world_size] = children * size
    return Cost(rounds, rounds * size, tuple(sent))


def tree_reduce(num_elements: int, itemsize: int, world_size: int, root: int = 0) -> Cost:
    """P(N-1) bytes in total, ceil(log2 N) rounds: the broadcast tree run backwards (Thakur et al. 2005).

    Every rank but the root sends exactly once.
    """
    size = _tensor_bytes(num_elements, itemsize, world_size, root)
    rounds = _log2_ceil(world_size)
    return Cost(rounds, rounds * size, tuple(0 if rank == root else size for rank in range(world_size)))


def tree_all_reduce(num_elements: int, itemsize: int, world_size: int, root: int = 0) -> Cost:
    """Tree reduce to the root, then tree broadcast from it: 2 ceil(log2 N) rounds of P bytes each."""
    args = (num_elements, itemsize, world_size, root)
    return tree_reduce(*args) + tree_broadcast(*args)


def recursive_doubling_all_reduce(num_elements: int, itemsize: int, world_size: int) -> Cost:
    """log2 N rounds of P bytes each (Thakur et al. 2005, recursive doubling): the fewest rounds, the most bytes.

    When N is no power of two, p = 2^floor(log2 N) ranks do the exchange; each of the N - p extra ranks first folds its
    tensor into a partner and gets the result back at the end: two rounds more.
    """
    size = _tensor_bytes(num_elements, itemsize, world_size)
    doublings = world_size.bit_length() - 1
    power = 2**doublings
    extra = world_size - power
    inner = tuple(size * (doublings + (rank < extra)) for rank in range(power))
    rounds = doublings + (2 if extra else 0)
    return Cost(rounds, rounds * size, inner + (size,) * extra)


# The baselines: everything through one rank, and everyone to everyone.


def linear_broadcast(num_elements: int, itemsize: int, world_size: int, root: int = 0) -> Cost:
    """The root sends P bytes to N-1 ranks, one after another: P(N-1) in total, as many as a tree, in more rounds."""
    size = _tensor_bytes(num_elements, itemsize, world_size, root)
    messages = world_size - 1
    return Cost(messages, messages * size, tuple(messages * size * (rank == root) for rank in range(world_size)))


def parameter_server_all_reduce(num_elements: int, itemsize: int, world_size: int, root: int = 0) -> Cost:
    """Every rank sends P bytes to the root, which sends P back to each: 2(N-1)P bytes pass through the root.

    The root's link handles one message at a time, so there are 2(N-1) rounds of P bytes (Li et al., "Scaling
    Distributed Machine Learning with the Parameter Server", 2014, with one server).
    """
    size = _tensor_bytes(num_elements, itemsize, world_size, root)
    gather = Cost(world_size - 1, (world_size - 1) * size, tuple(size * (rank != root) for rank in range(world_size)))
    return gather + linear_broadcast(num_elements, itemsize, world_size, root)


def pairwise_all_to_all(num_elements: int, itemsize: int, world_size: int) -> Cost:
    """P(N-1)/N bytes per rank in N-1 rounds, P being one rank's input (Thakur et al. 2005, pairwise exchange).

    In round s rank r sends part r+s to rank r+s (mod N); its own part never leaves.
    """
    parts = _chunk_bytes(num_elements, itemsize, world_size)
    return Cost(world_size - 1, (world_size - 1) * max(parts), tuple(sum(parts) - own for own in parts))


# Two kinds of link.


@dataclass(frozen=True)
class TwoLevelCost:
    """Cost of a two-level collective, split by the kind of link: `intra` stays inside nodes, `inter` crosses them."""

    intra: Cost
    inter: Cost
    ranks_per_node: int

    @property
    def total(self) -> Cost:
        """Both levels together, as if all links were alike."""
        return self.intra + self.inter

    @property
    def crossing_bytes_per_node(self) -> tuple[int, ...]:
        """Bytes that leave each node."""
        return _per_node(self.inter.sent_per_rank, self.ranks_per_node)

    def time(self, intra: tuple[float, float], inter: tuple[float, float]) -> float:
        """Seconds; `intra` and `inter` are (latency_s, bandwidth_bytes_per_s) of one rank's link of that kind."""
        return self.intra.time(*intra) + self.inter.time(*inter)


def hierarchical_all_reduce(num_elements: int, itemsize: int, world_size: int, ranks_per_node: int) -> TwoLevelCost:
    """Reduce-scatter inside the node, all-reduce of the own shard across nodes, all-gather inside the node.

    With g = ranks_per_node and n = N/g nodes: 2(g-1) + 2(n-1) rounds instead of 2(gn-1), and 2(n-1)/n P bytes leave
    each node instead of the flat ring's 2(N-1)/N P (Cho et al., "BlueConnect", 2019). Ranks of a node are consecutive;
    the g ranks with the same local rank on the n nodes form one ring, and all g rings run at once.
    """
    nodes = _nodes(world_size, ranks_per_node)
    inside = ring_all_reduce(num_elements, itemsize, ranks_per_node)
    across = [ring_all_reduce(shard, itemsize, nodes) for shard in split_sizes(num_elements, ranks_per_node)]
    crossing = tuple(across[local].sent_per_rank[node] for node in range(nodes) for local in range(ranks_per_node))
    return TwoLevelCost(
        intra=Cost(inside.rounds, inside.critical_bytes, inside.sent_per_rank * nodes),
        inter=Cost(across[0].rounds, across[0].critical_bytes, crossing),  # shard 0 is the largest
        ranks_per_node=ranks_per_node,
    )


def flat_ring_crossing_bytes(num_elements: int, itemsize: int, world_size: int, ranks_per_node: int) -> tuple[int, ...]:
    """Bytes that leave each node when one ring all-reduce spans all nodes: 2(N-1)/N P, as its last rank sends them.

    Each round waits for the slowest link, so the flat ring's time is `ring_all_reduce(...).time(*inter_link)`.
    """
    nodes = _nodes(world_size, ranks_per_node)
    sent = ring_all_reduce(num_elements, itemsize, world_size).sent_per_rank
    return tuple(sent[ranks_per_node - 1 :: ranks_per_node]) if nodes > 1 else (0,)


# Which algorithm, when.


def crossover_bytes(
    frugal: Callable[..., Cost],
    quick: Callable[..., Cost],
    world_size: int,
    latency_s: float,
    bandwidth_bytes_per_s: float,
) -> float:
    """Tensor size in bytes above which `frugal` (fewer bytes) beats `quick` (fewer rounds), under alpha-beta.

    Both times are lines in P, k * alpha + c * P / beta, so they meet at P = (k_f - k_q) * alpha * beta / (c_q - c_f).
    0.0 if `frugal` is never slower, `inf` if it is never faster. Example: ring against tree,
    `crossover_bytes(ring_all_reduce, tree_all_reduce, 8, 20e-6, 1e9)`.
    """
    # One byte per rank divides evenly, so critical_bytes / world_size is the slope c, without rounding.
    f, q = frugal(world_size, 1, world_size), quick(world_size, 1, world_size)
    if latency_s < 0 or bandwidth_bytes_per_s <= 0:
        raise ValueError(f"latency_s {latency_s} and bandwidth_bytes_per_s {bandwidth_bytes_per_s} must be above zero")
    extra_latency = (f.rounds - q.rounds) * latency_s
    saved_s_per_byte = (q.critical_bytes - f.critical_bytes) / world_size / bandwidth_bytes_per_s
    if saved_s_per_byte > 0:
        return max(0.0, extra_latency / saved_s_per_byte)
    return 0.0 if extra_latency <= 0 and saved_s_per_byte == 0 else math.inf


def split_sizes(num_elements: int, parts: int) -> list[int]:
    """Sizes of `torch.tensor_split`: they differ by at most one, the larger ones first."""
    small, larger = divmod(num_elements, parts)
    return [small + (index < larger) for index in range(parts)]


def _chunk_bytes(num_elements: int, itemsize: int, world_size: int) -> list[int]:
    _tensor_bytes(num_elements, itemsize, world_size)
    return [size * itemsize for size in split_sizes(num_elements, world_size)]


def _tensor_bytes(num_elements: int, itemsize: int, world_size: int, root: int = 0) -> int:
    if num_elements < 0:
        raise ValueError(f"num_elements is {num_elements}; a tensor has zero or more elements")
    if itemsize < 1:
        raise ValueError(f"itemsize is {itemsize}; an element takes at least one byte")
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; use at least one rank")
    if not 0 <= root < world_size:
        raise ValueError(f"root is {root}; with world_size {world_size} it lies in 0..{world_size - 1}")
    return num_elements * itemsize


def _log2_ceil(world_size: int) -> int:
    return (world_size - 1).bit_length()


def _nodes(world_size: int, ranks_per_node: int) -> int:
    if ranks_per_node < 1 or world_size % ranks_per_node:
        raise ValueError(f"ranks_per_node is {ranks_per_node}; it must divide world_size {world_size}")
    return world_size // ranks_per_node


def _per_node(per_rank: Sequence[int], ranks_per_node: int) -> tuple[int, ...]:
    return tuple(sum(per_rank[first : first + ranks_per_node]) for first in range(0, len(per_rank), ranks_per_node))
