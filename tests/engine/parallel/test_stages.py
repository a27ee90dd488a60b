"""Parts of the model against the whole one, and the balance of layers against every way to cut."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm.model import ModelConfig, Transformer
from minillm.parallel.pipeline_parallel.schedule import schedules
from minillm.parallel.pipeline_parallel.stages import ModelPart, balance, build_parts, layer_costs
from minillm.predict.model import parameters
from minillm.train.activation_checkpointing import checkpoint_blocks


def config(tied=False):
    return ModelConfig(16, 8, 12, 5, 2, 1, max_seq_len=4, tie_embeddings=tied, qkv_bias=True, qk_norm=True)


def tokens(seed):
    return torch.randint(16, (2, 4), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
def test_parts_in_a_row_are_the_whole_model(tied, recomputed):
    whole = Transformer(config(tied), dtype=torch.float64)
    ranges = [range(0, 2), range(2, 2), range(2, 5)]
    parts = [
        ModelPart(config(tied), layers, first=i == 0, last=i == 2, dtype=torch.float64)
        for i, layers in enumerate(ranges)
    ]
    assert [part.tied for part in parts] == ([("embedding.weight",), (), ("embedding.weight",)] if tied else [()] * 3)
    if recomputed:
        parts = [checkpoint_blocks(part) for part in parts]
    x, targets = tokens(0), tokens(1)
    weights = torch.rand(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for part in parts:
        x = part(x)
    assert torch.equal(parts[2].logits(x), whole(tokens(0)))
    loss, weight = parts[2].loss(x, targets, weights)
    expected, expected_weight = whole(tokens(0), targets=targets, weights=weights)
    assert torch.equal(loss, expected) and torch.equal(weight, expected_weight)
    loss.backward()
    expected.backward()
    found = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            found[name] = found.get(name, 0) + parameter.grad
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    assert set(found) == set(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-14)


def test_one_part_is_the_whole_and_values_can_be_left_unset():
    whole = Transformer(config(True), seed=3)
    part = ModelPart(config(True), range(5), first=True, last=True, seed=3)
    assert part.tied == ()
    assert [name for name, _ in part.named_parameters()] == [name for name, _ in whole.named_parameters()]
    assert all(torch.equal(a, b) for a, b in zip(part.parameters(), whole.parameters(), strict=True))
    empty = ModelPart(config(True), range(5), first=True, last=True, device="meta").to_empty(device="cpu")
    assert torch.equal(empty.initialize(3)(tokens(0)), part(tokens(0)))
    part.load_state_dict(whole.state_dict())


def test_bad_input_is_one_sentence():
    with pytest.raises(ValueError, match=r"layers range\(3, 7\) do not lie in the model's 5"):
        ModelPart(config(), range(3, 7), first=False, last=True)
    with pytest.raises(ValueError, match="6 parts need 6 layers, but the model has 5"):
        build_parts(config(), schedules.gpipe(6, 2), 0)
    with pytest.raises(ValueError, match="1 ranges of layers for the 2 parts of gpipe"):
        build_parts(config(), schedules.gpipe(2, 2), 0, [range(5)])
    with pytest.raises(ValueError, match="no head: only the last part has"):
        ModelPart(config(), range(2), first=True, last=False).logits(torch.zeros(1, 1, 8))
    with pytest.raises(ValueError, match="token id 16 is outside"):
        ModelPart(config(), range(2), first=True, last=False)(torch.full((1, 2), 16))


def test_parts_of_a_rank_follow_its_schedule():
    schedule = schedules.zero_bubble_v(2, 3)
    ranges = [range(0, 1), range(1, 2), range(2, 3), range(3, 5)]
    held = [[part.layers for part in build_parts(config(), schedule, rank, ranges)] for rank in range(2)]
    assert held == [[ranges[0], ranges[3]], [ranges[1], ranges[2]]]
    twice = [build_parts(config(), schedules.dualpipe(2, 2), rank) for rank in range(2)]
    assert [[part.first for part in parts] for parts in twice] == [[True, False], [False, True]]


def test_costs_are_parameters():
    for tied in (False, True):
        whole = parameters(config(tied))
        again = whole.embedding if tied else 0  # the last part's own copy
        assert sum(layer_costs(config(tied))) == whole.total + again
        assert len(set(layer_costs(config(tied))[1:-1])) == 1


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_no_way_to_cut_is_better(costs, data):
    parts = data.draw(st.integers(1, len(costs)))
    ranges = balance(costs, parts)
    assert [layer for each in ranges for layer in each] == list(range(len(costs)))
    assert len(ranges) == parts and all(ranges)

    def dearest(ends):
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(ends))

    every = [(0, *cuts, len(costs)) for cuts in itertools.combinations(range(1, len(costs)), parts - 1)]
    assert dearest([0, *(each.stop for each in ranges)]) == min(map(dearest, every))


def test_balance_by_hand_and_bad_input():
    assert balance([1, 1, 1, 1, 1], 2) == [range(0, 2), range(2, 5)]
    assert balance([5, 1, 1, 1], 2) == [range(0, 1), range(1, 4)]
    with pytest.raises(ValueError, match="parts is 0"):
        balance([1.0], 0)
    with pytest.raises(ValueError, match="a layer costs -1"):
        balance([1.0, -1], 1)
