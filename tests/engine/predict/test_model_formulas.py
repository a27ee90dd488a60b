"""Closed forms against what torch counts, exactly, over random shapes."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import minillm
from minillm.model import ModelConfig, MoEConfig, Transformer, cross_entropy, dense, sdpa
from minillm.predict import model as predict

GEMMA = dict(norm_placement="both", norm_offset=1.0, embedding_scale=3.0, activation="gelu_tanh", attention_scale=0.3)
GEMMA |= dict(logit_soft_cap=5.0, full_attention_layers=(1,))
OLMO = dict(norm_placement="post", qk_norm_over_heads=True)
MIXTURE = dict(moe=MoEConfig(5, 2))
DEEPSEEK = dict(moe=MoEConfig(6, 3, 7, scores="sigmoid", bias_update_rate=0.1, shared_experts=2, dense_layers=(0,)))


@st.composite
def configs(draw, others=({}, GEMMA, OLMO, {"output_bias": True, "mlp_bias": True}, MIXTURE, DEEPSEEK)):
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return ModelConfig(
        vocab_size=draw(st.integers(2, 70)),
        hidden_size=draw(st.integers(1, 40)),
        intermediate_size=draw(st.integers(1, 50)),
        num_layers=draw(st.integers(1, 3)),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(2, 8)),  # torch has no fused kernel for 2
        tie_embeddings=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        sliding_window=draw(st.none() | st.integers(1, 12)),
        **draw(st.sampled_from(others)),
    )


counted = settings(max_examples=20)
slowly_counted = settings(max_examples=8)


@counted
@given(config=configs())
def test_parameters_by_part(config):
    found = dict.fromkeys(("embedding", "attention", "biases", "mlp", "norms", "head"), 0)
    model = Transformer(config, device="meta")
    for name, parameter in model.named_parameters():
        top = name.split(".")[0]
        part = "biases" if name.endswith("bias") else "norms" if "norm" in name else "mlp" if ".mlp." in name else top
        found["attention" if part == "blocks" else part] += parameter.numel()
    assert found == vars(predict.parameters(config))
    assert predict.parameters(config).total == sum(parameter.numel() for parameter in model.parameters())


@slowly_counted
@given(config=configs(), batch=st.integers(1, 2), seq=st.integers(1, 8))
def test_flops_of_forward_and_training(config, batch, seq):
    """P64. The fused CPU kernel is not counted by torch, so its run shows the matmul part alone."""
    model, tokens = Transformer(config), torch.zeros(batch, seq, dtype=torch.long)
    for attention, context in ((dense, seq), (sdpa, 0)):
        with FlopCounterMode(display=False) as counter:
            logits = model(tokens, attention=attention)
        assert counter.get_total_flops() == batch * seq * predict.forward_flops(config, context).total
        with counter:
            cross_entropy(logits, tokens).backward()
        forward = predict.forward_flops(config, context).total
        assert counter.get_total_flops() == batch * seq * (predict.training_flops(config, context).total - forward)
    assert predict.training_flops(config, seq).matmul == 6 * predict.matmul_parameters(config)


@pytest.mark.parametrize("experts", [MIXTURE, DEEPSEEK])
def test_flops_of_a_mixture_are_those_of_its_active_parameters(experts):
    """The counter sees what the formula says, and twice the experts cost a router's row each, no more."""
    config, tokens = ModelConfig(50, 16, 24, 3, 4, 2, **experts), torch.randint(50, (2, 6))
    twice = replace(config, moe=replace(config.moe, num_experts=2 * config.moe.num_experts))
    for each in (config, twice):
        with FlopCounterMode(display=False) as counter:
            Transformer(each)(tokens, targets=tokens)[0].backward()
        assert counter.get_total_flops() == 12 * predict.training_flops(each, 0).total
    layers = sum(config.has_experts(layer) for layer in range(3))
    more = predict.matmul_parameters(twice) - predict.matmul_parameters(config)
    assert more == layers * 16 * config.moe.num_experts
    assert predict.parameters(twice).total > predict.parameters(config).total + more


@pytest.mark.parametrize("tied", [True, False])
def test_flops_with_recomputed_blocks(tied):
    """P63: a forward pass of the blocks more, 4/3 of what they cost; the head's is not repeated."""
    config = ModelConfig(50, 16, 24, 3, 4, 2, tie_embeddings=tied)
    model, tokens = Transformer(config), torch.zeros(2, 6, dtype=torch.long)
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda *args, forward=forward: torch.utils.checkpoint.checkpoint(
            forward, *args, use_reentrant=False, early_stop=False
        )
    with FlopCounterMode(display=False) as counter:
        cross_entropy(model(tokens, attention=dense), tokens).backward()
    assert counter.get_total_flops() == 12 * predict.training_flops(config, 6, recompute=True).total
    plain, again = predict.training_flops(config, 6), predict.training_flops(config, 6, recompute=True)
    head = 6 * config.vocab_size * config.hidden_size
    assert (again.total - head) * 3 == (plain.total - head) * 4


@counted
@given(seq=st.integers(1, 20), window=st.none() | st.integers(1, 25))
def test_causal_context_is_the_mean_number_of_visible_keys(seq, window):
    from minillm.model.attention import visible

    q = torch.empty(1, 1, seq, 2)
    assert predict.causal_context(seq, window) * seq == visible(None, None, q, q, window=window).sum()


@counted
@given(config=configs(), seq=st.integers(1, 8), dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_kv_bytes(config, seq, dtype):
    held = []

    def cache(q, k, v, **where):
        held.extend((k, v))
        return sdpa(q, k, v, **where)

    Transformer(config, dtype=dtype)(torch.zeros(1, seq, dtype=torch.long), attention=cache)
    assert sum(x.nbytes for x in held) == seq * predict.kv_bytes_per_token(config, dtype.itemsize)


def adam_bytes(dtype, gradient_dtype, master):
    """Parameters and bytes held by one AdamW step, by kind."""
    model = Transformer(ModelConfig(50, 16, 24, 2, 4, 2), dtype=dtype)
    parameters = list(model.parameters())
    gradients = [torch.ones_like(p, dtype=gradient_dtype) for p in parameters]
    masters = [p.detach().float() for p in parameters] if master else parameters
    optimizer = torch.optim.AdamW(masters)
    for p, gradient in zip(masters, gradients, strict=True):
        p.grad = gradient.to(p.dtype)
    optimizer.step()
    moments = [t for state in optimizer.state.values() for t in state.values() if t.dim()]  # not the step, a scalar
    kinds = dict(parameter=parameters, gradient=gradients, master=masters if master else [], moments=moments)
    return sum(p.numel() for p in parameters), {kind: sum(t.nbytes for t in held) for kind, held in kinds.items()}


@pytest.mark.parametrize(
    "state, total, arguments",
    [
        (predict.ADAM_FP32, 16, (torch.float32, torch.float32, False)),
        (predict.ADAM_MIXED, 16, (torch.bfloat16, torch.bfloat16, True)),
        (predict.ADAM_MIXED_FP32_GRADIENTS, 18, (torch.bfloat16, torch.float32, True)),
    ],
)
def test_training_state(state, total, arguments):
    """P52: 16 bytes per parameter in both precisions, 18 with float32 gradients."""
    count, held = adam_bytes(*arguments)
    assert held == {kind: size * count for kind, size in vars(state).items()} and state.total == total


@pytest.mark.parametrize(
    "state, psi", [(predict.ADAM_FP32, 1000), (predict.ADAM_MIXED, 1000), (predict.ADAM_MIXED, 997)]
)
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_training_state_per_rank(state, psi, world_size):
    """P50, P51: against shards that are really allocated, padded to equal size."""
    dtypes = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
    kinds = ("master", "moments"), ("gradient",), ("parameter",)
    for stage in range(4):
        sharded = {kind for group in kinds[:stage] for kind in group}
        held = 0
        for kind, size in vars(state).items():
            if size:
                whole = torch.zeros(-(-psi // world_size) * world_size, dtype=dtypes[size])
                held += whole.chunk(world_size)[0].clone().nbytes if kind in sharded else whole[:psi].clone().nbytes
        assert state.per_rank(psi, world_size, stage) == held
    if psi == 1000 and world_size == 8:
        fp32 = state is predict.ADAM_FP32
        assert [state.per_rank(1000, 8, stage) for stage in range(4)] == [
            16000,
            9000 if fp32 else 5500,
            5500 if fp32 else 3750,
            2000,
        ]


def test_published_sizes():
    """Llama 3 8B and 70B, and what the 70B caches per token: 0.33 MB, 2.62 MB if it were not grouped (P80)."""
    small = ModelConfig(128256, 4096, 14336, 32, 32, 8)
    large = ModelConfig(128256, 8192, 28672, 80, 64, 8)
    assert predict.parameters(small).total == 8_030_261_248 and predict.parameters(large).total == 70_553_706_496
    assert predict.kv_bytes_per_token(large) == 327_680
    assert predict.kv_bytes_per_token(ModelConfig(128256, 8192, 28672, 80, 64)) == 2_621_440


def test_bad_stage_is_named_and_no_torch_is_needed():
    with pytest.raises(ValueError, match="ZeRO stage 4 on 2 ranks"):
        predict.ADAM_FP32.per_rank(10, 2, 4)
    code = "import sys, minillm.predict.model; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(minillm.__file__).parents[1]).returncode == 0
