"""Sequence parallelism: the same bytes, 1/t of what lies between the regions. Its values: see test_tensor.py."""

import pytest
import torch
from tensor_programs import config_of, model_of, receipts, step, sum_shares

from minillm.comm import launch
from minillm.equivalence import Batch
from minillm.measure import ledger
from minillm.model import ModelConfig
from minillm.parallel.tensor_parallel.parallelize import tensor_parallel
from minillm.parallel.tensor_parallel.regions import gather_from, scatter_to
from minillm.predict.training import tensor as predict
from minillm.predict.training.activations import block_activation_bytes

MODEL = ModelConfig(40, 32, 64, 3, 4, 2, max_seq_len=16)
BATCH, SEQ = 2, 16


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_same_bytes_and_a_part_of_the_norms(world_size):
    layers, plain = MODEL.num_layers, predict.microbatch(MODEL, BATCH, SEQ)
    expected = {"forward": 0, "backward": 0}
    for call in plain:
        expected["backward" if call.backward else "forward"] += call.cost(world_size).sent_per_rank[0]
    for regather in (False, True):
        calls = predict.microbatch(MODEL, BATCH, SEQ, sequence=True, regather=regather)
        for forward, sent, backward, sent_back, saved, parameters in launch(
            receipts, world_size, MODEL, BATCH, SEQ, True, regather
        ):
            assert forward == {"all_gather": 2 * layers + 1, "reduce_scatter": 2 * layers + 1, "all_reduce": 2}
            again = 2 * layers if regather else 0
            assert backward == {"reduce_scatter": 2 * layers + 1, "all_gather": 2 * layers + 1 + again}
            assert forward + backward == predict.count(calls)
            half = predict.layer_bytes(BATCH, SEQ, MODEL.hidden_size, 4, world_size) / 8  # one all-gather
            assert sent == expected["forward"] and sent_back == expected["backward"] + again * half
            assert parameters == predict.parameters(MODEL, world_size)
            args = MODEL, BATCH, SEQ
            assert saved == block_activation_bytes(*args, tp=world_size, sequence=True, regather=regather)
    between = 4 * BATCH * SEQ * (6 * MODEL.hidden_size + 2)  # norms and the inputs of the regions, in float32
    tensor, sequence = (block_activation_bytes(*args, tp=world_size, sequence=split) for split in (False, True))
    assert tensor - sequence == between - between // world_size


def norms(group):
    """Norms between the regions talk to nobody; their weights' gradients are shares, summed by one all-reduce."""
    config = config_of(qk_norm=True, num_kv_heads=1)
    model = tensor_parallel(model_of(config), config, group, sequence=True)
    x = torch.randn(1, 8 // group.world_size, 16, dtype=torch.float64, requires_grad=True)
    with ledger() as led:
        model.blocks[0].mlp_norm(x).sum().backward()
    assert not led.events
    model.zero_grad()
    step(model, config, group, Batch.random(config, 1, 8), True)
    with ledger() as led:
        sum_shares(model, config, group, True)
    frozen = tensor_parallel(model_of(config, ["norm", "k_proj", "v_proj"]), config, group, sequence=True)
    step(frozen, config, group, Batch.random(config, 1, 8), True)
    with ledger() as none:
        sum_shares(frozen, config, group, True)

    rows = torch.arange(8.0).reshape(1, 8, 1).expand(2, 8, 3).contiguous()
    mine = rows.chunk(group.world_size, 1)[group.rank].clone().requires_grad_()
    entered = gather_from(mine, group)
    left = scatter_to(entered * 2, group)
    left.sum().backward()
    assert torch.equal(entered, rows) and torch.equal(left, 2 * group.world_size * mine)
    assert torch.equal(mine.grad, torch.full_like(mine, 2 * group.world_size))
    return [(event.op, event.shape) for event in led.events], len(none.events)


def test_norms_talk_once_per_step():
    layer = 2 * 16 + 2 * 4 + 2 * 4 * 16  # two norms, those of q and k, and k and v of the head that both ranks hold
    assert launch(norms, 2) == [([("all_reduce", (2 * layer + 16,))], 0)] * 2


def test_a_sequence_that_does_not_divide_is_refused_before_anybody_waits():
    def uneven(group):
        config = config_of()
        model = tensor_parallel(model_of(config), config, group, sequence=True)
        with ledger() as led:
            try:
                model(torch.zeros(2, 7, dtype=torch.long))
            except ValueError as said:
                return str(said), len(led.events)

    sentence = "a sequence of 7 tokens does not divide over 2 sequence-parallel ranks: pad it to 8 or leave"
    assert all(said.startswith(sentence) and events == 0 for said, events in launch(uneven, 2))
