"""A layout of a cluster: ranks per axis, where an axis's groups lie, and the link that they talk over.

    order ("tp", "cp", "dp", "pp"), innermost first: rank = tp + TP·(cp + CP·(dp + DP·pp))
    an axis of n ranks with stride s lies inside a node if s·n ranks fit into one
    else k = per_node / s of its ranks share a node, and a ring over them can use k network cards at once

Expert groups (ep) are cut out of dp x cp: neighbours in it, tp apart. Gradients of experts are reduced over the
dp·cp / ep ranks that hold the same experts, all other gradients over dp x cp.
"""

from dataclasses import dataclass

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
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} of a layout must be at least 1.")
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
        """Sequences of one step."""
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
    latency: seconds."""

    size: int
    in_node: int
    bandwidth: float
    latency: float

    @property
    def crosses(self) -> bool:
        return self.in_node < self.size

    def ring(self, num_bytes: float) -> float:
        """Seconds of a ring reduce-scatter or all-gather of num_bytes (whole tensor): n - 1 rounds of 1/n each."""
        if self.size == 1:
            return 0.0
        return (self.size - 1) * (self.latency + num_bytes / self.size / self.bandwidth)

    def message(self, num_bytes: float) -> float:
        return self.latency + num_bytes / self.bandwidth


def path(cluster: Cluster, stride: int, size: int) -> Path:
    """The links of a group of `size` ranks, `stride` apart."""
    device, per_node = cluster.device, cluster.per_node
    in_node = size if stride * size <= per_node else max(1, per_node // stride)
    if in_node == size:
        return Path(size, in_node, device.link * cluster.link_efficiency, cluster.latency[0])
    rate = min(device.link, in_node * cluster.network)
    return Path(size, in_node, rate * cluster.link_efficiency, cluster.latency[1])


def axis_path(cluster: Cluster, layout: Layout, axis: str) -> Path:
    return path(cluster, layout.stride(axis), layout.size(axis))


def gradient_path(cluster: Cluster, layout: Layout) -> Path:
    """Of the flattened dp x cp group, over which gradients and the loss are reduced."""
    return path(cluster, min(layout.stride("dp"), layout.stride("cp")), layout.dp * layout.cp)


def show_mesh(cluster: Cluster, layout: Layout) -> list[dict]:
    """One row per axis, innermost first: size, stride, link class, ranks that share a node, first and last group."""
    if layout.world_size != cluster.gpus:
        raise ValueError(f"{layout} takes {layout.world_size} GPUs; the cluster has {cluster.gpus}.")
    rows = []
    for axis in layout.order:
        size, stride = layout.size(axis), layout.stride(axis)
        way = axis_path(cluster, layout, axis)
        first = [stride * place for place in range(size)]
        last = [layout.world_size - 1 - each for each in reversed(first)]
        link = "none" if size == 1 else "between nodes" if way.crosses else "inside a node"
        rows.append(
            {
                "axis": axis,
                "size": size,
                "stride": stride,
                "groups": layout.world_size // size,
                "link": link,
                "bytes_per_s": way.bandwidth if size > 1 else None,
                "first_group": first,
                "last_group": last,
            }
        )
    return rows
