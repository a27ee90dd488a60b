"""Memory of a block and of a whole training step against what autograd keeps and the memory tracker counts."""

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.comm import launch
from minillm.data import Tokens
from minillm.measure import memory
from minillm.model import ModelConfig, MoEConfig, Transformer
from minillm.predict.training.activations import block_activation_bytes
from minillm.predict.training.memory import RECIPES, training_step
from minillm.train import PRECISIONS, TrainConfig, Trainer
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies.hybrid import make_strategy
from tests.engine.predict.test_model_formulas import configs

pytestmark = pytest.mark.drawn(2)


@settings(max_examples=25)
@given(
    config=configs(others=({},)),  # blocks of Llama's shape
    batch=st.integers(1, 3),
    seq=st.integers(1, 8),
    stored=st.sampled_from([(torch.float32, False), (torch.float64, False), (torch.bfloat16, False), (None, True)]),
)
def test_activation_bytes_of_a_block(config, batch, seq, stored):
    """Every storage autograd keeps while a block runs, but for the parameters and the rotation all blocks share."""
    dtype, autocast = stored[0] or torch.float32, stored[1]
    found = kept_by_a_block(config, batch, seq, dtype, autocast)
    assert found == block_activation_bytes(config, batch, seq, dtype.itemsize, 2 if autocast else None)


def kept_by_a_block(config, batch, seq, dtype, autocast=False):
    model = Transformer(config, dtype=dtype)
    x = torch.randn(batch, seq, config.hidden_size, dtype=dtype, requires_grad=True)
    rotation = model.rope(torch.arange(seq), dtype)
    shared = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *rotation)}
    kept, alive = {}, []

    def pack(t):
        alive.append(t)  # so that no address is used twice
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    where = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), where:
        out = model.blocks[0](x, rotation)
    found = sum(size for address, size in kept.items() if address not in shared)
    assert out.requires_grad
    return found


@pytest.mark.parametrize("moe", [MoEConfig(8, 3, 6, shared_experts=2), MoEConfig(4, 1, 6, normalize=False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_activation_bytes_of_a_block_of_experts(moe, dtype):
    config = ModelConfig(37, 12, 17, 1, 4, 2, head_dim=4, moe=moe)
    assert kept_by_a_block(config, 3, 7, dtype) == block_activation_bytes(config, 3, 7, dtype.itemsize)
    with pytest.raises(ValueError, match="experts keeps is known in float32"):
        training_step(config, 3, 7, "bf16")


SHAPES = {
    "grouped, tied": ModelConfig(512, 64, 192, 3, 4, 2, tie_embeddings=True),
    "untied": ModelConfig(300, 64, 160, 2, 4),
    "q/k norm, one kv head": ModelConfig(256, 48, 160, 2, 6, 1, head_dim=16, qk_norm=True),
    "biases, wide": ModelConfig(256, 128, 512, 2, 4, 2, tie_embeddings=True, qkv_bias=True),
}


def held_in_a_step(config, precision, batch, seq, **options):
    """What one step of the trainer held at most, by kind."""
    with trainer_of(config, precision, batch, seq, **options) as trainer:
        trainer.step()  # makes the moments
        with memory(trainer.model, trainer.optimizer) as held:
            trainer.step()
    return held.peak


def trainer_of(config, precision, batch, seq, parallel=None, **options):
    array = np.random.default_rng(0).integers(0, config.vocab_size, 8192).astype(np.uint16)
    tokens = Tokens(array, config.vocab_size, 0, 1, len(array))
    chosen = TrainConfig(config, seq_len=seq, batch_size=batch, precision=precision, **options)
    return Trainer(chosen, tokens, workers=0, parallel=parallel)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-master", "bf16-pure"])
@pytest.mark.parametrize("batch, seq", [(4, 64), (1, 16), (8, 96)])
def test_a_whole_step_by_kind(name, precision, batch, seq):
    """Within 2 %, whether activations (many tokens, also several chunks of the loss) or weights (few) decide."""
    config = SHAPES[name]
    found, step = held_in_a_step(config, precision, batch, seq), training_step(config, batch, seq, precision)
    predicted = [step.most(kind) for kind in ("weights", "gradients", "optimizer", "activations")]
    counted = (found.parameter, found.gradient, found.optimizer, found.activation, found.buffer, found.total)
    assert (*predicted, step.buffer, step.peak.total) == pytest.approx(counted, rel=0.02)
    assert step.most("activations") == pytest.approx(found.activation, abs=64)  # scalars, such as the number of tokens


@pytest.mark.drawn(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-master"])
@pytest.mark.parametrize("options", [{"accumulate": 3}, {"activation_checkpointing": "full"}])
def test_accumulation_and_recomputation(precision, options):
    config = SHAPES["grouped, tied"]
    found = held_in_a_step(config, precision, 4, 64, **options)
    again = {"accumulate": options.get("accumulate", 1), "recompute": "activation_checkpointing" in options}
    step = training_step(config, 4, 64, precision, **again)
    assert (step.most("activations"), step.peak.total) == pytest.approx((found.activation, found.total), rel=0.02)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("moe", [MoEConfig(8, 2, 48, shared_experts=1), MoEConfig(4, 1, 64, normalize=False)])
@pytest.mark.parametrize("batch, seq, accumulate", [(4, 64, 1), (1, 16, 3), (8, 96, 3)])
def test_a_whole_step_of_experts(moe, batch, seq, accumulate):
    config = ModelConfig(256, 64, 176, 4, 8, 4, max_seq_len=128, moe=moe)
    found = held_in_a_step(config, "fp32", batch, seq, accumulate=accumulate)
    step = training_step(config, batch, seq, accumulate=accumulate)
    assert (step.most("activations"), step.peak.total) == pytest.approx((found.activation, found.total), rel=0.01)


@pytest.mark.parametrize("replicas", [1, 2])
def test_buckets_of_gradients_are_not_there_in_forward(replicas):
    """A rank holds what one process does, whose peak is at the loss; one of several also what a ring received."""
    found = launch(held_by_a_rank, replicas)
    expected = training_step(SHAPES["grouped, tied"], 8, 96, "bf16")
    piece = expected.peak.weights / 2 if replicas > 1 else 0  # half of the one bucket of float32 gradients
    assert found == [pytest.approx(expected.peak.total + piece, rel=0.001)] * replicas


def held_by_a_rank(group):
    config = SHAPES["grouped, tied"]
    with (
        make_strategy(group, ParallelConfig(dp=group.world_size)) as parallel,
        trainer_of(config, "bf16", 8, 96, parallel) as trainer,
        memory(trainer.model, trainer.optimizer) as held,  # from the first step on: it would see no idle bucket
    ):
        trainer.step()
        trainer.step()
    return held.peak.total


def test_moments_of_the_peak():
    config = SHAPES["biases, wide"]
    assert training_step(config, 8, 96, "bf16").fullest == "loss"
    assert training_step(config, 1, 1, "fp32").fullest == "embedding"
    assert training_step(config, 1, 1, "bf16-master").fullest == "optimizer"
    assert training_step(config, 1, 1, "bf16-master").moments["optimizer"].total > 18 * 4 * 128 * 512
    assert set(RECIPES) == set(PRECISIONS)
    with pytest.raises(ValueError, match="'int8'"):
        training_step(config, 1, 1, "int8")
