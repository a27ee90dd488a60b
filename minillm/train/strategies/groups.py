"""The groups of ranks that a layout needs, one of each of which this rank belongs to.

Mesh(dp, pp, cp, tp)  dp * cp ranks average gradients   (`replicas`)
dp = replicate * shard                  HSDP: shards within `shard` * cp ranks, averages averaged over `replicate`
dp = replicate * copies * ep            experts: a part of them on each of ep ranks, the same on `copies` * cp ranks
"""

from minillm.comm import Group, Mesh
from minillm.train.parallel_config import ParallelConfig


class LayoutGroups:
    """rank, stride: along dp, and how many ranks lie from one to the next.

    is_split: whether there is more than plain data parallelism, which needs no group but that of all ranks.
    tp, pp: along these axes, None if there is one rank; context: what `context_attention` takes, empty without cp.
    replicas: all that average gradients; shard, replicate: those that ZeRO's shards lie on, and with HSDP (otherwise
    None) the ranks that hold the same shards.
    experts: with ep, the ranks that hold the other experts; expert_replicas: those that hold the same ones;
    expert_levels: "node" and "across", if these lie on several nodes.
    ValueError: the layout has another number of ranks.
    """

    def __init__(self, group: Group, layout: ParallelConfig) -> None:
        if group.world_size != layout.world_size:
            raise ValueError(f"{layout} is {layout.world_size} ranks, but group {group.name!r} has {group.world_size}.")
        self.group, self.layout = group, layout
        self._meshes: list[Mesh] = []
        self.rank, self.stride, self.replicas = group.rank, 1, group
        self.tp: Group | None = None
        self.pp: Group | None = None
        self.replicate: Group | None = None
        self.experts: Group | None = None
        self.context: list[Group] = []
        self.is_split = layout.is_hybrid or layout.dp_replicate > 1
        if self.is_split:
            self.mesh = mesh = self._mesh(**layout.axes)
            self.rank, self.stride, self.replicas = mesh.dp.rank, mesh.stride("dp"), mesh.joined("dp", "cp")
            self.tp, self.pp = mesh.tp if layout.tp > 1 else None, mesh.pp if layout.pp > 1 else None
        self.shard, self.expert_replicas = self.replicas, self.replicas
        if layout.dp_replicate > 1 or layout.ep > 1:
            self._divide_replicas()
        self.expert_levels = self._expert_levels() if layout.ep_nodes > 1 else {}
        if layout.cp > 1:
            self.context = self._context()

    def _divide_replicas(self) -> None:
        layout = self.layout
        copies = layout.dp // layout.dp_replicate // layout.ep
        parts = self._mesh(**_split(layout, "dp", replicate=layout.dp_replicate, copies=copies, ep=layout.ep))
        if layout.dp_replicate > 1:
            self.shard, self.replicate = parts.joined("copies", "ep", "cp"), parts.replicate
        if layout.ep > 1:
            self.experts, self.expert_replicas = parts.ep, parts.joined("copies", "cp")

    def _expert_levels(self) -> dict[str, Group]:
        """Of the ranks with the other experts, those on this one's node, and those with its place in every node."""
        layout = self.layout
        levels = {"ep_across": layout.ep_nodes, "ep_node": layout.ep // layout.ep_nodes}
        parts = self._mesh(**_split(layout, "dp", copies=layout.dp // layout.ep, **levels))
        return {"node": parts.ep_node, "across": parts.ep_across}

    def _context(self) -> list[Group]:
        layout = self.layout
        if layout.context != "hybrid":
            return [self.mesh.cp]
        nodes = self._mesh(**_split(layout, "cp", across=layout.cp // layout.node, node=layout.node))
        return [nodes.node, nodes.across]

    def _mesh(self, **axes: int) -> Mesh:
        self._meshes.append(Mesh(self.group, **axes))
        return self._meshes[-1]

    def close(self) -> None:
        """Ends the groups; every rank calls it."""
        for mesh in self._meshes:
            mesh.close()


def _split(layout: ParallelConfig, axis: str, **parts: int) -> dict[str, int]:
    """The layout's axes with two in the place of one, the outer part first."""
    axes: dict[str, int] = {}
    for name, size in layout.axes.items():
        axes |= parts if name == axis else {name: size}
    return axes
