import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.model import ModelConfig, RopeScaling

SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4)


def test_defaults_are_filled_in_and_the_config_is_a_frozen_value():
    config = ModelConfig(**SMALL)
    assert (config.num_kv_heads, config.head_dim) == (4, 8)
    assert config == ModelConfig(**SMALL) and hash(config) == hash(ModelConfig(**SMALL))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_heads = 2
    assert ModelConfig(**SMALL | dict(hidden_size=30, head_dim=16)).head_dim == 16  # set apart from hidden / heads


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(num_heads=5), "hidden_size 32 is not divisible by num_heads 5"),
        (dict(num_kv_heads=3), "num_heads 4 is not divisible by num_kv_heads 3"),
        (dict(head_dim=7), "head_dim 7 is odd"),
        (dict(vocab_size=0), "vocab_size 0 must be a whole number of at least 1"),
        (dict(num_layers=2.0), "num_layers 2.0 must be a whole number"),
        (dict(num_layers=True), "num_layers True must be a whole number"),
        (dict(max_seq_len=None), "max_seq_len None must be a whole number"),
        (dict(sliding_window=0), "sliding_window 0 must be a whole number of at least 1, or None"),
        (dict(rope_theta=0.0), "rope_theta 0.0 must be above 0"),
        (dict(norm_eps=-1.0), "norm_eps -1.0 must be above 0"),
        (dict(init_std=float("nan")), "init_std nan must be above 0"),
        (dict(rotary_dim=3), "rotary_dim 3 must be even and at most head_dim 8"),
        (dict(rotary_dim=10), "rotary_dim 10 must be even and at most head_dim 8"),
        (dict(attention_soft_cap=0.0), "attention_soft_cap 0.0 must be above 0, or None"),
        (dict(activation="relu"), "activation 'relu' is not supported: use one of silu, gelu_tanh"),
        (dict(norm_placement="after"), "norm_placement 'after' is not supported"),
        (dict(full_attention_layers=(-1,)), "must be numbers of layers"),
        (dict(rope_scaling=RopeScaling("longrope", 2.0, short_factors=(1.0,) * 4)), "4 short and 0 long factors"),
        (dict(rope_scaling=RopeScaling("yarn", 2.0), sliding_rope_theta=1e4), "'yarn' together with sliding_rope_th"),
        (dict(rope_scaling=RopeScaling("dynamic", 2.0), rotary_dim=2), "needs at least 4 rotated dimensions"),
    ],
)
def test_a_bad_value_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**SMALL | change)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(kind="ntk", factor=2.0), "'ntk' is not supported"),
        (dict(kind="yarn", factor=2.0, beta_fast=0.5), "beta_slow 1.0 must be above 0 and below beta_fast 0.5"),
        (dict(kind="yarn", factor=2.0, attention_factor=0.0), "must be above 0"),
        (dict(kind="linear", factor=0.5), "factor 0.5"),
        (dict(kind="llama3", factor=8.0, low_freq_factor=4.0), "low_freq_factor 4.0"),
        (dict(kind="llama3", factor=8.0, original_max_seq_len=0), "original_max_seq_len 0"),
    ],
)
def test_a_bad_rope_scaling_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling(**arguments)


@given(heads=st.integers(1, 12), kv_heads=st.integers(1, 12), hidden=st.integers(1, 96))
def test_what_is_accepted_divides(heads, kv_heads, hidden):
    try:
        config = ModelConfig(64, hidden, 48, 2, heads, kv_heads)
    except ValueError:
        assert hidden % heads or heads % kv_heads or (hidden // heads) % 2
    else:
        assert config.head_dim * heads == hidden and heads % kv_heads == 0
