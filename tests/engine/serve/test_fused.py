"""Fused products: the same logits, names, values and memory."""

from dataclasses import replace

import pytest
import torch

from minillm.model import ModelConfig, Transformer
from minillm.model.generate import generate
from minillm.serve import LLM, SamplingParams
from minillm.serve.run.optimise import Fused, fuse

CONFIG = ModelConfig(50, 32, 64, 2, 4, 2, max_seq_len=48, init_std=0.2)
TOKENS = torch.arange(24).view(2, 12)


@pytest.mark.parametrize(
    "variant", [{}, {"qkv_bias": True, "qk_norm": True}, {"tie_embeddings": True, "num_kv_heads": 4}]
)
def test_the_same_logits_names_and_values_in_the_same_memory(variant):
    plain, model = (Transformer(replace(CONFIG, **variant), seed=3).double() for _ in range(2))
    assert fuse(model) == 4 and fuse(model) == 0
    torch.testing.assert_close(model(TOKENS), plain(TOKENS), atol=1e-12, rtol=0)
    mine, theirs = model.state_dict(), plain.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    qkv = model.blocks[0].attention.linears
    assert isinstance(qkv, Fused) and qkv.weight.untyped_storage().nbytes() == sum(
        layer.weight.nbytes for layer in qkv.layers
    )
    assert {layer.weight.untyped_storage().data_ptr() for layer in qkv.layers} == {qkv.weight.data_ptr()}


def test_weights_that_are_loaded_later_are_used():
    model, other = Transformer(CONFIG, seed=3), Transformer(CONFIG, seed=4)
    fuse(model)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(model(TOKENS), other(TOKENS))
    model.double()  # memory of their own again
    torch.testing.assert_close(model(TOKENS), other.double()(TOKENS))


def test_only_plain_layers_are_fused():
    model = Transformer(CONFIG, seed=3)
    model.blocks[0].attention.k_proj = torch.nn.Sequential(model.blocks[0].attention.k_proj)
    model.blocks[1].mlp.linears = lambda x, *layers: tuple(layer(x) for layer in layers)
    expected = model(TOKENS)
    assert fuse(model) == 2
    torch.testing.assert_close(model(TOKENS), expected)


def test_the_engine_says_the_same_words():
    model = Transformer(CONFIG, seed=3)
    prompts = [[1, 2, 3], [4, 5, 6, 7], [10]]
    expected = [list(generate(model, prompt, 12)) for prompt in prompts]
    for fused in (None, True):
        outputs = LLM(model, fused=fused).generate(prompts, SamplingParams(max_tokens=12))
        assert [output.answers[0].ids for output in outputs] == expected
        assert isinstance(model.blocks[0].mlp.linears, Fused) == bool(fused)
