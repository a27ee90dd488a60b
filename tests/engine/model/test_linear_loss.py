"""The loss that never holds the logits against the loss that does."""

import pytest
import torch

from minillm.measure import memory
from minillm.model import ModelConfig, Transformer, cross_entropy_sums, linear_cross_entropy_sums
from minillm.model.loss import IGNORE


def case(dtype=torch.float64, rows=(3, 7), hidden=8, vocab=29):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(*rows, hidden, generator=draw, dtype=dtype, requires_grad=True)
    head = torch.randn(vocab, hidden, generator=draw, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocab, rows, generator=draw)
    targets[torch.rand(rows, generator=draw) < 0.3] = IGNORE
    return x, head, targets


@pytest.mark.parametrize("chunk", [1, 5, 21, 512])
def test_values_and_gradients(chunk):
    x, head, targets = case()
    expected, weight = cross_entropy_sums(x @ head.T, targets)
    found, count = linear_cross_entropy_sums(x, head, targets, chunk)
    assert torch.allclose(found, expected, atol=1e-12) and count == weight
    for mine, other in zip(
        torch.autograd.grad(found * 0.3, (x, head)), torch.autograd.grad(expected * 0.3, (x, head)), strict=True
    ):
        assert torch.allclose(mine, other, atol=1e-12)
    with torch.no_grad():
        assert linear_cross_entropy_sums(x, head, targets, chunk)[0] == found


@pytest.mark.parametrize("chunk", [5, 512])
def test_weights(chunk):
    x, head, targets = case()
    weights = torch.rand(targets.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    both = cross_entropy_sums(x @ head.T, targets, weights), linear_cross_entropy_sums(x, head, targets, chunk, weights)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*both, strict=True))
    gradients = (torch.autograd.grad(total, (x, head)) for total, _ in both)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*gradients, strict=True))
    model = Transformer(ModelConfig(29, 16, 32, 1, 2), dtype=torch.float64)
    tokens = targets.clamp(min=0)
    found = model(tokens, targets=targets, weights=weights)
    expected = cross_entropy_sums(model(tokens), targets, weights)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(found, expected, strict=True))
    with pytest.raises(ValueError, match=r"weights \[3, 6\] and positions \[3, 7\] do not match"):
        linear_cross_entropy_sums(x, head, targets, weights=weights[:, 1:])


@pytest.mark.parametrize("frozen", [0, 1])
def test_one_of_them_frozen(frozen):
    x, head, targets = case()
    (x, head)[frozen].requires_grad_(False)
    wanted = (x, head)[1 - frozen]
    found = torch.autograd.grad(linear_cross_entropy_sums(x, head, targets)[0], wanted)[0]
    expected = torch.autograd.grad(cross_entropy_sums(x @ head.T, targets)[0], wanted)[0]
    assert torch.allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("tied", [True, False])
def test_in_the_model(tied):
    model = Transformer(ModelConfig(29, 16, 32, 1, 2, tie_embeddings=tied), dtype=torch.float64)
    *_, targets = case()
    tokens = targets.clamp(min=0)
    ours = torch.autograd.grad(model(tokens, targets=targets)[0], list(model.parameters()))
    theirs = torch.autograd.grad(cross_entropy_sums(model(tokens), targets)[0], list(model.parameters()))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(ours, theirs, strict=True))


def test_lower_precision_sums_in_float32():
    for dtype, autocast in ((torch.bfloat16, False), (torch.float32, True)):
        x, head, targets = case(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found, _ = linear_cross_entropy_sums(x, head, targets)
            expected, _ = cross_entropy_sums(x @ head.T, targets)
        assert found.dtype == torch.float32
        assert torch.allclose(found, expected, rtol=1e-5)
        for mine, other in zip(
            torch.autograd.grad(found, (x, head)), torch.autograd.grad(expected, (x, head)), strict=True
        ):
            assert mine.dtype == dtype and (mine - other).norm() < 0.02 * other.norm()


def test_logits_are_never_whole():
    x, head, targets = case(torch.float32, rows=(4, 256), hidden=8, vocab=500)
    peaks = []
    for loss in (
        lambda: cross_entropy_sums(x @ head.T, targets)[0],
        lambda: linear_cross_entropy_sums(x, head, targets, 64)[0],
    ):
        with memory() as tracker:
            loss().backward()
        peaks.append(tracker.peak.total)
    logits = 4 * targets.numel() * 500
    assert peaks[0] > 2 * logits and peaks[1] < logits / 3


def test_shapes_are_checked():
    x, head, targets = case()
    with pytest.raises(ValueError, match="do not match"):
        linear_cross_entropy_sums(x, head, targets[:, 1:])
