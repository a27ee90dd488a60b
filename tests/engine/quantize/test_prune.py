"""Pruning and low rank against choices written out, and against what the singular values say."""

from itertools import combinations

import pytest
import torch

from minillm.predict.serving.quantization import low_rank_error
from minillm.quantize.prune import low_rank, magnitude_mask, two_of_four_mask


def some(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("norms", [None, some(12, seed=1).abs()])
def test_the_smallest_of_each_output_go(norms):
    weight = some(5, 12)
    mask = magnitude_mask(weight, 0.4, norms)
    for row, kept in zip(weight, mask, strict=True):
        effect = [abs(float(w)) * (1 if norms is None else float(norms[i])) for i, w in enumerate(row)]
        least = sorted(range(12), key=lambda i: effect[i])[:4]
        assert [i for i in range(12) if not kept[i]] == sorted(least)
    assert magnitude_mask(weight, 0).all() and magnitude_mask(torch.zeros(3, 8), 0.5).sum() == 12


@pytest.mark.parametrize("norms", [None, some(16, seed=1).abs()])
def test_two_of_four_is_the_best_pair_of_every_four(norms):
    weight = some(6, 16)
    mask, effect = two_of_four_mask(weight, norms), weight.abs() * (1 if norms is None else norms)
    for row in range(6):
        for start in range(0, 16, 4):
            kept = [i for i in range(4) if mask[row, start + i]]
            best = max(combinations(range(4), 2), key=lambda pair: sum(effect[row, start + i] for i in pair))
            assert kept == list(best)
    assert (two_of_four_mask(torch.ones(2, 8)).view(2, 2, 4).sum(-1) == 2).all()


def test_low_rank_is_off_by_the_singular_values_that_are_left_out():
    weight = some(20, 30).double()
    values = torch.linalg.svdvals(weight).tolist()
    for rank in (1, 7, 20):
        left, right = low_rank(weight, rank)
        assert left.shape == (20, rank) and right.shape == (rank, 30)
        assert float((weight - left @ right).norm()) == pytest.approx(low_rank_error(values, rank), abs=1e-9)


def test_low_rank_for_inputs_is_the_best_there_is_for_them():
    """Eckart and Young on W X itself: no matrix of this rank can have a smaller error on these inputs."""
    weight, inputs = some(20, 30).double(), some(400, 30, seed=2).double() * torch.logspace(-2, 1, 30).double()
    gram, values = inputs.T @ inputs, torch.linalg.svdvals(weight @ inputs.T).tolist()
    for rank in (2, 9):
        left, right = low_rank(weight, rank, gram)
        error = float(((weight - left @ right) @ inputs.T).norm())
        plain = low_rank(weight, rank)
        assert error == pytest.approx(low_rank_error(values, rank), rel=1e-3)
        assert error < 0.9 * float(((weight - plain[0] @ plain[1]) @ inputs.T).norm())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: magnitude_mask(some(2, 8), 1.0), "sparsity 1.0 must lie in 0 .. 1"),
        (lambda: two_of_four_mask(some(2, 6)), "6 inputs are not a multiple of 4"),
        (lambda: low_rank(some(4, 6), 5), "rank 5 must lie in 1 .. 4"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
