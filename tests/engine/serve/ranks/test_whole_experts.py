"""Experts over the ranks of a tensor-parallel engine, some whole ones on each: `ep`."""

from dataclasses import replace

import pytest
import torch

from minillm.comm import launch
from minillm.measure import ledger
from minillm.model import Transformer
from minillm.model.config import MoEConfig
from minillm.parallel.tensor_parallel.parallelize import tensor_parallel
from tests.engine.comm.nccl_like import on_nccl_like
from tests.engine.serve.ranks.programs import CONFIG, mixed
from tests.engine.serve.ranks.test_ranks_proof import COUNT, PATIENCE_S, SEED, check

MOE = replace(CONFIG, num_layers=1, moe=MoEConfig(4, 2))
TOKENS = torch.arange(14)[None]


@pytest.mark.parametrize("tp", [2, 4])
def test_tokens_are_those_of_one_process(tp):
    check(launch(mixed, tp, ("whole-experts",), COUNT, SEED, timeout=PATIENCE_S)[0])


@pytest.mark.full
def test_tokens_by_the_rules_of_nccl():
    check(launch(on_nccl_like(mixed), 2, ("whole-experts",), COUNT, SEED, timeout=PATIENCE_S)[0])


def cut_both_ways(group):
    """(difference of the logits from the whole model's, bytes of all-reduces, numbers of the experts): of experts whole
    and in parts."""
    found = []
    for whole_experts in (True, False):
        model = Transformer(MOE, seed=3).double()
        expected = model(TOKENS)[..., :61].detach()
        tensor_parallel(model, MOE, group, whole_experts=whole_experts)
        with torch.inference_mode(), ledger() as led:
            words = group.all_gather(model(TOKENS).transpose(0, 2).contiguous()).transpose(0, 2)[..., :61]
        size = sum(each.numel() for each in model.blocks[0].mlp.experts.parameters())
        found.append((float((words - expected).abs().max()), led.bytes(op="all_reduce"), size))
    return found


@pytest.mark.parametrize("tp", [2, 4])
def test_a_row_a_token_is_reduced_and_not_one_for_each_of_its_experts(tp):
    one = TOKENS.numel() * MOE.hidden_size * 8 * 2 * (tp - 1) // tp  # an all-reduce of a row for each token
    for whole, parts in launch(cut_both_ways, tp):
        assert whole[0] < 1e-10 and parts[0] < 1e-10
        assert abs(parts[1] - whole[1] - one * (MOE.moe.top_k - 1)) <= 16
        assert whole[2] == parts[2] == sum(p.numel() for p in Transformer(MOE).blocks[0].mlp.experts.parameters()) / tp


def refused(group, config):
    try:
        tensor_parallel(Transformer(config, device="meta"), config, group, whole_experts=True)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (CONFIG, "whole experts are for a model that has experts, and this one has none: leave ep out."),
        (replace(MOE, moe=MoEConfig(5, 2)), "5 experts do not divide over 2 ranks: every rank takes equally many"),
    ],
)
def test_refusals(config, said):
    assert all(text.startswith(said) for text in launch(refused, 2, config))
