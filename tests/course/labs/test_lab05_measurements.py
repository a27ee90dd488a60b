"""Lab 05's predictions agree: the paper's numbers, closed forms, and the arithmetic behind the figures."""

import pytest
import torch
import torch.nn.functional as F

from course.lab05_tensor_parallel import experiments as steps
from course.lab05_tensor_parallel import experiments_breaks as breaks
from course.lab05_tensor_parallel import experiments_links as links
from course.lab05_tensor_parallel import experiments_torch as peers
from course.lab05_tensor_parallel import figures as pictures
from course.lab05_tensor_parallel import rank_programs, rank_programs_order
from course.lab05_tensor_parallel.experiments import FORMS, MODEL, SEQ, Setup
from minillm.comm import launch
from minillm.model.attention import sdpa
from minillm.model.rope import Rope, rotate
from minillm.predict.training import tensor as predict


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_layer_sends_four_all_reduces_and_regathering_two_gathers_more(ranks):
    activation = 4 * SEQ * MODEL.hidden_size * 4
    sent = {form: steps.layer_bytes(Setup(ranks, form)) for form in FORMS}
    assert sent["tensor"] == sent["sequence"] == 4 * 2 * (ranks - 1) * activation // ranks
    assert sent["regather"] == sent["tensor"] + 2 * (ranks - 1) * activation // ranks


def test_bytes_grow_with_the_batch_and_not_with_the_weights():
    wide = Setup(4, config=steps.replace(MODEL, intermediate_size=320))
    assert steps.step_bytes(wide) == steps.step_bytes(Setup(4))
    assert steps.step_bytes(Setup(4, rows=8)) == 2 * steps.step_bytes(Setup(4))


def test_gpt3_activations_of_one_layer():
    """Korthikanti et al. 2022: 2.87 GB on one GPU, 0.58 with tensor parallelism over 8, 0.36 with sequence, too."""
    found = [predict.activation_bytes(1, 2048, 12288, 96, t, sp) / 1e9 for t, sp in ((1, False), (8, False), (8, True))]
    assert found == pytest.approx([2.87, 0.58, 0.36], abs=0.005)


def test_forms_keep_less_and_less():
    kept = [steps.layer_activation_bytes(Setup(4, form)) for form in FORMS]
    assert kept == sorted(kept, reverse=True) and kept[-1] * 4 == steps.layer_activation_bytes(Setup(1))


def test_time_per_layer():
    """Compute is divided, all-reduces are not; what is hidden is at most what the weight gradients take."""
    alone, eight = (pictures.layer_seconds(t, 8192, 400) for t in (1, 8))
    assert alone["compute"] == pytest.approx(8 * eight["compute"])
    assert alone["all-reduce, waited for"] == alone["all-reduce, hidden behind dW"] == 0
    slow = pictures.layer_seconds(8, 8192, 10)
    assert slow["all-reduce, hidden behind dW"] == pytest.approx(7 / 36 * slow["compute"])


def test_tokens_at_which_data_parallelism_sends_as_much():
    gpt = steps.replace(MODEL, hidden_size=768, intermediate_size=2048, num_layers=96, num_heads=12, num_kv_heads=12)
    assert links.equal_tokens(steps.replace(gpt, head_dim=64)) == pytest.approx(3 * 768, rel=0.01)


def test_dtensor_that_shares_inputs_sends_what_minillm_does():
    setup = Setup(2, rows=peers.ROWS)
    assert peers.predicted_bytes("inputs shared", 2) == steps.step_bytes(setup)
    more = peers.predicted_bytes("each layer for itself", 2) / steps.step_bytes(setup)
    assert 7 / 4 * 0.9 < more < 7 / 4


def test_the_models_by_hand_are_the_models():
    q, k, v = (torch.randn(2 * SEQ, heads * MODEL.head_dim) for heads in (8, 4, 4))
    rotation = Rope(MODEL)(torch.arange(SEQ), q.dtype)
    for row in range(2):
        rows = slice(row * SEQ, (row + 1) * SEQ)
        heads = [y[rows].view(1, SEQ, -1, MODEL.head_dim).transpose(1, 2) for y in (q, k, v)]
        right = sdpa(rotate(heads[0], *rotation), rotate(heads[1], *rotation), heads[2])
        assert torch.allclose(steps.attend(q, k, v)[rows], right[0].transpose(0, 1).flatten(1), atol=1e-6)
    x, weight = torch.randn(3, 8), torch.randn(8)
    assert torch.allclose(rank_programs_order.normalise(x, weight), F.rms_norm(x, (8,), weight, 1e-5), atol=1e-6)
    layer = rank_programs.draw_attention(4, 2, 2)
    assert rank_programs.whole_attention(layer.x, *layer.weights).shape == layer.x.shape


@pytest.mark.full
def test_the_accidents_happen_and_the_right_ways_do_not():
    ranks = launch(breaks.all_accidents, 4, device="cpu")
    assert all(rank["norms"]["summed"]["apart"] == 0 for rank in ranks)
    assert max(rank["norms"]["forgotten"]["apart"] for rank in ranks) > 1e-3
    ways = [rank["norm"] for rank in ranks]
    assert len({way["whole"] for way in ways}) == 1 and ways[0]["naive"] > ways[0]["whole"]
    one_process = sum(way["local"] ** 2 - way["replicated"] ** 2 for way in ways) + ways[0]["replicated"] ** 2
    assert ways[0]["whole"] == pytest.approx(one_process**0.5)
