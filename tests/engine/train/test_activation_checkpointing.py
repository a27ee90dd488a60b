"""Recomputation changes what is kept and what is computed, not one bit of the result."""

import functools

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

from minillm.measure import memory
from minillm.model import ModelConfig, Transformer, cross_entropy, dense
from minillm.predict.model import forward_flops, training_flops
from minillm.predict.training.activations import block_activation_bytes
from minillm.train import EXPENSIVE, activation_checkpoint, checkpoint_blocks

CONFIG = ModelConfig(61, 32, 96, 4, 4, 2, max_seq_len=32, tie_embeddings=True)
TOKENS = torch.randint(61, (2, 3, 24), generator=torch.Generator().manual_seed(0))
KEEPS = [frozenset(), EXPENSIVE]


def build(keep=None, every=1, **options):
    return checkpoint_blocks(Transformer(CONFIG, **options), keep, every)


def gradients(model):
    model.zero_grad()
    cross_entropy(model(TOKENS[0]), TOKENS[1]).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def torch_blocks(model, keep):
    """The same by torch's non-reentrant checkpoint, selective by its own policy."""
    options = {}
    if keep:

        def policy(context, operation, *args, **kwargs):
            kept = operation.overloadpacket in keep
            choice = torch_checkpoint.CheckpointPolicy
            return choice.MUST_SAVE if kept else choice.PREFER_RECOMPUTE

        make = torch_checkpoint.create_selective_checkpoint_contexts
        options["context_fn"] = functools.partial(make, policy)
    for block in model.blocks:
        forward = functools.partial(type(block).forward, block)
        block.forward = functools.partial(torch_checkpoint.checkpoint, forward, use_reentrant=False, **options)
    return model


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("every", [1, 2])
def test_gradients_are_the_same_bits(keep, every):
    plain, ours, theirs = gradients(build()), gradients(build(keep, every)), gradients(torch_blocks(build(), keep))
    assert plain.keys() == ours.keys() == theirs.keys()
    for name, gradient in plain.items():
        assert torch.equal(ours[name], gradient) and torch.equal(theirs[name], gradient), name


def count_flops(model):
    with FlopCounterMode(display=False) as counter:
        gradients(model)
    return counter.get_total_flops()


def test_full_recomputation_costs_a_third_of_the_blocks():
    tokens, context = TOKENS[0].numel(), TOKENS.shape[-1]
    plain, full = (count_flops(build(keep, attention=dense)) for keep in (None, frozenset()))
    assert plain == tokens * training_flops(CONFIG, context).total
    assert full == tokens * training_flops(CONFIG, context, recompute=True).total
    head = 3 * tokens * 2 * CONFIG.vocab_size * CONFIG.hidden_size
    assert (full - head) / (plain - head) == pytest.approx(4 / 3, abs=1e-12)


def test_selective_recomputation_costs_no_flop_that_counts():
    assert count_flops(build(EXPENSIVE, attention=dense)) == count_flops(build(attention=dense))
    half = count_flops(build(frozenset(), every=2, attention=dense))
    forward = TOKENS[0].numel() * (
        forward_flops(CONFIG, TOKENS.shape[-1]).total - 2 * CONFIG.vocab_size * CONFIG.hidden_size
    )
    assert half - count_flops(build(attention=dense)) == forward / 2


def activation_peak(model):
    with memory(model) as tracker:
        gradients(model)
    return tracker.peak.activation


def test_full_recomputation_holds_inputs_and_one_block():
    rows, hidden = TOKENS[0].numel(), CONFIG.hidden_size
    block, block_input = block_activation_bytes(CONFIG, *TOKENS[0].shape), rows * hidden * 4
    plain, full, selective = (activation_peak(build(keep)) for keep in (None, *KEEPS))
    with torch_checkpoint.set_checkpoint_early_stop(False):
        theirs = activation_peak(torch_blocks(build(), frozenset()))
    assert plain > 4 * block
    assert full < 4 * block_input + 2 * block  # what is recomputed, and gradients on their way through it
    assert full <= 1.02 * theirs
    assert full < selective < 0.7 * plain


@pytest.mark.parametrize("keep", KEEPS)
def test_random_numbers_are_repeated_and_the_stream_goes_on(keep):
    layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    parameters = tuple(layers.parameters())
    x = torch.randn(4, 8, requires_grad=True)
    found = []
    for function in (layers, functools.partial(activation_checkpoint, layers, parameters=parameters, keep=keep)):
        torch.manual_seed(7)
        y = function(x)
        gradient = torch.autograd.grad(y.square().sum(), (x, *parameters))
        found.append((y, *gradient, torch.rand(3)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_input_that_needs_no_gradient_still_trains_the_block():
    """torch's reentrant form raises here: nothing it sees requires a gradient."""
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch_checkpoint.checkpoint(layer, x, use_reentrant=True).sum().backward()
    activation_checkpoint(layer, x, parameters=tuple(layer.parameters())).sum().backward()
    assert torch.equal(layer.weight.grad, x.sum(0).expand(4, 4))


def test_frozen_parameters_get_nothing_and_hooks_fire_once():
    model = build(frozenset())
    model.blocks[1].mlp.up_proj.weight.requires_grad_(False)
    seen = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    found = gradients(model)
    assert sorted(seen) == sorted(found) and "blocks.1.mlp.up_proj.weight" not in found
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize("keep", KEEPS)
def test_autocast_is_repeated(keep):
    found = []
    for model in (build(), build(keep)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(TOKENS[0]), TOKENS[1])
        loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_without_gradients_it_is_the_function_itself():
    model = build(frozenset())
    with torch.no_grad():
        assert torch.equal(model(TOKENS[0]), build()(TOKENS[0]))
    checkpoint_blocks(model, None)
    assert all("forward" not in vars(block) for block in model.blocks)
    with pytest.raises(ValueError, match="every 0"):
        checkpoint_blocks(model, frozenset(), every=0)
