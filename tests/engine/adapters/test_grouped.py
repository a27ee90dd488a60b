"""Grouped products against one adapter at a time, and their cost against counted runs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from minillm.adapters import LoraConfig, LoraLinear
from minillm.adapters.grouped import NO_ADAPTER, Matrices, Segment, add_updates, segments_of
from minillm.model import ModelConfig
from minillm.predict.training.adapters import Adapters
from tests.engine.serve.recorded import READS_BACK

INPUTS, OUTPUTS = 7, 5


def layers(base: nn.Linear, seed: int, count: int = 16) -> dict[int, LoraLinear]:
    """Adapters of ranks 4 to 64, every second with rsLoRA."""
    draw, made = torch.Generator().manual_seed(seed), {}
    for number in range(count):
        config = LoraConfig(4 + 4 * number, alpha=3.0 + number, rslora=number % 2 == 1)
        layer = made[number] = LoraLinear(base, config, torch.float64, torch.device("cpu"))
        for matrix in (layer.lora_A, layer.lora_B):
            matrix.data = torch.randn(matrix.shape, generator=draw, dtype=torch.float64)
    return made


def matrices_of(adapters: dict[int, LoraLinear]) -> dict[int, Matrices]:
    return {number: Matrices(layer.lora_A, layer.lora_B, layer.scale) for number, layer in adapters.items()}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(NO_ADAPTER, 15), st.integers(1, 4)), min_size=1, max_size=12), st.booleans())
@torch.no_grad()
def test_every_token_gets_its_own_adapter(sequences, is_sorted):
    sequences = sorted(sequences) if is_sorted else sequences
    base = nn.Linear(INPUTS, OUTPUTS, dtype=torch.float64)
    adapters = layers(base, 1)
    numbers, counts = zip(*sequences, strict=True)
    of_token = np.repeat(numbers, counts)
    x = torch.randn(1, len(of_token), INPUTS, dtype=torch.float64)
    expected = [base(row) if n == NO_ADAPTER else adapters[n](row) for n, row in zip(of_token, x[0], strict=True)]
    segments = segments_of(numbers, counts)
    y = add_updates(base(x), x, segments, matrices_of(adapters))
    torch.testing.assert_close(y[0], torch.stack(expected), rtol=1e-10, atol=1e-10)
    assert sum(end - start for _, start, end in segments) == (of_token != NO_ADAPTER).sum()
    if is_sorted:
        assert len(segments) == len({number for number in numbers if number != NO_ADAPTER})


def test_segments():
    assert segments_of([]) == []
    assert segments_of([NO_ADAPTER, NO_ADAPTER]) == []
    assert segments_of([2, 2, NO_ADAPTER, 0], [3, 1, 2, 1]) == [Segment(2, 0, 4), Segment(0, 6, 7)]


@torch.no_grad()
def test_layers_without_an_adapter_stay():
    y = torch.zeros(4, OUTPUTS)
    matrices = {0: Matrices(torch.ones(2, INPUTS), torch.ones(OUTPUTS, 2), 0.5)}
    add_updates(y, torch.ones(4, INPUTS), segments_of([0, 0, 1, NO_ADAPTER]), matrices)
    assert y[:2].eq(INPUTS).all() and y[2:].eq(0).all()


@torch.no_grad()
def test_outputs_may_be_parts_of_a_joined_product():
    whole = torch.zeros(1, 3, 2 * OUTPUTS)
    left, right = whole.split(OUTPUTS, dim=-1)
    matrices = {0: Matrices(torch.ones(2, INPUTS), torch.ones(OUTPUTS, 2), 0.5)}
    add_updates(right, torch.ones(1, 3, INPUTS), segments_of([NO_ADAPTER, 0, 0]), matrices)
    assert left.eq(0).all() and whole[0, 1:, OUTPUTS:].eq(INPUTS).all()


class Products(TorchDispatchMode):
    """Counts matrix products. What reads a tensor back would make the host wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.name().split(".")[0] not in READS_BACK
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tokens", [(1, 1, 1), (5, 2, 9)])
def test_cost_of_a_batch(tokens):
    shape = ModelConfig(37, 12, 20, 2, 4, 2, head_dim=4, max_seq_len=64)
    choices = (4, ("q_proj",)), (16, ("q_proj", "v_proj")), (64, ("v_proj",))
    batch = [Adapters(shape, rank, names) for rank, names in choices]
    sizes, flops, products = {"q_proj": (16, 12), "v_proj": (8, 12)}, 0, 0
    segments = segments_of(range(3), tokens)
    for name, (out, inputs) in sizes.items():
        here = {number: each.rank for number, each in enumerate(batch) if name in each.layers}
        here = {n: Matrices(torch.ones(rank, inputs), torch.ones(out, rank), 1.0) for n, rank in here.items()}
        x, y = torch.ones(sum(tokens), inputs), torch.zeros(sum(tokens), out)
        with torch.no_grad(), FlopCounterMode(display=False) as counted, Products() as made:
            add_updates(y, x, segments, here)
        flops, products = flops + 2 * counted.get_total_flops(), products + 2 * made.count  # two blocks
    assert flops == sum(2 * count * each.parameters for each, count in zip(batch, tokens, strict=True))
    assert products == sum(2 * shape.num_layers * len(each.layers) for each in batch)  # A and B of each layer
