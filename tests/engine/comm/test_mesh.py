"""Meshes: the same lines of ranks as an arange cut along the axes, as torch's DeviceMesh has them."""

import math
import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from minillm.comm import Mesh, launch
from minillm.measure import ledger


def lines(group, layouts):
    """For each mesh: this rank's line, its place and the sum of the ranks along every axis."""
    found = []
    for axes in layouts:
        mesh = Mesh(group, **axes)
        with ledger() as led:
            sums = {name: mesh[name].all_reduce(torch.tensor([group.rank])).item() for name in axes}
        for name in axes:
            axis = mesh[name]
            assert axis is getattr(mesh, name) and axis.name == name and axis.world_size == axes[name]
            assert axis.ranks == dist.get_process_group_ranks(mesh.device_mesh.get_group(name))
            assert axis.ranks[axis.rank] == group.rank
            assert mesh.device_mesh.get_local_rank(name) == axis.rank
            assert {b - a for a, b in pairwise(axis.ranks)} <= {mesh.stride(name)}
            assert led.calls["all_reduce"] == len(axes) and len(led.select(group=name)) == 1
            axis.barrier()
            assert axis.gather_objects(group.rank) == axis.ranks
        found.append(({name: mesh[name].ranks for name in axes}, mesh.place, sums, mesh.axes))
    return found


@pytest.mark.parametrize(
    ("nproc", "layouts"),
    [
        (4, [{"dp": 2, "tp": 2}, {"dp": 4, "tp": 1}, {"dp": 1, "tp": 4}, {"x": 4}, {"a": 1, "b": 2, "c": 1, "d": 2}]),
        (8, [{"pp": 2, "dp": 2, "tp": 2}]),
        (1, [{"dp": 1, "tp": 1}]),
    ],
)
def test_lines_are_slices_of_an_arange(nproc: int, layouts: list[dict[str, int]]) -> None:
    results = launch(lines, nproc, layouts)
    for i, axes in enumerate(layouts):
        ranks = torch.arange(math.prod(axes.values())).view(*axes.values())
        for rank, found in enumerate(results):
            groups, place, sums, said = found[i]
            assert said == axes
            where = [int(index[0]) for index in torch.where(ranks == rank)]
            assert place == dict(zip(axes, where, strict=True))
            for k, name in enumerate(axes):
                line = ranks.movedim(k, -1)[tuple(where[:k] + where[k + 1 :])].tolist()
                assert groups[name] == line and sums[name] == sum(line)


def test_axes_that_cannot_be() -> None:
    def program(group):
        said = []
        pair = group.subgroup([0, 1], "pair")
        for where, axes in (
            (group, {}),
            (group, {"dp": 3}),
            (group, {"dp": 0, "tp": 4}),
            (group, {"dp": -2, "tp": -2}),
            (group, {"dp": 2.0, "tp": 2}),
            (group, {"axes": 4}),
            (group, {"place": 4}),
            (pair, {"dp": 2}),
        ):
            with pytest.raises(ValueError) as caught:
                Mesh(where, **axes)
            said.append(str(caught.value))
        mesh = Mesh(group, dp=2, tp=2)
        with pytest.raises(ValueError, match="axis 'pp' is not in this mesh: it has dp, tp"):
            mesh["pp"]
        with pytest.raises(AttributeError, match="this mesh has no axis 'pp': it has dp, tp"):
            mesh.pp  # noqa: B018
        return said

    said = launch(program, 4)[0]
    assert "dp=3 is 3 ranks, but the group has 4" in said[1]
    assert all("must be names with a size of 1 or more" in said[i] for i in (0, 2, 3, 4))
    assert all("has the name of an attribute" in said[i] for i in (5, 6))
    assert "not only group 'pair'" in said[7]


def threads_and_sockets() -> tuple[int, int]:
    links = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return len(os.listdir("/proc/self/task")), sum(link.startswith("socket:") for link in links)


def one_after_another(group, count):
    """Threads and sockets: while the first mesh is used, after it, and after `count` more."""
    found = []
    for number in range(1 + count):
        with Mesh(group, dp=2, tp=2) as mesh:
            works = [mesh[axis].all_reduce(torch.ones(9), async_op=True) for axis in ("dp", "tp")]
            both = mesh.joined("dp", "tp").all_reduce(torch.ones(1)).item()
            assert (works[0].wait()[0].item(), both) == (2, 4)
            if number == 0:
                found.append(threads_and_sockets())
        with pytest.raises(ValueError, match="group 'dp' has ended with its mesh, so there is no all_reduce"):
            mesh.dp.all_reduce(torch.ones(1))
        if number in (0, count):
            found.append(threads_and_sockets())
    mesh.close()  # once more does nothing
    return found, group.all_reduce(torch.ones(1)).item()


def test_meshes_end_their_groups():
    for (during, first, last), total in launch(one_after_another, 4, 50):
        assert during[0] > first[0] and during[1] > first[1]
        assert last == first and total == 4


def joined(group):
    mesh = Mesh(group, dp=2, pp=2, cp=2)
    both = mesh.joined("dp", "cp")
    with ledger() as led:
        total = both.all_reduce(torch.tensor([group.rank])).item()
    alone = Mesh(group, dp=1, cp=4, tp=2)
    assert mesh.joined("dp", "cp") is both and mesh.joined("pp") is mesh.pp
    assert alone.joined("tp", "dp") is alone.tp and alone.joined("dp", "cp").ranks == alone.cp.ranks
    return both.ranks, both.rank, both.name, total, len(led.select(group="dp_cp"))


def test_two_axes_joined_are_one_group():
    for rank, found in enumerate(launch(joined, 8)):
        pp = rank // 2 % 2
        ranks = [4 * dp + 2 * pp + cp for dp in range(2) for cp in range(2)]
        assert found == (ranks, ranks.index(rank), "dp_cp", sum(ranks), 1)
