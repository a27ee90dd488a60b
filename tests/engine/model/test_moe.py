"""A mixture of experts against a loop over tokens in fp64: values, and the gradient of every parameter."""

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.model import ModelConfig, MoEConfig, Transformer
from minillm.model.generate import generate
from minillm.model.moe import MoE, RouterLosses, sort_by_expert, update_balance_biases
from minillm.model.transformer import mixture
from minillm.serve import LLM
from minillm.serve.tiny import TinyLLM
from minillm.train.activation_checkpointing import MODES, checkpoint_blocks

TOKENS = torch.randint(67, (3, 12), generator=torch.Generator().manual_seed(0))


def config_of(**options) -> ModelConfig:
    return ModelConfig(67, 16, 24, 2, 2, moe=MoEConfig(**dict(num_experts=4, top_k=2, intermediate_size=6) | options))


def layer_of(config: ModelConfig) -> MoE:
    layer = mixture(config, 0, torch.float64)
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 0, 0.5, generator=generator)
    if layer.router.balance_bias is not None:
        layer.router.balance_bias.copy_(torch.tensor([0.3, -0.2, 0.0, 0.1]))
    return layer


def one_by_one(layer: MoE, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, losses [batch]): every token and every expert alone, as the papers write it."""
    config, answers, losses = layer.config, [], []
    n, k = config.num_experts, config.top_k

    def expert(e, token):
        gate, up = layer.experts.gate_up_proj[e] @ token
        return layer.experts.down_proj[e] @ (F.silu(gate) * up)

    for sequence in x:
        logits = [layer.router.weight @ token for token in sequence]
        every = [each.softmax(0) if config.scores == "softmax" else each.sigmoid() for each in logits]
        chosen, all_chosen, room = (
            [],
            Counter(),
            Counter({e: config.capacity(len(sequence)) or math.inf for e in range(n)}),
        )
        for scores in every:
            bias = 0 if layer.router.balance_bias is None else layer.router.balance_bias
            best = sorted(range(n), key=lambda e, ranked=scores + bias: -ranked[e])[:k]
            all_chosen.update(best)
            total = sum(scores[e] for e in best) if config.normalize else 1
            weights = {e: config.weight_scale * scores[e] / total for e in best}
            chosen.append({e: weight for e, weight in weights.items() if room[e] > 0})
            room.subtract(best)
        if config.choice == "expert":
            chosen = [{} for _ in sequence]
            for e in range(n):
                for t in sorted(range(len(sequence)), key=lambda t: -every[t][e])[: config.capacity(len(sequence))]:
                    chosen[t][e] = every[t][e]
        for token, weights in zip(sequence, chosen, strict=True):
            y = sum((weight * expert(e, token) for e, weight in weights.items()), torch.zeros_like(token))
            answers.append(y if layer.shared is None else y + layer.shared(token))
        mean = sum(scores / scores.sum() for scores in every) / len(sequence)
        even = n * sum(all_chosen[e] / (k * len(sequence)) * mean[e] for e in range(n))
        large = sum(each.logsumexp(0) ** 2 for each in logits) / len(sequence)
        losses.append(config.balance_loss * even + config.z_loss * large)
    return torch.stack(answers).view_as(x), torch.stack(losses)


LOSSES = dict(balance_loss=0.7, z_loss=0.3)
CASES = {
    "softmax": LOSSES,
    "softmax, not normalised, scaled, shared experts": LOSSES
    | dict(normalize=False, weight_scale=2.5, shared_experts=2),
    "sigmoid, biased": LOSSES | dict(scores="sigmoid", bias_update_rate=0.1),
    "sigmoid, not normalised": LOSSES | dict(scores="sigmoid", normalize=False),
    "drops": LOSSES | dict(capacity_factor=0.8),
    "nearly all dropped": LOSSES | dict(capacity_factor=0.01),
    "one expert each": LOSSES | dict(top_k=1, capacity_factor=1.0),
    "all experts": LOSSES | dict(top_k=4),
    "experts choose": dict(choice="expert", z_loss=0.3),
    "experts choose more": dict(choice="expert", capacity_factor=1.5),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_a_loop_over_tokens(case):
    layer = layer_of(config_of(**CASES[case]))
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 12, 16, dtype=torch.float64, generator=generator, requires_grad=True)
    direction, weights = torch.randn(3, 12, 16, dtype=torch.float64, generator=generator), torch.tensor([5.0, 0.0, 9.0])
    parameters = [x, *layer.parameters()]

    expected, expected_losses = one_by_one(layer, x)
    total = ((expected * direction).sum() + (expected_losses * weights).sum()) / 3
    wanted = torch.autograd.grad(total, parameters)

    losses = RouterLosses(weights)
    y = layer(x, losses)
    total = losses.begin_at((y * direction).sum()) / 3
    found = torch.autograd.grad(total, parameters)
    assert torch.allclose(y, expected, rtol=1e-12, atol=1e-12)
    assert torch.allclose(losses.losses[0], expected_losses, rtol=1e-12)
    assert total.item() == pytest.approx((expected * direction).sum().item() / 3)  # the losses change no value
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-12)


@settings(max_examples=60)
@given(data=st.data(), num_experts=st.integers(1, 6), tokens=st.integers(0, 9), choices=st.integers(1, 3))
def test_the_permutation_is_inverted(data, num_experts, tokens, choices):
    each = st.integers(-1, num_experts - 1)
    experts = torch.tensor(data.draw(st.lists(each, min_size=tokens * choices, max_size=tokens * choices)))
    experts = experts.long().view(tokens, choices)
    routes = sort_by_expert(experts, num_experts)
    kept = [expert for expert in experts.flatten().tolist() if expert >= 0]
    assert routes.counts.tolist() == [kept.count(expert) for expert in range(num_experts)]
    assert experts.flatten()[routes.order].tolist() == sorted(kept)
    assert routes.place.flatten()[routes.order].tolist() == list(range(len(kept)))
    assert (routes.place >= 0).equal(experts >= 0) and routes.all == (len(kept) == tokens * choices)
    x = torch.randn(tokens, 4, dtype=torch.float64)
    back = routes.from_experts(routes.to_experts(x), torch.ones(tokens, choices, dtype=torch.float64))
    assert torch.allclose(back, x * (experts >= 0).sum(1, keepdim=True))


def test_gradients_do_not_depend_on_how_the_batch_is_split_or_recomputed():
    """With losses, drops and unequal weights; and a layer that is computed again is not counted again."""
    config = config_of(**LOSSES, capacity_factor=1.0, dense_layers=(0,))
    weights = torch.rand(TOKENS.shape, dtype=torch.float64)
    found = {}
    for how in ("whole", "by sequence", "full", "selective"):
        model = Transformer(config, dtype=torch.float64)
        if how in MODES:
            checkpoint_blocks(model, MODES[how])
        size = 1 if how == "by sequence" else len(TOKENS)
        for part, own in zip(TOKENS.split(size), weights.split(size), strict=True):
            (model(part, targets=part, weights=own)[0] / weights.sum()).backward()
        found[how] = [parameter.grad for parameter in model.parameters()]
        assert int(model.blocks[1].mlp.load.sum()) <= TOKENS.numel() * 2
        assert 0.9 < float(model.router_losses.mean) < 2
    for other in ("by sequence", "full", "selective"):
        for mine, theirs in zip(found["whole"], found[other], strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-11, atol=1e-15)


def test_biases_move_against_the_load():
    layer = Transformer(config_of(bias_update_rate=0.1, scores="sigmoid")).blocks[0].mlp
    layer.load = torch.tensor([4, 8, 6, 6])
    update_balance_biases(layer)
    assert layer.router.balance_bias.tolist() == pytest.approx([0.1, -0.1, 0, 0]) and layer.load is None
    update_balance_biases(layer)  # nothing was counted since
    assert layer.to(torch.bfloat16).router.balance_bias.dtype == torch.float32


def test_only_training_drops():
    full, tight = (Transformer(config_of(capacity_factor=factor)) for factor in (None, 0.5))
    (trained, _), (loose, _) = tight(TOKENS, targets=TOKENS), full(TOKENS, targets=TOKENS)
    with torch.no_grad():
        assert torch.equal(full(TOKENS), tight(TOKENS))
        assert tight(TOKENS, targets=TOKENS)[0] == loose != trained


def test_experts_that_choose_are_not_served():
    model = Transformer(config_of(choice="expert"))
    for serve in (TinyLLM, LLM, lambda model: next(generate(model, [1, 2], 3))):
        with pytest.raises(ValueError, match="cannot generate token by token"):
            serve(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(top_k=5), "top_k 5 is more than num_experts 4"),
        (dict(top_k=0), "top_k 0 must be a whole number of at least 1"),
        (dict(num_experts=2.5), "num_experts 2.5 must be a whole number"),
        (dict(intermediate_size=0), "intermediate_size 0 must be"),
        (dict(capacity_factor=0), "capacity_factor 0 must be above 0, or None"),
        (dict(capacity_factor=-1.0), "capacity_factor -1.0 must be above 0, or None"),
        (dict(weight_scale=0.0), "weight_scale 0.0 must be above 0"),
        (dict(bias_update_rate=0.0), "bias_update_rate 0.0 must be above 0, or None"),
        (dict(scores="relu"), "scores 'relu' is not supported: use one of softmax, sigmoid"),
        (dict(choice="hash"), "choice 'hash' is not supported: use one of token, expert"),
        (dict(choice="expert", balance_loss=0.1), "balanced by construction"),
        (dict(balance_loss=-0.1), "balance_loss -0.1 must be at least 0"),
        (dict(z_loss=float("nan")), "z_loss nan must be at least 0"),
        (dict(shared_experts=-1), "shared_experts -1 must be"),
        (dict(dense_layers=(-1,)), "dense_layers"),
    ],
)
def test_bad_configurations(options, message):
    with pytest.raises(ValueError, match=message):
        config_of(**options)


def test_router_logits_that_are_not_finite_are_reported():
    model = Transformer(config_of())
    with torch.no_grad():
        model.blocks[1].mlp.router.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"router logits of 36 of 36 tokens are not finite: the weights .*diverged"):
        model(TOKENS, targets=TOKENS)
