"""Hand-overs: bytes against the tensors of a cache, messages against heads counted one by one, seconds against a clock
that moves layer by layer."""

import random

import pytest
import torch

from minillm.model import ModelConfig
from minillm.predict.serving import handover

SHAPE = ModelConfig(512, 64, 128, 3, 4, 2, max_seq_len=128)


def test_bytes_are_those_of_the_tensors():
    keys = torch.zeros(SHAPE.num_layers, 2, 37, SHAPE.num_kv_heads, SHAPE.head_dim, dtype=torch.bfloat16)
    assert handover.handed_bytes(SHAPE, 37) == keys.nbytes
    assert handover.handed_bytes(SHAPE, 37, cached=16) == keys[:, :, 16:].nbytes
    with pytest.raises(ValueError, match="cached 38"):
        handover.handed_bytes(SHAPE, 37, cached=38)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("senders", [1, 2, 4, 8])
@pytest.mark.parametrize("receivers", [1, 2, 4, 8])
def test_every_receiver_gets_each_of_its_heads_once_from_one_that_holds_it(kv_heads, senders, receivers):
    arrived = {receiver: [] for receiver in range(receivers)}
    for sender, receiver, heads in handover.routes(kv_heads, senders, receivers):
        assert set(heads) <= set(handover.heads_of(kv_heads, senders, sender))
        arrived[receiver] += heads
    assert all(sorted(got) == list(handover.heads_of(kv_heads, receivers, rank)) for rank, got in arrived.items())


def test_heads_that_divide_neither_way_are_refused():
    with pytest.raises(ValueError, match="6 kv heads and 4 ranks"):
        handover.heads_of(6, 4, 0)


def test_seconds_are_those_of_a_clock_that_moves_layer_by_layer():
    for _ in range(200):
        layers, compute, transfer = random.randint(1, 9), random.random() + 0.01, random.random() + 0.01
        device = link = 0.0
        for _ in range(layers):
            device += compute / layers
            link = max(device, link) + transfer / layers
        assert handover.handover_seconds(layers, compute, transfer) == pytest.approx(link)
        assert handover.hidden_share(layers, compute, transfer) == pytest.approx(1 - (link - compute) / transfer)


def test_a_link_that_takes_half_of_prefill_hides_all_but_a_layer():
    assert handover.hidden_share(32, 1.0, 0.5) == pytest.approx(31 / 32)
