"""Closed forms of tensor parallelism by hand; tests/engine/parallel/test_tensor.py holds real ranks to them."""

from collections import Counter
from dataclasses import replace

import pytest

from minillm.model import ModelConfig, MoEConfig
from minillm.predict import model
from minillm.predict.training import tensor as predict
from minillm.predict.training.activations import block_activation_bytes

SHAPE = ModelConfig(100, 16, 48, 3, 4, 2)


def test_collectives_of_a_microbatch():
    calls = predict.microbatch(SHAPE, 2, 8)
    assert predict.count(calls) == Counter(all_reduce=4 * 3 + 2 + 2)
    assert [call.elements for call in calls if call.part == "loss"] == [16, 32]
    assert predict.count(predict.microbatch(SHAPE, 2, 8, chunk=5))["all_reduce"] == 14 + 2 * 4
    # [2, 8, 16] floats: 2 · 1024 · 3/4 a rank and all-reduce; 3 numbers for each of 16 tokens
    assert predict.cost(calls, 4).sent_per_rank == (14 * 1536 + 3 * 16 * 4 * 3 // 2,) * 4
    assert predict.cost(calls, 1).total_bytes == 0
    for t in (2, 4, 8):
        same = predict.microbatch(SHAPE, 2, 8, sequence=True, regather=False)
        assert predict.cost(same, t).sent_per_rank == predict.cost(calls, t).sent_per_rank
        again = predict.microbatch(SHAPE, 2, 8, sequence=True)
        layers = [predict.cost([c for c in some if c.part == "layers"], t).sent_per_rank[0] for some in (calls, again)]
        assert layers[1] == 1.25 * layers[0] == 1.25 * 3 * predict.layer_bytes(2, 8, 16, 4, t)


def test_bytes_grow_with_the_batch_and_not_with_the_weights():
    assert predict.layer_bytes(8, 64, 256, 4, 2) == 4 * 8 * 64 * 256 * 4
    assert predict.layer_bytes(16, 64, 256, 4, 2) == 2 * predict.layer_bytes(8, 64, 256, 4, 2)
    wide = replace(SHAPE, intermediate_size=4800, vocab_size=10000)
    assert predict.cost(predict.microbatch(wide, 2, 8), 4) == predict.cost(predict.microbatch(SHAPE, 2, 8), 4)
    # without the pairing, [B, S, 4H] is gathered as well: as many bytes as two more all-reduces of [B, S, H]
    assert predict.unpaired_bytes(2, 8, 4 * 16, 4, 4) == 2 * predict.layer_bytes(2, 8, 16, 4, 4) / 4
    assert predict.loss_bytes_per_token(4) == 18 and predict.gathered_logits_bytes_per_token(32000, 4) == 96000


@pytest.mark.parametrize("settings", [{}, dict(tie_embeddings=True, qkv_bias=True, qk_norm=True)])
def test_parameters_of_a_rank(settings):
    shape = replace(SHAPE, **settings)
    whole = model.parameters(shape)
    assert predict.parameters(shape, 1) == whole.total
    assert predict.parameters(shape, 2) == (whole.total - whole.norms) // 2 + whole.norms
    copies = shape.num_layers * 2 * shape.head_dim * (16 + shape.qkv_bias) * 2  # 2 kv heads held 4 times, not 2
    assert predict.parameters(shape, 4) == (whole.total - whole.norms + copies) // 4 + whole.norms
    assert predict.parameters(replace(shape, vocab_size=97), 4) == predict.parameters(shape, 4)  # padded


def test_activations():
    for settings in ({}, dict(qk_norm=True)):
        shape = replace(SHAPE, **settings)
        whole = block_activation_bytes(shape, 2, 8)
        assert block_activation_bytes(shape, 2, 8, tp=2, sequence=True) == whole // 2
        assert whole // 2 < block_activation_bytes(shape, 2, 8, tp=2) < whole
        with pytest.raises(ValueError, match="one of 2 tensor-parallel ranks"):
            block_activation_bytes(shape, 2, 8, 4, 2, tp=2)
    # GPT-3 on 8 ranks (96 heads of 128, 2048 tokens): Korthikanti et al. 2022, equations 1, 2, 4
    found = [predict.activation_bytes(1, 2048, 12288, 96, *options) / 1e9 for options in ((), (8,), (8, True))]
    assert found == pytest.approx([2.87, 0.58, 0.36], abs=0.01)


def test_experts_reduce_a_row_for_each_choice():
    shape = replace(SHAPE, moe=MoEConfig(8, 2, 6, shared_experts=1, dense_layers=(1,)))
    calls = [call for call in predict.microbatch(shape, 2, 8) if call.part == "layers"]
    elements = Counter()
    for call in calls:
        assert call.op == "all_reduce"
        elements[call.backward] += call.count * call.elements
    table = 2 * 8 * 16
    assert set(elements.values()) == {4 * table + 2 * (2 + 1) * table}  # attention and an MLP; rows and shared experts
    sequence = predict.count(call for call in predict.microbatch(shape, 2, 8, sequence=True) if call.part == "layers")
    assert sequence == Counter(all_reduce=2 * 2 * 2, reduce_scatter=2 * 4, all_gather=3 * 4 + 2 * 2)


def test_activations_of_experts():
    for moe in (MoEConfig(8, 3, 6, shared_experts=2), MoEConfig(4, 1, 6, normalize=False)):
        shape = replace(SHAPE, moe=moe)
        whole = block_activation_bytes(shape, 2, 8)
        row = 4 * (shape.hidden_size + 2 * 6)
        assert block_activation_bytes(shape, 2, 8, rows=16 * moe.top_k + 5) - whole == 5 * row
        assert block_activation_bytes(shape, 2, 8, tp=2) < whole
