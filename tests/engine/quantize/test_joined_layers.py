"""Layers that share an input, in one call: the bits of separate calls, whatever happens to the layers."""

import copy

import pytest
import torch
from torch import nn

from minillm.model import ModelConfig, Transformer
from minillm.model.transformer import apply_linears
from minillm.quantize import NF4, Int, Settings, kernels, nbytes, quantize, quantized_layers
from minillm.quantize.joined import JoinedLinears, can_be_joined

CONFIG = ModelConfig(64, 128, 192, 2, 4, num_kv_heads=2, max_seq_len=32, init_std=0.2, qkv_bias=True)
TOKENS = torch.tensor([[1, 5, 9, 60, 3], [2, 2, 63, 8, 1]])
packed = pytest.mark.skipif(not kernels.has_packed_kernels(), reason="this CPU has no packed kernels")


INT8 = Int()


def quantized(format=INT8, seed=0):
    model = Transformer(CONFIG, seed=seed)
    quantize(model, Settings(format))
    return model


def apart(model):
    """A copy whose layers are called one by one."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        block.attention.linears = block.mlp.linears = apply_linears
    return model


def qkv(model):
    attention = model.blocks[0].attention
    return attention.q_proj, attention.k_proj, attention.v_proj


class Adapter(nn.Module):
    """What stands beside a frozen layer has no codes, and no sizes."""

    def __init__(self, base):
        super().__init__()
        self.base, self.up = base, nn.Linear(base.in_features, base.out_features)

    def forward(self, x):
        return self.base(x) + self.up(x)


@packed
@torch.no_grad()
@pytest.mark.parametrize("format", [INT8, Int(bits=4, group=32), Int(bits=4, group=64, symmetric=False)], ids=str)
@pytest.mark.parametrize("tokens", [TOKENS, TOKENS[:1, :1]], ids=["prompts", "one token"])
def test_the_same_bits_as_apart(format, tokens):
    model = quantized(format)
    assert can_be_joined(qkv(model))
    assert torch.equal(model(tokens), apart(model)(tokens))


@packed
@torch.no_grad()
def test_codes_are_kept_once():
    model = quantized()
    before = nbytes(model)
    model(TOKENS)
    assert len({layer.codes.untyped_storage().data_ptr() for layer in qkv(model)}) == 1 and nbytes(model) == before


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda model: None,
        lambda model: model.blocks[0].attention.k_proj.use(kernels.DEQUANTIZE),
        lambda model: [layer.use(kernels.DEQUANTIZE) for layer in quantized_layers(model).values()],
        lambda model: model.load_state_dict(quantized(seed=1).state_dict()),
        lambda model: model.blocks[0].attention.v_proj.load_state_dict(qkv(quantized(seed=1))[2].state_dict()),
        lambda model: model.bfloat16(),
        lambda model: setattr(model.blocks[1].mlp, "up_proj", quantized(seed=1).blocks[0].mlp.up_proj),
        lambda model: setattr(model.blocks[0].attention, "q_proj", Adapter(model.blocks[0].attention.q_proj)),
        lambda model: model.blocks[0].attention.q_proj.bias.add_(1),
    ],
    ids=["copy", "one kernel", "all kernels", "state", "state of one", "cast", "layer", "adapter", "bias"],
)
def test_a_change_of_the_layers_is_noticed(change):
    first = quantized()
    before = first(TOKENS)
    second = copy.deepcopy(first)
    change(second)
    assert torch.equal(second(TOKENS), apart(second)(TOKENS))
    assert torch.equal(first(TOKENS), before)


@torch.no_grad()
def test_what_has_no_packed_kernel_stays_apart():
    model = quantized(NF4())
    assert not can_be_joined(qkv(model)) and isinstance(model.blocks[0].attention.linears, JoinedLinears)
    assert torch.equal(model(TOKENS), apart(model)(TOKENS))
    skipping = Transformer(CONFIG)
    quantize(skipping, Settings(Int(), skip=("k_proj",)))
    assert not can_be_joined(qkv(skipping)) and torch.equal(skipping(TOKENS), apart(skipping)(TOKENS))


def test_gradients_flow_to_the_inputs():
    attention, x = quantized().blocks[0].attention, torch.randn(2, 128, requires_grad=True)
    sum(y.sum() for y in attention.linears(x, *(attention.q_proj, attention.k_proj))).backward()
    expected = attention.q_proj.weight.sum(0) + attention.k_proj.weight.sum(0)
    assert torch.allclose(x.grad, expected.expand(2, -1), atol=1e-4)


@torch.no_grad()
def test_a_model_made_for_inference_loads_other_weights_later():
    model = quantized()
    with torch.inference_mode():
        model(TOKENS)
    other = quantized(seed=1)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(TOKENS), other(TOKENS))


@torch.no_grad()
@pytest.mark.parametrize("shape", [(0, 4), (1, 0)])
def test_no_tokens(shape):
    assert quantized()(torch.zeros(shape, dtype=torch.long)).shape == (*shape, CONFIG.vocab_size)


def test_hooks_of_a_layer_are_called_and_biases_have_gradients():
    model, called = quantized(), []
    model.requires_grad_(False)
    for layer in qkv(model):
        layer.register_forward_hook(lambda *_: called.append(1))
        layer.bias.requires_grad_(True)
    with torch.no_grad():
        model(TOKENS)
    assert len(called) == 3
    for layer in qkv(model):
        layer._forward_hooks.clear()
    model(TOKENS).sum().backward()
    assert len(called) == 3 and all(layer.bias.grad is not None for layer in qkv(model))
