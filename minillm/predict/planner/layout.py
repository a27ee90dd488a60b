"""A layout of a cluster: ranks per axis, where an axis's groups lie, and the link that they talk over.

    order ("tp", "cp", "dp", "pp"), innermost first: rank = tp + TP·(cp + CP·(dp + DP·pp))
    an axis of n ranks with stride s lies inside a node if s·n ranks fit into one
    else k = per_node / s of its ranks share a node, and a ring over them can use k network cards at once

Expert groups (ep) are cut out of dp x cp: neighbours in it, tp apart. Gradients of experts are reduced over the
dp·cp / ep ranks that hold the same experts, all other gradients over dp x cp.
"""

import math
from dataclasses import dataclass
from numbers import Integral

from minillm.predict import comms
from minillm.predict.planner.clusters import Cluster

AXES = ("tp", "cp", "dp", "pp")
RECOMPUTE = {
    "none": "everything that backward reads is kept",
    "light": "outputs of norms and activation functions, and keys and values of latent attention, are computed again",
    "full": "every layer keeps its input only",
}


@dataclass(frozen=True)
class Layout:
    """dp·cp·tp·pp ranks. micro_batch: sequences of one microbatch; microbatches: of one data-parallel rank and step.

    chunks: parts of the model per pipeline rank (interleaved); schedule: "1f1b" or "dualpipe"; recompute: one of
    `RECOMPUTE`, what backward computes again; sequence: what lies between tensor-parallel regions is split along the
    sequence.
    """

    dp: int = 1
    zero: int = 0
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    chunks: int = 1
    micro_batch: int = 1
    microbatches: int = 1
    recompute: str = "none"
    sequence: bool = True
    schedule: str = "1f1b"
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "cp", "pp", "ep", "chunks", "micro_batch", "microbatches"):
            if not isinstance(getattr(self, name), Integral) or getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} of a layout must be a whole number of at least 1.")
        if self.zero not in range(4):
            raise ValueError(f"zero {self.zero} of a layout must be a stage from 0 to 3.")
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute {self.recompute!r} is none of {', '.join(RECOMPUTE)}.")
        if sorted(self.order) != sorted(AXES):
            raise ValueError(f"the order {self.order} must name each of {', '.join(AXES)} once, the innermost first.")
        if self.dp * self.cp % self.ep:
            raise ValueError(
                f"ep {self.ep} does not divide dp {self.dp} · cp {self.cp}, whose ranks share the experts."
            )

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def batch(self) -> int:
        """Sequences in one step."""
        return self.dp * self.micro_batch * self.microbatches

    def size(self, axis: str) -> int:
        return getattr(self, axis)

    def stride(self, axis: str) -> int:
        """Distance of two neighbours of an axis in ranks."""
        distance = 1
        for inner in self.order[: self.order.index(axis)]:
            distance *= self.size(inner)
        return distance

    def __str__(self) -> str:
        parts = [f"dp {self.dp}"] + ([f"zero {self.zero}"] if self.zero else [])
        parts += [f"{axis} {self.size(axis)}" for axis in ("tp", "cp", "pp", "ep") if self.size(axis) > 1]
        parts += [f"chunks {self.chunks}"] if self.chunks > 1 else []
        parts += [self.schedule] if self.schedule != "1f1b" else []
        parts += [f"{self.microbatches} x {self.micro_batch} sequences"]
        return ", ".join(parts + ([f"recompute {self.recompute}"] if self.recompute != "none" else []))


@dataclass(frozen=True)
class Path:
    """How the ranks of one group reach each other. in_node: ranks that share a node; bandwidth: bytes/s of one rank;
    latency: seconds. levels: paths inside a node and between the nodes, if all-reduces run in two levels."""

    size: int
    in_node: int
    bandwidth: float
    latency: float
    levels: "tuple[Path, Path] | None" = None

    @property
    def crosses(self) -> bool:
        return self.in_node < self.size

    def ring(self, num_bytes: float) -> float:
        """Seconds of a ring reduce-scatter or all-gather of num_bytes (whole tensor): n - 1 rounds of 1/n each."""
        return comms.ring_seconds(num_bytes, self.size, self.latency, self.bandwidth)

    def all_reduce(self, num_bytes: float) -> float:
        """Seconds of a ring all-reduce; in two levels (`comms.hierarchical_all_reduce`) each rank sends only its node's
        share across."""
        if self.levels is None:
            return 2 * self.ring(num_bytes)
        inside, across = self.levels
        return 2 * inside.ring(num_bytes) + 2 * across.ring(num_bytes / inside.size)

    def message(self, num_bytes: float) -> float:
        return comms.seconds(1, num_bytes, self.latency, self.bandwidth)


def path(cluster: Cluster, stride: int, size: int) -> Path:
    """The links of a group of `size` ranks, `stride` apart."""
    return links(cluster, size, _in_node(cluster, stride, size))


def axis_path(cluster: Cluster, layout: Layout, *axes: str) -> Path:
    """The links of the group along an axis, or of the flattened group over several."""
    sizes = [layout.size(axis) for axis in axes]
    shared = [_in_node(cluster, layout.stride(axis), layout.size(axis)) for axis in axes]
    return links(cluster, math.prod(sizes), math.prod(shared))


def gradient_path(cluster: Cluster, layout: Layout) -> Path:
    """The links of the flattened dp x cp group, over which gradients and the loss are reduced."""
    return axis_path(cluster, layout, "dp", "cp")


def expert_path(cluster: Cluster, layout: Layout) -> Path:
    """The links of the ranks that share the experts of a layer: neighbours in dp x cp."""
    inner = min((layout.stride(axis) for axis in ("dp", "cp") if layout.size(axis) > 1), default=1)
    return path(cluster, inner, layout.ep)


def _in_node(cluster: Cluster, stride: int, size: int) -> int:
    """Ranks of a group that share a node."""
    return size if stride * size <= cluster.per_node else max(1, cluster.per_node // stride)


def links(cluster: Cluster, size: int, in_node: int) -> Path:
    """The links of a group of `size` ranks, of which `in_node` share a node."""
    device = cluster.device
    if in_node == size:
        return Path(size, in_node, device.link * cluster.link_efficiency, cluster.latency[0])
    cards = min(in_node, cluster.cards_per_ring or in_node)
    rate, share = min(device.link, cards * cluster.network), cluster.link_efficiency
    levels = None
    if cluster.two_level and in_node > 1:
        inside = Path(in_node, in_node, device.link * share, cluster.latency[0])
        across = Path(size // in_node, 1, min(device.link, cluster.network) * share, cluster.latency[1])
        levels = inside, across
    return Path(size, in_node, rate * share, cluster.latency[1], levels)


USES = {
    "tp": "inputs and outputs of every layer",
    "cp": "keys and values",
    "dp": "rows of the batch",
    "pp": "activations between stages",
    "dp_cp": "gradients, ZeRO's shards and the loss",
    "ep": "tokens on their way to experts",
    "expert_replicas": "gradients of experts",
}


def show_mesh(cluster: Cluster, layout: Layout) -> list[dict]:
    """One row per axis, innermost first: size, stride, link class, what travels, and its first and last group."""
    if layout.world_size != cluster.gpus:
        raise ValueError(f"{layout} takes {layout.world_size} GPUs; the cluster has {cluster.gpus}.")
    return [
        _group_row(cluster, layout, axis, [layout.stride(axis) * place for place in range(layout.size(axis))])
        for axis in layout.order
    ]


def show_flattened(cluster: Cluster, layout: Layout) -> list[dict]:
    """The groups over several axes or over a part of one, by name: dp x cp, and expert parallelism's cut through it."""
    members = [0]
    for axis in sorted(("dp", "cp"), key=layout.stride):
        members = [rank + layout.stride(axis) * place for place in range(layout.size(axis)) for rank in members]
    rows = [_group_row(cluster, layout, "dp_cp", members)]
    if layout.ep > 1:
        rows.append(_group_row(cluster, layout, "ep", members[: layout.ep]))
        rows.append(_group_row(cluster, layout, "expert_replicas", members[:: layout.ep]))
    return rows


def _group_row(cluster: Cluster, layout: Layout, name: str, first: list[int]) -> dict:
    """first: the members of the group that rank 0 is in. All others are the same, shifted."""
    size = len(first)
    way = links(cluster, size, sum(rank < cluster.per_node for rank in first))
    link = "none" if size == 1 else "between nodes" if way.crosses else "inside a node"
    return {
        "axis": name,
        "size": size,
        "stride": first[1] - first[0] if size > 1 else layout.stride(name) if name in AXES else 1,
        "groups": layout.world_size // size,
        "link": link,
        "bytes_per_s": way.bandwidth if size > 1 else None,
        "use": USES[name],
        "first_group": first,
        "last_group": [layout.world_size - 1 - each for each in reversed(first)],
    }
