"""Initialisation by name, meta construction, positions, replaceable attention, bad input, loss."""

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import mark, raises

from minillm.model import (
    Block,
    ModelConfig,
    RopeScaling,
    Transformer,
    cross_entropy,
    cross_entropy_sums,
    dense,
    initial,
    sdpa,
)
from minillm.model.rope import rope_frequencies

CONFIG = ModelConfig(61, 32, 48, 3, 4, 2, max_seq_len=16, qk_norm=True, qkv_bias=True)
TOKENS = torch.arange(24).reshape(2, 12)


def test_initial_values_depend_on_seed_and_name_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    model, other_seed = Transformer(CONFIG, seed=7), Transformer(CONFIG, seed=8)
    assert torch.equal(torch.get_rng_state(), before), "building a model must not draw from the global generator"
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, initial(CONFIG, name, tuple(parameter.shape), 7))
        if name.endswith("proj.weight"):
            assert not torch.equal(parameter, other_seed.get_parameter(name))
    q, o = model.blocks[0].attention.q_proj.weight, model.blocks[0].attention.o_proj.weight
    assert not torch.equal(q, model.blocks[1].attention.q_proj.weight)
    assert abs(q.std() / CONFIG.init_std - 1) < 0.1 and abs(o.std() / CONFIG.init_std - 6**-0.5) < 0.1
    double = Transformer(CONFIG, seed=7, dtype=torch.float64)
    assert all(torch.equal(p.double(), double.get_parameter(name)) for name, p in model.named_parameters())


def test_meta_model_becomes_the_real_one():
    with torch.device("meta"):
        model = Transformer(CONFIG)
    assert all(parameter.is_meta for parameter in model.parameters())
    logits = model(TOKENS.to("meta"))
    assert logits.is_meta and logits.shape == (2, 12, 61)
    model = model.to_empty(device="cpu").initialize(3)
    assert torch.equal(model(TOKENS), Transformer(CONFIG, seed=3)(TOKENS))


def test_rope_frequencies_survive_a_cast():
    model = Transformer(CONFIG).to(torch.bfloat16)
    assert (
        torch.equal(model.rope.frequencies, rope_frequencies(CONFIG)) and "rope.frequencies" not in model.state_dict()
    )
    assert model(TOKENS).dtype == torch.bfloat16


def test_a_stage_of_blocks_computes_what_the_model_does():
    """Cut between any two blocks: the pieces, initialised by global names, compose to the whole."""
    whole = Transformer(CONFIG, seed=5)
    x, rotation = whole.embedding(TOKENS), whole.rope(torch.arange(12), torch.float32)
    for layer in range(CONFIG.num_layers):
        block = Block(CONFIG, layer)
        with torch.no_grad():
            for name, p in block.named_parameters():
                p.copy_(initial(CONFIG, f"blocks.{layer}.{name}", tuple(p.shape), 5))
        x = block(x, rotation)
    assert torch.equal(whole.logits(x), whole(TOKENS))


def test_a_tensor_parallel_slice_runs_the_same_code():
    """Half of the heads and half of the MLP on each of two ranks; their partial outputs add up to the block's."""
    config = ModelConfig(61, 32, 48, 1, 4, 2)
    whole = Transformer(config, dtype=torch.float64).blocks[0]
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    rotation = Transformer(config).rope(torch.arange(5), torch.float64)
    attention, mlp = 0, 0
    for rank in range(2):
        part = Block(config, 0, torch.float64)
        part.load_state_dict(whole.state_dict())
        for linear in (*part.attention.children(), *part.mlp.children()):
            if isinstance(linear, torch.nn.Linear):
                dim = 1 if linear in (part.attention.o_proj, part.mlp.down_proj) else 0
                linear.weight = torch.nn.Parameter(linear.weight.chunk(2, dim)[rank])
        attention += part.attention(x, rotation, sdpa, None)
        mlp += part.mlp(x)
    torch.testing.assert_close(attention, whole.attention(x, rotation, sdpa, None))
    torch.testing.assert_close(mlp, whole.mlp(x))


class Cache:
    """A contiguous key-value cache, to show that the attention function is all that decoding has to replace."""

    def __init__(self):
        self.layers = {}

    def __call__(self, q, k, v, *, layer, positions, window):
        if layer in self.layers:
            k, v = (torch.cat((old, new), dim=2) for old, new in zip(self.layers[layer], (k, v), strict=True))
        self.layers[layer] = k, v
        return sdpa(q, k, v, positions=positions, key_positions=torch.arange(k.shape[2]), window=window)


@mark.parametrize("window", [None, 4])
def test_decoding_with_a_cache_equals_the_full_forward_pass(window):
    config = ModelConfig(61, 32, 48, 2, 4, 2, sliding_window=window)
    model, cache = Transformer(config, dtype=torch.float64), Cache()
    pieces = [model(TOKENS[:, a:b], torch.arange(a, b), attention=cache) for a, b in ((0, 5), (5, 6), (6, 9), (9, 12))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(TOKENS), rtol=1e-10, atol=1e-10)


def test_explicit_positions_and_dense_attention_change_nothing():
    model = Transformer(CONFIG, dtype=torch.float64)
    for other in (
        model(TOKENS, torch.arange(12)),
        model(TOKENS, torch.arange(12).expand(2, 12)),
        model(TOKENS, attention=dense),
    ):
        torch.testing.assert_close(other, model(TOKENS), rtol=1e-10, atol=1e-10)


@settings(max_examples=20)
@given(shift=st.integers(0, 1000), theta=st.sampled_from([1e4, 1e6]), factor=st.sampled_from([None, 2.0]))
def test_rope_sees_distances_only(shift, theta, factor):
    scaling = factor and RopeScaling("linear", factor)
    config = ModelConfig(61, 32, 48, 1, 4, 2, rope_theta=theta, rope_scaling=scaling)
    model = Transformer(config, dtype=torch.float64)
    torch.testing.assert_close(model(TOKENS, torch.arange(12) + shift), model(TOKENS), rtol=1e-4, atol=1e-5)


@mark.parametrize(
    "tokens, positions, message",
    [
        (torch.zeros(5, dtype=torch.long), None, r"shape \[5\]: the model takes \[batch, seq\]"),
        (torch.zeros(1, 17, dtype=torch.long), None, "17 tokens is longer than the context of 16"),
        (torch.tensor([[0, 61]]), None, r"token id 61 is outside 0 .. 60 \(vocab_size 61\)"),
        (torch.tensor([[-1, 3]]), None, "token id -1 is outside"),
        (torch.tensor([[0, 1]]), torch.tensor([15, 16]), r"position 16 is outside 0 .. 15 \(max_seq_len 16\)"),
        (torch.tensor([[0, 1]]), torch.tensor([0, 1, 2]), "they must match"),
    ],
)
def test_bad_tokens_are_named(tokens, positions, message):
    with raises(ValueError, match=message):
        Transformer(CONFIG)(tokens, positions)


@settings(max_examples=25)
@given(seed=st.integers(0, 999), cut=st.integers(0, 6))
def test_loss_of_parts_adds_up_to_the_loss_of_the_whole(seed, cut):
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 6, 9, generator=draw, dtype=torch.float64)
    targets = torch.randint(9, (2, 6), generator=draw)
    targets[torch.rand(2, 6, generator=draw) < 0.3] = -100
    weights = torch.rand(2, 6, generator=draw, dtype=torch.float64)
    counted = targets != -100
    nll = -logits.log_softmax(-1)[counted].gather(-1, targets[counted][:, None])[:, 0]
    parts = [cross_entropy_sums(logits[:, s], targets[:, s], weights[:, s]) for s in (slice(cut), slice(cut, None))]
    total, weight = (sum(column) for column in zip(*parts, strict=True))
    torch.testing.assert_close(total, (nll * weights[counted]).sum())
    torch.testing.assert_close(weight, weights[counted].sum())
    torch.testing.assert_close(cross_entropy(logits, targets, weights) * weight, total)


def test_loss_corners():
    logits, targets = torch.randn(2, 6, 9), torch.randint(9, (2, 6))
    torch.testing.assert_close(cross_entropy(logits, targets), F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    assert cross_entropy(logits.bfloat16(), targets).dtype == torch.float32
    logits.requires_grad_()
    nothing = cross_entropy(logits, torch.full((2, 6), -100))
    nothing.backward()
    assert nothing == 0 and torch.equal(logits.grad, torch.zeros_like(logits))
    with raises(ValueError, match=r"weights \[2, 5\] do not match"):
        cross_entropy(logits, targets, torch.ones(2, 5))
