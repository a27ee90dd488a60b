"""Logits from int8 codes of the head: what they are of, what they cost, what else sees them."""

import copy
from dataclasses import replace

import pytest
import torch

from minillm.__main__ import run
from minillm.data import Tokenizer, corpus, tokenize
from minillm.model import ModelConfig, Transformer, load_hf
from minillm.model.generate import folder_of, generate
from minillm.quantize import Int, QuantizedLinear, Settings, nbytes, quantize, quantize_head
from minillm.quantize.head import HeadInCodes
from minillm.quantize.quality import compare
from minillm.serve import LLM, SamplingParams

CONFIG = ModelConfig(96, 32, 64, 2, 4, 2, max_seq_len=64, tie_embeddings=True)
TOKENS = torch.arange(12).view(2, 6)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_logits_are_those_of_the_rounded_head(tied, cap):
    model = Transformer(replace(CONFIG, tie_embeddings=tied, logit_soft_cap=cap), seed=3)
    expected = copy.deepcopy(model)
    codes = quantize_head(model)
    weight = expected.embedding.weight if tied else expected.head.weight
    rounded = codes.weight
    error = (rounded - weight).abs().amax(-1) / weight.abs().amax(-1)
    assert 0 < error.max() < 2 / 255  # half a step, and as much because its scale is bfloat16
    expected.head_logits = lambda x, _: torch.nn.functional.linear(x.bfloat16().float(), rounded)
    torch.testing.assert_close(model(TOKENS), expected(TOKENS), rtol=0.02, atol=0.02)
    assert torch.equal(model.embedding.weight, expected.embedding.weight)


def test_the_loss_and_its_gradients_are_those_of_the_weights():
    model, plain = Transformer(CONFIG, seed=3), Transformer(CONFIG, seed=3)
    quantize_head(model)
    losses = [each(TOKENS, targets=TOKENS)[0] for each in (model, plain)]
    assert losses[0] == losses[1]
    for loss in losses:
        loss.backward()
    assert torch.equal(model.embedding.weight.grad, plain.embedding.weight.grad)


def test_its_bytes_are_counted_and_it_moves_with_the_model():
    model = Transformer(CONFIG, seed=3)
    before = nbytes(model)
    codes = quantize_head(model)
    assert nbytes(model) - before == codes.nbytes == 96 * 32 + 96 * codes.scale.element_size()
    there = copy.deepcopy(model).to("meta")
    assert isinstance(there.head_logits.codes, QuantizedLinear) and there.head_logits.codes.codes.is_meta


@pytest.mark.full
def test_of_the_committed_target_it_changes_a_byte_by_less_than_a_thousandth():
    original = load_hf(folder_of("target"), dtype=torch.float32)
    model = copy.deepcopy(original)
    quantize(model, Settings(Int()))
    quantize_head(model)
    held_out = tokenize(corpus(), Tokenizer.load(folder_of("target")), "validation")
    before, after = compare(original, model, held_out, "int8", windows=16)
    assert abs(after.bits_per_byte / before.bits_per_byte - 1) < 1e-3


def test_the_engine_and_the_command_have_the_tokens_of_the_plain_loop(capsys, monkeypatch):
    folder = folder_of("target")
    model = load_hf(folder, dtype=torch.float32)
    quantize_head(model)
    llm = LLM.load(folder, device="cpu", int8_head=True)
    assert isinstance(llm.model.head_logits, HeadInCodes)
    prompt = llm.tokenizer.encode("class A")
    expected = list(generate(model, prompt, 12))
    [output] = llm.generate([prompt], SamplingParams(max_tokens=12))
    assert [token.id for token in output.answers[0].tokens] == expected
    made, forward = [], HeadInCodes.forward
    monkeypatch.setattr(HeadInCodes, "forward", lambda self, *given: made.append(1) or forward(self, *given))
    options = ["--max-new-tokens", "12", "--temperature", "0", "--int8-head"]
    assert run(["generate", "class A", *options]) == 0
    assert capsys.readouterr().out == f"class A{llm.tokenizer.decode(expected)}\n"
    assert len(made) == 12  # a pass for each token


def test_refusals(capsys):
    model = Transformer(CONFIG)
    quantize_head(model)
    with pytest.raises(ValueError, match="the head of this model is in int8 already: load the model that it was"):
        quantize_head(model)
    assert run(["generate", "def ", "--int8-head", "--tp", "2"]) == 2
    assert "--int8-head on 2 ranks: a head that is cut over ranks" in capsys.readouterr().err
