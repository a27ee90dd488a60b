"""Experts: bytes, loads, capacity, against counting and enumeration."""

import itertools
import random

import numpy as np
import pytest
import torch

from minillm.comm import launch
from minillm.data import Tokens
from minillm.measure import memory
from minillm.model import ModelConfig, MoEConfig
from minillm.predict import comms
from minillm.predict.model import matmul_parameters, parameters
from minillm.predict.training import moe, tensor
from minillm.train import TrainConfig, Trainer
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies.hybrid import make_strategy


def test_mixtral_has_47_billion_parameters_and_uses_13():
    """https://arxiv.org/abs/2401.04088, §2: 47 B parameters, of which a token uses 13 B."""
    mixtral = ModelConfig(32000, 4096, 14336, 32, 32, 8, moe=MoEConfig(8, 2))
    assert parameters(mixtral).total / 1e9 == pytest.approx(46.7, abs=0.05)
    look_up = 32000 * 4096
    assert (matmul_parameters(mixtral) + look_up) / 1e9 == pytest.approx(12.9, abs=0.05)


def test_all_to_all_of_equal_parts_is_the_even_one():
    n, tokens, top_k, hidden, itemsize = 4, 8, 2, 6, 2
    equal = moe.all_to_all([[tokens * top_k // n] * n] * n, hidden * itemsize)
    assert equal == comms.pairwise_all_to_all(tokens * top_k * hidden, itemsize, n)
    assert equal.sent_per_rank[0] == moe.all_to_all_bytes(tokens, top_k, hidden, itemsize, n)
    skewed = moe.all_to_all([[1, 5], [0, 7]], 10)
    assert skewed.sent_per_rank == (50, 0) and skewed.critical_bytes == 50


def test_the_fullest_rank_sets_the_time():
    loads = moe.rank_loads([9, 1, 2, 4], 2)
    assert loads == [10, 6] and moe.imbalance(loads) == 10 / 8 and moe.imbalance([0, 0]) == 1
    assert moe.layer_seconds(loads, 0.5, all_to_all_s=1.0) == 2 + 5


@pytest.mark.parametrize(("tokens", "top_k", "experts", "factor"), [(6, 1, 2, 1.0), (4, 1, 3, 1.25), (4, 2, 3, 0.5)])
def test_expected_drops_are_those_of_all_routings(tokens, top_k, experts, factor):
    limit = moe.capacity(tokens, top_k, experts, factor)
    choices = list(itertools.combinations(range(experts), top_k))
    shares = []
    for routing in itertools.product(choices, repeat=tokens):
        loads = [sum(expert in chosen for chosen in routing) for expert in range(experts)]
        shares.append(moe.dropped_share(loads, limit))
    assert moe.expected_dropped_share(tokens, top_k, experts, factor) == pytest.approx(sum(shares) / len(shares))


MODEL = ModelConfig(64, 16, 32, 2, 4, 2, max_seq_len=16, moe=MoEConfig(8, 2, 8, shared_experts=1, dense_layers=(0,)))
LAYOUTS = [ParallelConfig(dp=2, ep=2, zero=zero) for zero in range(4)] + [ParallelConfig(tp=2)]


def held_before_the_step(group, layouts):
    """By the memory tracker: bytes of parameters, gradients and moments on this rank."""
    torch.set_num_threads(1)
    tokens, found = Tokens((np.arange(3000) ** 2 % 53).astype(np.uint16), 53, 0, 1, 9000), []
    config = TrainConfig(MODEL, seq_len=16, batch_size=2, steps=4)
    for layout in layouts:
        with make_strategy(group, layout) as parallel, Trainer(config, tokens, workers=0, parallel=parallel) as run:
            run.step()  # makes the moments
            run.backward()
            run.finish_gradients()
            live = memory(run.module, run.optimizer).live
            counters = sum(entry["step"].nbytes for entry in run.optimizer.state.values())
            found.append((live.parameter, live.gradient, live.optimizer - counters))
            run.updater.zero_grad()
    return found


def test_state_of_a_rank_is_what_the_memory_tracker_counts():
    for rank in launch(held_before_the_step, 2, LAYOUTS):
        for layout, found in zip(LAYOUTS, rank, strict=True):
            experts = tensor.expert_parameters(MODEL, layout.tp, layout.ep)
            dense = tensor.parameters(MODEL, layout.tp, layout.ep) - experts
            state = moe.rank_state(dense, experts, layout.dp, layout.ep, layout.zero)
            assert found == (state.parameter, state.gradient, state.optimizer), layout


def test_parameters_of_a_rank():
    assert tensor.parameters(MODEL, 1) == parameters(MODEL).total
    assert parameters(MODEL).total - tensor.parameters(MODEL, 1, 4) == 3 * tensor.expert_parameters(MODEL, 1, 4)
    with pytest.raises(ValueError, match="ep 3 of 4 ranks"):
        moe.rank_state(1, 1, 4, ep=3)


def test_capacity_bounds():
    assert moe.capacity(100, 2, 8, 1.0) == 25 and moe.capacity(3, 2, 2, 4.0) == 3
    assert moe.expected_dropped_share(5, 4, 4, 0.5) == pytest.approx(0.4)  # every expert is asked by all five
    assert moe.dropped_share([0, 0], 1) == 0


def test_nodes_reached_by_enumeration():
    for experts, top_k, nodes in ((8, 2, 4), (6, 3, 2), (8, 8, 2), (8, 1, 8)):
        each = experts // nodes
        drawn = list(itertools.combinations(range(experts), top_k))
        mean = sum(len({expert // each for expert in chosen}) for chosen in drawn) / len(drawn)
        assert moe.nodes_reached(experts, top_k, nodes) == pytest.approx(mean)
    flat, two_level = moe.crossing_rows(256, 8, 4)
    assert flat == 6 and two_level == pytest.approx(0.75 * moe.nodes_reached(256, 8, 4)) and two_level < 3


def test_bad_input_in_one_sentence():
    for call, message in (
        (lambda: moe.capacity(4, 1, 2, 0), "capacity factor 0 must be above 0"),
        (lambda: moe.rank_loads([1, 2, 3], 2), "3 experts do not divide over 2 ranks"),
        (lambda: moe.nodes_reached(8, 2, 3), "8 experts do not divide over 3 nodes"),
        (lambda: moe.all_to_all([[1, 2]], 4), "a square of 1 by 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_random_loads_and_imbalance():
    draw = random.Random(0)
    for _ in range(20):
        loads = [draw.randrange(100) for _ in range(8)]
        assert 1 <= moe.imbalance(moe.rank_loads(loads, 4)) <= moe.imbalance(loads) <= 8
