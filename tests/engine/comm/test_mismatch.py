"""Ranks that disagree, and input that cannot work: one sentence that names the rank and the shape, not a hang."""

import pytest
import torch

from minillm import comm
from minillm.comm import MismatchError, RankError, launch

pytestmark = pytest.mark.drawn(2)


def told(program, nproc: int = 3, kind: type = MismatchError) -> str:
    """What launch says about the program's failure."""
    with pytest.raises(RankError) as caught:
        launch(program, nproc, timeout=20)
    assert isinstance(caught.value.__cause__, kind), caught.value
    return str(caught.value.__cause__)


def refused(call, nproc: int = 3) -> str:
    """What `call(group)` says in its ValueError: the same kind on all ranks, none of which is left waiting."""

    def program(group):
        try:
            call(group)
        except ValueError as error:
            group.barrier()
            return str(error)
        return ""

    said = launch(program, nproc, timeout=20)
    assert all(said), said
    return said[0]


COLLECTIVES = {
    "all_reduce": lambda g, x: g.all_reduce(x),
    "async all_reduce": lambda g, x: g.all_reduce(x, async_op=True).wait(),
    "broadcast": lambda g, x: g.broadcast(x),
    "all_gather": lambda g, x: g.all_gather(x),
    "reduce_scatter": lambda g, x: g.reduce_scatter(x),
    "all_to_all": lambda g, x: g.all_to_all(x),
    "ring_all_reduce": lambda g, x: comm.ring_all_reduce(x, g),
    "tree_reduce": lambda g, x: comm.tree_reduce(x, g),
    "recursive_doubling_all_reduce": lambda g, x: comm.recursive_doubling_all_reduce(x, g),
    "parameter_server_all_reduce": lambda g, x: comm.parameter_server_all_reduce(x, g),
    "hierarchical_all_reduce": lambda g, x: comm.hierarchical_all_reduce(x, g, 1),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_shapes_that_differ(name: str) -> None:
    call = COLLECTIVES[name]
    text = told(lambda group: call(group, torch.ones(6 if group.rank == 1 else 3, 2)))
    kind = name.removeprefix("async ")
    assert kind in text and "[6, 2] float32 on rank 1" in text and "[3, 2] float32 on rank" in text


def test_same_size_but_other_shape() -> None:
    text = told(lambda group: group.all_reduce(torch.ones(*((2, 3) if group.rank else (3, 2)))))
    assert "[2, 3]" in text and "[3, 2]" in text


def test_dtypes_that_differ() -> None:
    text = told(lambda group: group.all_reduce(torch.ones(4, dtype=torch.float16 if group.rank == 2 else torch.int16)))
    assert "all_reduce [4] float16 on rank 2" in text and "all_reduce [4] int16 on rank" in text


def test_operations_that_differ() -> None:
    text = told(lambda g: g.all_gather(torch.ones(3)) if g.rank == 0 else g.all_reduce(torch.ones(3)))
    assert "all_gather [3] float32 on rank 0" in text and "all_reduce [3] float32 on rank" in text
    assert "operation 1 of group 'world'" in text


def test_reductions_and_roots_that_differ() -> None:
    """These would not hang but give wrong numbers."""
    text = told(lambda g: g.all_reduce(torch.ones(3), op="max" if g.rank == 1 else "sum"))
    assert "all_reduce(op=max) [3] float32 on rank 1" in text
    text = told(lambda g: comm.ring_all_reduce(torch.ones(3), g, "max" if g.rank == 1 else "sum"))
    assert "ring_all_reduce(op=max) [3] float32 on rank 1" in text
    text = told(lambda g: g.broadcast(torch.ones(3), root=g.rank))
    assert "broadcast(root=" in text
    # saying the default aloud is no difference
    assert launch(lambda g: comm.tree_broadcast(torch.ones(1), g, *[0] * g.rank).item(), 2) == [1, 1]


def test_uneven_gather_may_differ() -> None:
    def program(group):
        x = torch.full((2 - group.rank // 2,), group.rank)
        return comm.ring_all_gather(x, group, out=torch.empty(5, dtype=torch.int64)).tolist()

    assert launch(program, 3) == [[0, 0, 1, 1, 2]] * 3


@pytest.mark.parametrize("late", ["send", "recv"])
def test_messages_of_other_size(late: str) -> None:
    def program(group):
        import time

        if (group.rank == 0) == (late == "send"):
            time.sleep(0.2)
        if group.rank == 0:
            group.send(torch.ones(2, 3), 1)
        else:
            group.recv(torch.ones(4), 0)

    text = told(program, 2)
    assert "6 float32 in [2, 3]" in text and "4 float32 in [4]" in text and "rank 0" in text and "rank 1" in text


def test_messages_of_other_dtype() -> None:
    """The same number of bytes: they would arrive as nonsense."""

    def program(group):
        if group.rank == 0:
            group.send(torch.ones(4), 1)
        else:
            group.recv(torch.ones(4, dtype=torch.int32), 0)

    text = told(program, 2)
    assert "float32" in text and "int32" in text


def test_messages_may_change_shape_and_have_many_dimensions() -> None:
    def program(group):
        x = torch.full((1,) * 40 + (6,), float(group.rank))
        if group.rank == 0:
            group.send(x, 1)
        else:
            group.recv(x := torch.zeros(3, 2), 0)
        return x.sum().item()

    assert launch(program, 2) == [0, 0]


# Input that is wrong on every rank.


@pytest.mark.drawn(2)
@pytest.mark.parametrize("root", [-1, 3, 1.5, "0"])
def test_roots_and_peers_that_do_not_exist(root) -> None:
    for call in (
        lambda g: g.broadcast(torch.ones(1), root),
        lambda g: comm.tree_broadcast(torch.ones(1), g, root),
        lambda g: comm.tree_reduce(torch.ones(1), g, root),
        lambda g: comm.parameter_server_all_reduce(torch.ones(1), g, root=root),
        lambda g: g.send(torch.ones(1), root),
        lambda g: g.recv(torch.ones(1), root),
    ):
        assert "is not in group 'world': its ranks are 0 to 2" in refused(call)


def test_message_to_oneself() -> None:
    assert "is this rank itself" in refused(lambda g: g.send(torch.ones(1), g.rank))


def test_group_that_the_rank_is_not_in() -> None:
    def program(group):
        pair = group.subgroup([0, 2], "pair")
        assert pair.rank == [0, -1, 1][group.rank]
        calls = (
            lambda: pair.all_reduce(torch.ones(2)),
            lambda: pair.reduce_scatter(torch.ones(2)),
            lambda: pair.barrier(),
            lambda: pair.gather_objects(1),
            lambda: pair.send(torch.ones(1), 0),
            lambda: comm.ring_all_gather(torch.ones(1), pair),
            lambda: pair.broadcast(torch.ones(1), async_op=True),
        )
        said = []
        if group.rank == 1:
            for call in calls:
                with pytest.raises(ValueError, match="rank 1 called") as caught:
                    call()
                said.append(str(caught.value))
        return said

    said = launch(program, 3)[1]
    assert len(said) == 7 and all("group 'pair', which it is not in (members: [0, 2])" in text for text in said)


@pytest.mark.parametrize("ranks", [[], [0, 0], [0, 3], [-1], [1, 0]])
def test_subgroups_that_cannot_be(ranks: list[int]) -> None:
    assert refused(lambda g: g.subgroup(ranks, "odd"))


def test_tensors_that_do_not_fit() -> None:
    x = torch.ones(4, 3)
    assert "[4, 3] tensor into 3 equal parts" in refused(lambda g: g.reduce_scatter(x))
    assert "[4, 3] tensor into 3 equal parts" in refused(lambda g: g.all_to_all(x))
    assert "[4, 3] tensor into 3 equal parts" in refused(lambda g: comm.pairwise_all_to_all(x, g))
    assert "[] tensor" in refused(lambda g: g.all_to_all(torch.tensor(1.0)))
    wide = torch.empty(3, 12)
    assert "out [12, 3] is not contiguous" in refused(lambda g: g.all_gather(x, out=wide.t()))
    assert "out is float16" in refused(lambda g: g.all_gather(x, out=torch.empty(12, 3, dtype=torch.float16))).replace(
        "torch.", ""
    )
    assert "gathers 12 elements" in refused(lambda g: g.all_gather(x, out=torch.empty(12)))
    assert "non-contiguous [12, 3] tensor" in refused(lambda g: g.recv(wide.t(), (g.rank + 1) % 3))
    assert "does not divide the 3 ranks" in refused(lambda g: comm.hierarchical_all_reduce(x, g, 2))
    assert "does not divide the 3 ranks" in refused(lambda g: comm.hierarchical_all_reduce(x, g, 0))


@pytest.mark.parametrize(
    "reduce",
    [
        lambda x, g, op: g.all_reduce(x, op),
        lambda x, g, op: g.reduce_scatter(x, op),
        lambda x, g, op: comm.tree_reduce(x, g, op=op),
        lambda x, g, op: comm.recursive_doubling_all_reduce(x, g, op),
        lambda x, g, op: comm.hierarchical_all_reduce(x, g, 1, op),
        lambda x, g, op: comm.parameter_server_all_reduce(x, g, op=op),
    ],
)
def test_reductions_that_cannot_be(reduce) -> None:
    def program(group):
        said = []
        for x, op in (
            (torch.ones(4), "mean"),
            (torch.ones(4, dtype=torch.int64), "avg"),
            (torch.ones(4, dtype=torch.bool), "avg"),
            (torch.ones(4, dtype=torch.complex64), "max"),
        ):
            with pytest.raises(ValueError, match="op=") as caught:
                reduce(x, group, op)
            said.append(str(caught.value))
        return said

    for nproc in (1, 2):
        unknown, whole, truth, order = launch(program, nproc)[-1]
        assert "op='mean' is not a reduction: choose one of sum, avg, max, min" in unknown
        assert "torch.int64" in whole and "torch.bool" in truth and "complex64" in order
