"""The reference against transformers' Llama in float64 and against finite differences."""

import dataclasses

import pytest
import torch

from minillm.equivalence import Batch, reference
from minillm.model import ModelConfig, Transformer, cross_entropy, save_hf

CONFIG = ModelConfig(37, 16, 24, 2, 4, 2, max_seq_len=32, init_std=0.3)
TIED = dataclasses.replace(CONFIG, tie_embeddings=True, qk_norm=True)


@pytest.mark.parametrize("config", [CONFIG, TIED])
def test_equals_transformers_in_float64(config, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    batch = Batch.random(config, 3, 9, seed=1)
    ours = reference(config, batch, seed=4, lr=0.5)
    save_hf(Transformer(config, seed=4), tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa").double()
    for parent in list(theirs.modules()):  # transformers' RMSNorm computes in float32 whatever its input
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(child.weight.shape, eps=config.norm_eps, dtype=torch.float64)
                norm.weight = child.weight
                setattr(parent, name, norm)
    counted = batch.targets != -100
    nll = -theirs(batch.tokens).logits.log_softmax(-1)[counted].gather(-1, batch.targets[counted][:, None])[:, 0]
    loss = (nll * batch.weights[counted]).sum() / batch.weights[counted].sum()
    loss.backward()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.5)
    gradients = {name: p.grad.clone() for name, p in theirs.named_parameters()}
    optimizer.step()
    assert loss.item() == pytest.approx(ours.loss, rel=1e-12)
    norm = torch.nn.utils.get_total_norm(gradients.values()).item()
    assert norm == pytest.approx(ours.grad_norm, rel=1e-10) and norm > 0.1
    # In order of registration the parameters pair up except that ours lists a block's norms before its branches.
    from minillm.model.hf.load import hf_name

    assert {hf_name(name) for name in ours.gradients} == gradients.keys()
    after = dict(theirs.named_parameters())
    for name in ours.gradients:
        torch.testing.assert_close(ours.gradients[name], gradients[hf_name(name)], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(ours.weights[name], after[hf_name(name)].detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("config", [CONFIG, TIED])
def test_gradients_equal_finite_differences(config):
    batch = Batch.random(config, 2, 6, seed=2)
    ours = reference(config, batch, seed=1)
    model = Transformer(config, seed=1, dtype=torch.float64)
    picks = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        flat = parameter.data.view(-1)
        index = int(torch.randint(flat.numel(), (1,), generator=picks))
        at, losses = flat[index].item(), []
        with torch.no_grad():
            for step in (1e-5, -1e-5):
                flat[index] = at + step
                losses.append(cross_entropy(model(batch.tokens), batch.targets, batch.weights).item())
        flat[index] = at
        slope = (losses[0] - losses[1]) / 2e-5
        assert ours.gradients[name].view(-1)[index].item() == pytest.approx(slope, rel=1e-5, abs=1e-8), name


def test_frozen_parameters_keep_their_weights_and_leave_the_norm():
    batch = Batch.random(CONFIG, 2, 6)
    free, frozen = reference(CONFIG, batch), reference(CONFIG, batch, frozen=("embedding.weight", "blocks.0.*"))
    start = dict(Transformer(CONFIG).named_parameters())
    held = {name for name in start if name.startswith(("embedding", "blocks.0"))}
    assert frozen.gradients.keys() == start.keys() - held and frozen.loss == free.loss
    for name, parameter in start.items():
        assert torch.equal(frozen.weights[name], parameter.double() if name in held else free.weights[name])
    squares = sum(free.gradients[name].square().sum().item() for name in frozen.gradients)
    assert frozen.grad_norm == pytest.approx(squares**0.5) and frozen.grad_norm < free.grad_norm


def test_clipping_scales_the_step_and_not_the_reported_gradient():
    batch = Batch.random(CONFIG, 2, 6)
    plain = reference(CONFIG, batch, lr=1.0)
    clipped = reference(CONFIG, batch, lr=1.0, max_grad_norm=plain.grad_norm / 4)
    loose = reference(CONFIG, batch, lr=1.0, max_grad_norm=plain.grad_norm * 4)
    start = dict(Transformer(CONFIG).named_parameters())
    factor = plain.grad_norm / 4 / (plain.grad_norm + 1e-6)  # torch's own clip_grad_norm_ divides so
    for name, gradient in plain.gradients.items():
        assert torch.equal(clipped.gradients[name], gradient) and torch.equal(loose.weights[name], plain.weights[name])
        torch.testing.assert_close(clipped.weights[name], start[name].detach().double() - factor * gradient)


def test_same_call_same_bits_and_nothing_counted_moves_nothing():
    batch = Batch.random(TIED, 2, 6, seed=3)
    first, second = reference(TIED, batch), reference(TIED, batch)
    assert all(torch.equal(first.gradients[name], second.gradients[name]) for name in first.gradients)
    still = reference(TIED, Batch(batch.tokens, torch.full_like(batch.tokens, -100)), max_grad_norm=1.0)
    assert (still.loss, still.grad_norm) == (0, 0)


def test_bad_input_is_named():
    batch = Batch.random(CONFIG, 2, 6)
    with pytest.raises(ValueError, match=r"frozen pattern 'head' matches no parameter"):
        reference(CONFIG, batch, frozen=("head",))
    with pytest.raises(ValueError, match="leaves no parameter to train"):
        reference(CONFIG, batch, frozen=("*",))
    with pytest.raises(ValueError, match=r"weights have shape \[2, 5\], tokens \[2, 6\]"):
        Batch(batch.tokens, batch.targets, torch.ones(2, 5))
