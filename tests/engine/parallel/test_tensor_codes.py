"""NF4 codes that are cut over ranks: each rank's weights are its part of the whole layer's, to the bit."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from minillm.model import ModelConfig
from minillm.parallel.sharding.placement import Placement
from minillm.parallel.tensor_parallel.plan import part_of
from minillm.parallel.tensor_parallel.quantized import cut_layer
from minillm.predict.training.adapters import layer_sizes
from minillm.quantize import NF4, QuantizedLinear
from minillm.quantize.formats import DoubleScales

# The gate's 3,840 scales make 15 blocks of 256; of four ranks' parts only the first begins with one.
CONFIG = ModelConfig(37, 192, 1280, 1, 8, 2, head_dim=64, qkv_bias=True)
MLP, ATTENTION = ("gate_proj", "up_proj", "down_proj"), ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", [*MLP, *ATTENTION])
@pytest.mark.parametrize("format", [NF4(), NF4(double=False), NF4(32)], ids=str)
def test_parts_of_codes_stand_for_parts_of_the_weights(name, ranks, format):
    torch.manual_seed(0)
    outputs, inputs = layer_sizes(CONFIG)[name]
    whole_name = f"blocks.0.{'mlp' if name in MLP else 'attention'}.{name}"
    linear = nn.Linear(inputs, outputs, bias=name in ATTENTION[:3])
    nn.init.normal_(linear.weight[: outputs // 3], std=30)  # blocks of scales that differ
    whole = QuantizedLinear.of(linear, format)
    for rank in range(ranks):
        part = part_of(CONFIG, f"{whole_name}.weight", rank, ranks)
        cut = cut_layer(whole_name, whole, CONFIG, SimpleNamespace(rank=rank, world_size=ranks))
        assert torch.equal(cut.weight, Placement(whole.weight.shape, (part,)).cut(whole.weight)), rank
        if linear.bias is not None:
            assert torch.equal(cut.bias, Placement(linear.bias.shape, (part,)).cut(linear.bias))
        numel = cut.weight.numel()
        assert cut.codes.nbytes == numel / 2 and cut.scale.numel() == numel / format.group
        if format.double:
            assert cut.scale_largest.nbytes == 4 * -(-outputs * inputs // format.group // DoubleScales.BLOCK)


def test_rows_that_ranks_would_share_are_refused():
    layer = QuantizedLinear.of(nn.Linear(192, 64, bias=False), NF4())
    config = ModelConfig(37, 64, 192, 1, 2, 2)
    with pytest.raises(ValueError, match="192 inputs in groups of 64, which do not divide over 2 ranks"):
        cut_layer("blocks.0.mlp.down_proj", layer, config, SimpleNamespace(rank=0, world_size=2))
