"""Tokens to experts on other ranks and back, against one process that computes token by token."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm.comm import launch
from minillm.model import Transformer
from minillm.model.moe import sort_by_expert
from minillm.parallel.expert_parallel import expert_parallel
from minillm.parallel.expert_parallel.dispatch import inverse
from minillm.predict.training import moe
from tests.engine.comm.nccl_like import on_nccl_like
from tests.engine.parallel.expert_programs import (
    EXPERTS,
    HIDDEN,
    MODEL,
    PAIRS,
    ROUTINGS,
    TOP_K,
    dispatched,
    draw,
    flat_and_over_nodes,
    host_waits,
    model_over_nodes,
    one_process,
    whole_model,
)

ROW_BYTES = 8 * HIDDEN


def assert_equal_to_one_process(ranks):
    for routing in ROUTINGS:
        outs, x_grads, weight_grads, matrices = one_process(routing, len(ranks))
        for rank, found in enumerate(ranks):
            values, own, _ = found[routing]
            for value, right in zip(values, (outs[rank], x_grads[rank], weight_grads[rank]), strict=True):
                torch.testing.assert_close(value, right, rtol=1e-12, atol=1e-12, msg=f"{routing}, rank {rank}")
            torch.testing.assert_close(own, matrices.chunk(len(ranks))[rank], rtol=1e-12, atol=1e-12)


def sent_rows(routing, ranks):
    """[from][to]: rows, counted from the routing itself."""
    each = EXPERTS // ranks
    homes = [ids[ids >= 0] // each for ids in draw(routing, ranks)[1]]
    return [torch.bincount(home, minlength=ranks).tolist() for home in homes]


def assert_calls_and_bytes(ranks):
    for routing in ROUTINGS:
        rows = sent_rows(routing, len(ranks))
        sent = moe.all_to_all(rows, ROW_BYTES).sent_per_rank
        for rank, found in enumerate(ranks):
            forward, both, forward_bytes, all_bytes, _ = found[routing][-1]
            back = ROW_BYTES * (sum(row[rank] for row in rows) - rows[rank][rank])
            assert forward == {"all_gather": 1, "all_to_all": 2} and both == {"all_gather": 1, "all_to_all": 4}
            assert forward_bytes == sent[rank] + back and all_bytes == 2 * (sent[rank] + back)
    equal = moe.all_to_all_bytes(EXPERTS, TOP_K, HIDDEN, 8, len(ranks))
    assert all(found["equal"][-1][3] == 4 * equal for found in ranks)


def sent_over_nodes(routing):
    """By rank of two nodes of two: rows that cross in two levels, one for a token that has experts on the other."""
    chosen = draw(routing, 4)[1]
    return [(ids // (EXPERTS // 2) == 1 - rank // 2).any(1).sum().item() for rank, ids in enumerate(chosen)]


def test_on_a_backend_that_keeps_the_rules_of_nccl():
    ranks = launch(on_nccl_like(dispatched), 2)
    assert_equal_to_one_process(ranks)
    assert_calls_and_bytes(ranks)


def test_one_level_and_two():
    """Outputs, gradients, calls and bytes; in two levels a token's row leaves its node once for each other node."""
    check_levels(launch(flat_and_over_nodes, 4))


def test_the_host_waits_once_for_a_layer():
    """For the sizes of messages, in one level and in two."""
    assert launch(on_nccl_like(host_waits), 4) == [[1, 1]] * 4


@pytest.mark.full
def test_one_level_and_two_on_a_backend_that_keeps_the_rules_of_nccl():
    check_levels(launch(on_nccl_like(flat_and_over_nodes), 4))


def check_levels(found):
    flat, two_level, alone = ([each[level] for each in found] for level in range(3))
    assert_equal_to_one_process(flat)
    assert_calls_and_bytes(flat)
    assert_equal_to_one_process(two_level)
    assert_equal_to_one_process(alone)  # a node of one rank each
    for routing in ROUTINGS:
        reached = sent_over_nodes(routing)
        for rank, found in enumerate(two_level):
            leave, come = reached[rank], reached[(rank + 2) % 4]
            rows, ids = 8 * (2 * HIDDEN + TOP_K) * (leave + come), 8 * TOP_K * leave
            assert found[routing][-1][4] == rows + ids
            assert found[routing][-1][:2] == ({"all_gather": 2, "all_to_all": 5}, {"all_gather": 2, "all_to_all": 9})
    flat_rows, node_rows = (len(PAIRS) * rows for rows in moe.crossing_rows(EXPERTS, TOP_K, 2))
    assert sent_over_nodes("every pair") == [node_rows] * 4
    assert [sum(row[2 * (rank < 2) :][:2]) for rank, row in enumerate(sent_rows("every pair", 4))] == [flat_rows] * 4


def test_a_model_over_nodes():
    """The collectives of a step and what each sends, counted from what the routers chose."""
    ranks, cell = launch(model_over_nodes, 4), 8
    for rank, found in enumerate(ranks):
        beside, beyond = rank ^ 1, (rank + 2) % 4  # the other rank of this node, this one's place on the other node
        forward, backward = [], []
        for layer in range(2):
            homes = [each["chosen"][layer] // 2 for each in ranks]  # the rank of each chosen expert
            leave, come = (int((homes[at] // 2 == to // 2).any(1).sum()) for at, to in ((rank, beyond), (beyond, rank)))
            there = sum(int((homes[at] == beside).sum()) for at in (rank, beyond))
            back = sum(int((homes[at] == rank).sum()) for at in (beside, beyond ^ 1))
            row, wide = 8 * cell, (8 + 2) * cell  # the columns of a row, and two weights
            forward += [("across", wide * leave), ("across", 2 * cell * leave)]
            forward += [("node", row * there), ("node", row * back), ("across", row * come)]
            of_layer = [("across", row * leave), ("node", row * there), ("node", row * back), ("across", wide * come)]
            backward = of_layer + backward
        assert found["forward"] == forward and found["backward"] == backward
        assert found["all_gathers"] == {"across": 2, "node": 2}
        assert found["seen"] == [7, 14]  # while rows are on their way to the nodes, and their gradients back


def test_a_model_has_two_all_to_alls_per_layer_of_experts_and_direction():
    """And its shared experts are computed while rows are on their way, forward and backward."""
    ranks = launch(whole_model, 2)
    for rank, found in enumerate(ranks):
        row, other = 8 * 8, 1 - rank
        to = [row * counts[other] for counts in found["rows"]]  # a layer's rows that leave this rank, and that return
        come = [row * counts[rank] for counts in ranks[other]["rows"]]
        assert found["forward"] == [to[0], come[0], to[1], come[1]]
        assert found["both"][4:] == [to[1], come[1], to[0], come[0]]
        assert found["seen"] == [3, 6]  # after the first all-to-all of layer 2, and the second of its backward
        assert set(map(tuple, found["held"].values())) == {(4, 2, 6, 8), (4, 8, 6)} and found["same"]


def test_groups_that_are_not_the_nodes_of_the_experts():
    group, node = SimpleNamespace(name="ep", rank=1, world_size=4), SimpleNamespace(rank=1, world_size=2)
    across = SimpleNamespace(rank=0, world_size=2)
    model = Transformer(MODEL, device="meta")
    for levels, said in (
        ({"node": across, "across": node}, "group 'ep' of 4 ranks is not 2 nodes of 2 neighbours"),
        ({"node": node, "across": group}, "group 'ep' of 4 ranks is not 4 nodes of 2 neighbours"),
        ({"node": node}, "two levels need both groups"),
    ):
        with pytest.raises(ValueError, match=said):
            expert_parallel(model, MODEL, group, **levels)
    three = SimpleNamespace(name="ep", rank=1, world_size=3)
    with pytest.raises(ValueError, match="8 experts do not divide over 3 expert-parallel ranks"):
        expert_parallel(model, MODEL, three)


@given(st.permutations(range(9)))
def test_the_inverse_of_a_permutation_undoes_it(places):
    order, rows = torch.tensor(places), torch.randn(9, 2)
    assert torch.equal(rows[order][inverse(order)], rows) and torch.equal(inverse(inverse(order)), order)


@given(st.lists(st.integers(-1, 6), max_size=40))
def test_rows_go_to_their_experts_and_come_home(ids):
    chosen = torch.tensor(ids, dtype=torch.int64)[:, None]
    x = torch.randn(len(ids), 3)
    routes = sort_by_expert(chosen, 7)
    rows = routes.to_experts(x)
    assert routes.counts.tolist() == [ids.count(expert) for expert in range(7)]
    assert torch.equal(rows, x[torch.tensor([at for e in range(7) for at, own in enumerate(ids) if own == e]).long()])
    assert torch.equal(routes.from_experts(rows, torch.ones(len(ids), 1)), x * (chosen >= 0))
