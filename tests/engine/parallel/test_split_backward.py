"""The split backward against torch's whole one, in double precision, and against hooks that have to notice it."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from minillm.parallel.split_backward import (
    Deferred,
    SplitLinear,
    deferred,
    split_linear,
    split_linears,
    weight_gradient,
)
from minillm.train.activation_checkpointing import checkpoint_blocks


def layers(dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 3))
    return model.to(dtype)


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(1))


def test_halves_add_up_to_the_whole_backward():
    whole, split = layers(), split_linears(layers())
    assert list(dict(whole.named_parameters())) == list(dict(split.named_parameters()))
    x, other = draw(2, 5, 6).requires_grad_(), draw(2, 5, 6).requires_grad_()
    whole(x).square().sum().backward()
    store = Deferred()
    with deferred(store):
        split(other).square().sum().backward()
    assert torch.equal(other.grad, x.grad)  # the input gradient is whole after the first half
    assert [name for name, p in split.named_parameters() if p.grad is None] == ["0.weight", "2.weight", "4.weight"]
    assert len(store) == 3
    store.run()
    assert len(store) == 0
    store.run()
    for name, gradient in gradients(split).items():
        torch.testing.assert_close(gradient, gradients(whole)[name], rtol=1e-12, atol=1e-12)


def test_without_deferral_it_is_the_same_linear():
    whole, split = layers(), split_linears(layers())
    for model in (whole, split):
        model(draw(4, 6)).square().sum().backward()
    for name, gradient in gradients(split).items():
        torch.testing.assert_close(gradient, gradients(whole)[name], rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(split(draw(4, 6)), whole(draw(4, 6)))


def test_two_microbatches_and_hooks():
    whole, split, fired = layers(), split_linears(layers()), []
    for name, parameter in split.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    stores = [Deferred(), Deferred()]
    for index, store in enumerate(stores):
        whole(draw(3, 6) + index).square().sum().backward()
        with deferred(store):
            split(draw(3, 6) + index).square().sum().backward()
    fired.clear()
    for store in reversed(stores):
        ends = []
        split[0].weight.register_hook(
            lambda g, ends=ends: torch.autograd.Variable._execution_engine.queue_callback(lambda: ends.append(1))
        )
        store.run()
        assert ends == [1]  # one backward, so that a reduction at its end comes after all gradients
    assert fired == ["4.weight", "2.weight", "0.weight"] * 2
    for name, gradient in gradients(split).items():
        torch.testing.assert_close(gradient, gradients(whole)[name], rtol=1e-12, atol=1e-12)


def test_nothing_is_computed_twice():
    def flops(model, work):
        with FlopCounterMode(display=False) as counter:
            work(model)
        return counter.get_total_flops()

    def halves(model):
        store = Deferred()
        with deferred(store):
            model(draw(4, 6).requires_grad_()).square().sum().backward()
        store.run()

    whole = flops(layers(), lambda model: model(draw(4, 6).requires_grad_()).square().sum().backward())
    assert flops(split_linears(layers()), halves) == whole


def test_a_weight_used_twice_and_a_frozen_one():
    weight = draw(4, 4).requires_grad_()
    expected, fired = weight.detach().clone().requires_grad_(), []
    weight.register_post_accumulate_grad_hook(lambda p: fired.append(1))
    x = draw(2, 4)
    ((x @ expected.T) @ expected.T).sum().backward()
    store = Deferred()
    with deferred(store):
        split_linear(split_linear(x, weight), weight).sum().backward()
    assert weight.grad is None
    fired.clear()
    store.run()
    torch.testing.assert_close(weight.grad, expected.grad, rtol=1e-12, atol=1e-12)
    assert fired == [1]
    frozen = split_linears(layers())
    frozen[2].weight.requires_grad_(False)
    with deferred(store):
        frozen(x.new_ones(2, 6)).sum().backward()
    assert len(store) == 2
    store.run()
    assert frozen[2].weight.grad is None


def test_recomputed_blocks_are_split_too():
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Linear(6, 6).double() for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(x).tanh()
            return x

    whole, split = Blocks(), checkpoint_blocks(split_linears(Blocks()))
    whole(draw(2, 6)).sum().backward()
    store = Deferred()
    with deferred(store):
        split(draw(2, 6)).sum().backward()
    assert len(store) == 3
    store.run()
    for name, gradient in gradients(split).items():
        torch.testing.assert_close(gradient, gradients(whole)[name], rtol=1e-12, atol=1e-12)


def test_autocast_gives_the_dtypes_of_torch():
    whole, split = layers(torch.float32), split_linears(layers(torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for model in (whole, split):
            y = model[0](draw(4, 6, dtype=torch.float32))
            assert y.dtype == torch.bfloat16
            y.float().square().sum().backward()
    for mine, theirs in zip(split[0].parameters(), whole[0].parameters(), strict=True):
        assert mine.grad.dtype == torch.float32
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-2, atol=2e-2)


def test_a_failing_backward_leaves_no_context_behind():
    store, weight = Deferred(), nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match="by hand"), deferred(store):
        raise RuntimeError("by hand")
    assert torch.equal(weight_gradient(weight, lambda: torch.ones(1)), torch.ones(1))
    product = weight * 1  # not a leaf: nobody could add to its .grad
    with deferred(store):
        assert torch.equal(weight_gradient(product, lambda: torch.ones(1)), torch.ones(1))
    linear = nn.Linear(1, 1)
    split = split_linears(linear)
    assert type(split) is SplitLinear and type(linear) is nn.Linear and split.weight is linear.weight


def test_a_layer_in_two_places_stays_one_layer_and_its_class_is_left_alone():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    split_linears(model)
    assert model[0] is model[2] and type(model[0]) is SplitLinear and type(shared) is nn.Linear
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias"]
