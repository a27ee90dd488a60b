"""Numbers, FLOPs and memory of adapters against counted runs."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from minillm.adapters import LoraConfig, attach
from minillm.adapters.attach import adapter_parameters
from minillm.data import Tokens
from minillm.measure import memory
from minillm.model import ModelConfig, Transformer, dense
from minillm.predict.training.adapters import (
    LAYERS,
    Adapters,
    adapters_that_fit,
    batch_bytes_read,
    merged_bytes_read,
    nf4_bytes,
)
from minillm.quantize import NF4, QuantizedLinear
from minillm.train import TrainConfig, Trainer

SHAPE = ModelConfig(37, 12, 20, 2, 4, 2, head_dim=4, max_seq_len=64)
CHOICES = [
    ("q_proj",),
    ("q_proj", "v_proj"),
    ("k_proj", "down_proj"),
    ("o_proj",),
    ("up_proj",),
    ("down_proj",),
    LAYERS,
]


@pytest.mark.parametrize("layers", CHOICES, ids=len)
def test_numbers_and_flops_of_a_step(layers):
    model, predicted = Transformer(SHAPE, attention=dense), Adapters(SHAPE, 3, layers)
    attach(model, LoraConfig(3, layers))
    assert predicted.parameters == sum(each.numel() for each in adapter_parameters(model).values())
    assert predicted.nbytes(4) == sum(each.nbytes for each in adapter_parameters(model).values())
    tokens = torch.randint(37, (2, 8))
    with FlopCounterMode(display=False) as forward:
        loss, _ = model(tokens, targets=tokens)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    head = 2 * 37 * 12 * 16  # the gradient of its input, made with the loss
    assert forward.get_total_flops() - head == 16 * predicted.forward_flops(8).total
    assert forward.get_total_flops() + backward.get_total_flops() == 16 * predicted.training_flops(8).total


@pytest.mark.parametrize("size", [(64, 64), (128, 384), (256, 704)])
def test_bytes_of_codes(size):
    layer = QuantizedLinear.of(torch.nn.Linear(*size, bias=False), NF4())
    assert layer.nbytes == nf4_bytes(size[0] * size[1])
    assert 8 * nf4_bytes(4096 * 4096) / 4096**2 == pytest.approx(4.127, abs=1e-3)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("nf4", [False, True], ids=["lora", "qlora"])
@pytest.mark.parametrize("layers", [("q_proj", "v_proj"), ("o_proj", "down_proj"), LAYERS], ids=len)
@pytest.mark.parametrize(
    ("shape", "batch", "seq"),
    [
        (ModelConfig(512, 128, 384, 3, 4, 2, head_dim=32, max_seq_len=256), 4, 128),
        (ModelConfig(512, 256, 768, 4, 4, 2, head_dim=64, max_seq_len=256), 2, 64),
    ],
    ids=["activations", "weights"],
)
def test_memory_of_a_step_is_within_five_percent(shape, batch, seq, layers, nf4):
    tokens = Tokens(np.random.default_rng(0).integers(0, shape.vocab_size, 5000), shape.vocab_size, 0, 1, 5000)
    config = TrainConfig(shape, seq_len=seq, batch_size=batch, lora=4, target=",".join(layers), qlora=nf4)
    with Trainer(config, tokens) as trainer:
        trainer.step()  # makes the moments
        with memory(trainer.module, trainer.optimizer) as seen:
            trainer.step()
    predicted = Adapters(shape, 4, layers).step_memory(batch, seq, nf4=nf4)
    assert predicted.total == pytest.approx(seen.peak.total, rel=0.05)
    assert predicted.base + predicted.adapters == pytest.approx(seen.peak.parameter + seen.peak.buffer, rel=0.01)
    assert predicted.activations == pytest.approx(seen.peak.activation, rel=0.05)


def test_a_batch_of_many_adapters_reads_the_base_once():
    adapter = Adapters(SHAPE, 8, LAYERS).nbytes()
    assert batch_bytes_read(10**6, [adapter] * 16) == 10**6 + 16 * adapter
    assert merged_bytes_read(10**6, 16) == 16 * 10**6
    assert adapters_that_fit(10 * adapter + 1, adapter) == 10


@pytest.mark.parametrize(("rank", "layers", "message"), [(0, LAYERS, "rank 0"), (2, ("x_proj",), "no layer 'x_proj'")])
def test_adapters_that_cannot_be(rank, layers, message):
    with pytest.raises(ValueError, match=message):
        Adapters(SHAPE, rank, layers)
