"""Placements: what is cut and joined comes back, and the norm of the parts is that of the whole."""

import math

import placement_programs as programs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from minillm.comm import launch
from minillm.parallel.sharding.placement import (
    FlatShard,
    Partial,
    Placement,
    Replicate,
    Shard,
    clip_,
    global_norm,
    join,
)

sizes = st.integers(0, 7)
shapes = st.lists(sizes, min_size=0, max_size=3)


def one_axis(draw, shape, ranks):
    """For every rank of an axis of so many: its part of a tensor of this shape."""
    kind = draw(st.sampled_from(["replicate", "shard", "flat", "partial"] if shape else ["replicate", "flat"]))
    if kind == "replicate":
        return [Replicate(rank) for rank in range(ranks)]
    if kind == "flat":
        total = math.prod(shape)
        cuts = sorted(draw(st.lists(st.integers(0, total), min_size=ranks - 1, max_size=ranks - 1)))
        return [FlatShard(start, stop) for start, stop in zip([0, *cuts], [*cuts, total], strict=True)]
    dim = draw(st.integers(0, len(shape) - 1))
    parts = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    copies = ranks // parts
    shards = [Shard(dim, rank // copies, parts, rank % copies) for rank in range(ranks)]
    return [Partial(shard) for shard in shards] if kind == "partial" else shards


@st.composite
def spreads(draw, of=shapes):
    """(shape, the placement of every rank): one or two axes, the inner one within each part of the outer."""
    shape = torch.Size(draw(of))
    outer = one_axis(draw, shape, draw(st.integers(1, 4)))
    found = []
    inner_ranks = draw(st.integers(0, 3))
    inner: dict = {}  # copies of a part are cut alike
    for part in outer:
        place = Placement(shape, (part,))
        if inner_ranks:
            key = getattr(getattr(part, "of", part), "index", part if isinstance(part, FlatShard) else 0)
            if key not in inner:
                inner[key] = one_axis(draw, place.part_shape, inner_ranks)
            found += [place.within(each) for each in inner[key]]
        else:
            found.append(place)
    return shape, found


@settings(max_examples=150)
@given(spreads(), st.sampled_from([1.0, 2.0, 3.0, math.inf]))
def test_what_is_cut_joins_again_and_is_counted_once(spread, norm_type):
    shape, places = spread
    whole = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).reshape(shape)
    pieces = [(place, place.cut(whole)) for place in places]
    assert all(piece.shape == place.part_shape and piece.is_contiguous() for place, piece in pieces)
    assert torch.equal(join(pieces), whole)
    counted = [(place, piece) for place, piece in pieces if place.is_counted]
    assert torch.equal(join(counted), whole), "what is counted is all there is"
    assert sum(piece.count_nonzero().item() for _, piece in counted) == whole.numel(), "and nothing twice"
    named = {str(index): piece for index, (_, piece) in enumerate(pieces)}
    found = global_norm(named, {str(index): place for index, place in enumerate(places)}, norm_type=norm_type)
    expected = torch.linalg.vector_norm(whole, norm_type) if whole.numel() else torch.zeros(())
    assert found.item() == pytest.approx(expected.item())


@pytest.mark.parametrize(("world_size", "tp"), [(1, 1), (2, 2), (2, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("flat", [False, True])
def test_ranks_join_and_measure_what_they_hold(world_size, tp, flat):
    whole = programs.wholes()
    flattened = torch.cat([tensor.flatten() for tensor in whole.values()])
    ranks = launch(programs.spread, world_size, tp, flat)
    for found in ranks:
        for name, tensor in whole.items():
            assert torch.equal(found["whole"][name], tensor)
            torch.testing.assert_close(found["summed"][name], tensor)
        expected = [torch.linalg.vector_norm(flattened, p).item() for p in programs.NORMS]
        assert found["norms"] == pytest.approx(expected) and found["norms"] == ranks[0]["norms"]
        assert found["calls"] == {"all_reduce": len(programs.NORMS)}, "one for each norm"
        assert found["sum calls"] == ({"all_reduce": 1} if tp > 1 else {}), "one for all partial gradients"
        assert set(found["some"]) >= set(list(whole)[:2])
        assert found["replicas"] == (0, True), "what all ranks have whole does not travel, and drift shows"
    if not flat:
        assert sorted(name for found in ranks for name in found["counted"] if name != "rows").count("replicated") == 1


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 2.5, math.inf])
def test_norm_and_clipping_are_torch_s(norm_type):
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double()
    model(torch.ones(4, 5, dtype=torch.float64)).square().sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
    norm = global_norm(gradients, norm_type=norm_type)
    clip_(gradients.values(), norm, 0.1)
    assert norm.item() == pytest.approx(expected.item())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


def test_16_bit_gradients_are_measured_and_clipped_in_32():
    gradients = {"a": torch.full((70_000,), 3.0, dtype=torch.float16)}
    norm = global_norm(gradients)
    assert norm.item() == pytest.approx(3 * math.sqrt(70_000), rel=1e-3)
    clip_(gradients.values(), norm, 1.0)
    assert gradients["a"].dtype == torch.float16 and gradients["a"][0].item() == pytest.approx(1 / 264.6, rel=1e-3)


def test_no_gradient_has_norm_zero_and_nonsense_is_refused():
    assert global_norm({}).item() == global_norm({"empty": torch.ones(0)}, norm_type=math.inf).item() == 0
    with pytest.raises(ValueError, match="norm_type=0 must be above 0"):
        global_norm({}, norm_type=0)
    with pytest.raises(ValueError, match="part 2 of 2 does not exist"):
        Shard(0, 2, 2)
    with pytest.raises(ValueError, match=r"shape \[3\] is not the whole one of \[4\]"):
        Placement(torch.Size([4]), (Shard(0, 0, 2),)).cut(torch.ones(3))
