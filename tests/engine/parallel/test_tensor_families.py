"""Options of other families under tensor and pipeline parallelism: equal to one process, or refused in one sentence."""

import pytest
import torch
from tensor_programs import config_of, error, model_of, step, whole

from minillm.comm import launch
from minillm.equivalence import Batch
from minillm.model import Transformer, cross_entropy
from minillm.parallel.pipeline_parallel.stages import ModelPart
from minillm.parallel.tensor_parallel.parallelize import tensor_parallel

PER_HEAD = dict(sliding_window=3, full_attention_layers=(1,), sliding_rope_theta=100.0, rotary_dim=2, qk_norm=True)
PER_HEAD |= dict(attention_scale=0.7, attention_soft_cap=1.5, activation="gelu_tanh", norm_offset=1.0)


def worst_error(group):
    config = config_of(**PER_HEAD)
    batch, alone = Batch.random(config, 3, 8, seed=1), model_of(config)
    loss = cross_entropy(alone(batch.tokens), batch.targets, batch.weights)
    loss.backward()
    model = tensor_parallel(model_of(config), config, group)
    assert abs(step(model, config, group, batch, False) - loss.item()) < 1e-10
    gradients = whole(model, config, group, False)
    return max(error(gradients[name], parameter.grad) for name, parameter in alone.named_parameters())


def test_what_concerns_single_heads_equals_one_process():
    assert max(launch(worst_error, 2)) < 1e-10


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        (dict(logit_soft_cap=30.0), "logit_soft_cap 30.0"),
        (dict(embedding_scale=2.0), "embedding_scale 2.0"),
        (dict(norm_placement="post"), "norm_placement 'post'"),
        (dict(qk_norm=True, qk_norm_over_heads=True), "qk_norm_over_heads True"),
        (dict(output_bias=True), "output_bias True"),
        (dict(mlp_bias=True), "mlp_bias True"),
    ],
)
def test_what_tensor_parallelism_lacks_is_refused(settings, option):
    class Alone:
        name, rank, world_size = "world", 0, 2

    config = config_of(**settings)
    with pytest.raises(ValueError, match=f"tensor parallelism does not cover {option}: run this model without it"):
        tensor_parallel(Transformer(config, device="meta"), config, Alone)


@pytest.mark.parametrize("settings", [dict(logit_soft_cap=30.0), dict(embedding_scale=2.0), dict(norm_offset=1.0)])
def test_what_pipeline_parallelism_lacks_is_refused(settings):
    with pytest.raises(ValueError, match=f"pipeline parallelism does not cover {next(iter(settings))}"):
        ModelPart(config_of(**settings), range(0, 1), first=True, last=False)


def test_other_options_cross_a_cut_between_layers():
    config = config_of(**{**PER_HEAD, "norm_offset": 0.0, "norm_placement": "both", "qkv_bias": True})
    alone = Transformer(config, dtype=torch.float64)
    ends = {"first": True, "last": False}, {"first": False, "last": True}
    parts = [ModelPart(config, range(i, i + 1), **end, dtype=torch.float64) for i, end in enumerate(ends)]
    batch = Batch.random(config, 3, 8, seed=1)
    found = parts[1].loss(parts[1](parts[0](batch.tokens)), batch.targets)
    torch.testing.assert_close(found, alone(batch.tokens, targets=batch.targets))
