"""Tokens to experts on other ranks and back, against one process that computes token by token."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm.comm import launch
from minillm.model.moe import sort_by_expert
from minillm.parallel.expert_parallel.dispatch import inverse
from minillm.predict import moe
from tests.comm.nccl_like import on_nccl_like
from tests.parallel.expert_programs import EXPERTS, HIDDEN, ROUTINGS, TOP_K, dispatched, draw, one_process

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


@pytest.mark.parametrize(("world_size", "how"), [(2, dispatched), (4, dispatched), (2, on_nccl_like(dispatched))])
def test_outputs_gradients_calls_and_bytes(world_size, how):
    """The last case on a backend that keeps NCCL's rules."""
    ranks = launch(how, world_size)
    assert_equal_to_one_process(ranks)
    for routing in ROUTINGS:
        sent = moe.all_to_all(sent_rows(routing, world_size), ROW_BYTES).sent_per_rank
        for rank, found in enumerate(ranks):
            forward, both, forward_bytes, all_bytes, _ = found[routing][-1]
            came = sum(row[rank] for row in sent_rows(routing, world_size))
            back = ROW_BYTES * (came - sent_rows(routing, world_size)[rank][rank])
            assert forward == {"all_gather": 1, "all_to_all": 2} and both == {"all_gather": 1, "all_to_all": 4}
            assert forward_bytes == sent[rank] + back and all_bytes == 2 * (sent[rank] + back)
    equal = moe.all_to_all_bytes(EXPERTS, TOP_K, HIDDEN, 8, world_size)
    assert all(found["equal"][-1][3] == 4 * equal for found in ranks)


def test_two_levels_send_fewer_rows_between_nodes():
    ranks = launch(partial(dispatched, nodes=2), 4)
    assert_equal_to_one_process(ranks)
    for routing in ROUTINGS:
        chosen = draw(routing, 4)[1]
        for rank, found in enumerate(ranks):
            other = (chosen[rank] // (EXPERTS // 2) == 1 - rank // 2).any(1).sum().item()  # a row per node
            pair = [0, 2] if rank in (0, 2) else [1, 3]
            partner = sum(pair) - rank
            came = (chosen[partner] // (EXPERTS // 2) == rank // 2).any(1).sum().item()
            rows, home = 8 * (HIDDEN + TOP_K), 8 * HIDDEN
            ids = 8 * TOP_K * other
            assert found[routing][-1][4] == other * (rows + home) + came * (rows + home) + ids


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
