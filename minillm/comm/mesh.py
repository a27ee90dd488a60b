"""A mesh: the ranks laid out along named axes, with a group for every line of ranks along an axis.

    Mesh(group, dp=2, tp=4)     rank = dp_index * 4 + tp_index, the last axis varies fastest

        tp ->   0 1 2 3         mesh.tp on rank 5 is the group of ranks 4 5 6 7
    dp  0       0 1 2 3         mesh.dp on rank 5 is the group of ranks 1 5
    |   1       4 5 6 7

Neighbouring ranks share a node, so the axis that communicates most goes last. `mesh.joined("dp", "cp")` is one group
over two axes: the ranks that differ from this one in no other axis. A mesh is built on torch's DeviceMesh, available as
`mesh.device_mesh` for DTensor and FSDP2. Each group has threads and connections, so a program that makes many meshes
closes each of them: `with Mesh(group, dp=2, tp=4) as mesh:` or `mesh.close()`.
"""

import math

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from minillm.comm.group import Group


class Mesh:
    """Named axes over all ranks of `group`; `mesh.tp` or `mesh["tp"]` is this rank's group along an axis."""

    def __init__(self, group: Group, **axes: int) -> None:
        if not axes or any(not isinstance(size, int) or size < 1 for size in axes.values()):
            raise ValueError(f"axes {axes} must be names with a size of 1 or more, for example Mesh(group, dp=2, tp=2)")
        if taken := [name for name in axes if hasattr(Mesh, name) or name in ("axes", "device_mesh")]:
            raise ValueError(f"axis {taken[0]!r} has the name of an attribute of Mesh: choose another name")
        if math.prod(axes.values()) != group.world_size:
            product = " * ".join(f"{name}={size}" for name, size in axes.items())
            raise ValueError(f"{product} is {math.prod(axes.values())} ranks, but the group has {group.world_size}")
        if group.world_size != dist.get_world_size():
            raise ValueError(f"a mesh covers all {dist.get_world_size()} ranks, not only group {group.name!r}")
        self.axes = dict(axes)
        how = {} if group.backend == dist.get_backend() else {"backend_override": dict.fromkeys(axes, group.backend)}
        self.device_mesh = init_device_mesh(group.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes), **how)
        self._base, self._override = group, group.backend if how else None
        self._groups = {name: self._line(self.device_mesh, name) for name in axes}
        self._joined: dict[tuple[str, ...], Group] = {}
        group.world.kept.append(self)

    def close(self) -> None:
        """Ends the groups, with their threads and connections. Every rank calls it; it waits for all of them."""
        if self.device_mesh is None:
            return
        groups = [*self._groups.values(), *self._joined.values()]
        for group in groups:
            group.finish()
        self._base.barrier()  # until then, another rank may need what this one has sent
        for group in groups:
            process_group = group.process_group
            group.release()
            group.world.kept.remove(group)
            if process_group is not dist.group.WORLD:  # which torch takes for an axis of all ranks
                dist.destroy_process_group(process_group)
        self.release()
        self._base.world.kept.remove(self)

    def release(self) -> None:
        """Lets go of torch's device mesh. Its registry would outlive it: mesh and slices refer to each other."""
        getattr(self.device_mesh, "_pg_registry", {}).clear()
        self.device_mesh = None

    def __enter__(self) -> "Mesh":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        """After an error the other ranks may never arrive, so the groups stay until the world ends."""
        if kind is None:
            self.close()

    def joined(self, *axes: str) -> Group:
        """The group over several axes, named "dp_cp", with its ranks in the order of the mesh. Every rank calls it.

        If all axes but the first have size 1, returns the first axis's group: a gradient's sum over dp keeps its name
        where there is no cp.
        """
        if all(self[axis].world_size == 1 for axis in axes[1:]):
            return self[axes[0]]
        if axes not in self._joined:
            name = "_".join(axes)
            ordered = tuple(axis for axis in self.axes if axis in axes)  # torch takes slices in the mesh's order only
            flat = self.device_mesh[ordered]._flatten(name, self._override)
            self._joined[axes] = self._line(flat, name)
        return self._joined[axes]

    def _line(self, device_mesh: DeviceMesh, axis: str) -> Group:
        process_group, world, backend = device_mesh.get_group(axis), self._base.world, self._base.backend
        if backend in ("gloo", "nccl"):
            dist.distributed_c10d._set_pg_timeout(world.timeout, process_group)
        return Group(world, process_group, dist.get_process_group_ranks(process_group), axis)

    def __getitem__(self, axis: str) -> Group:
        if axis not in self._groups:
            raise ValueError(f"axis {axis!r} is not in this mesh: it has {', '.join(self.axes)}")
        return self._groups[axis]

    def __getattr__(self, axis: str) -> Group:
        groups = self.__dict__.get("_groups", {})
        if axis not in groups:
            raise AttributeError(f"this mesh has no axis {axis!r}: it has {', '.join(groups)}")
        return groups[axis]

    def stride(self, axis: str) -> int:
        """How far apart the global ranks of neighbours along the axis are."""
        names = list(self.axes)
        return math.prod(self.axes[inner] for inner in names[names.index(axis) + 1 :])

    @property
    def place(self) -> dict[str, int]:
        """This rank's index along every axis."""
        return {name: group.rank for name, group in self._groups.items()}
