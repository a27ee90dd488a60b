"""Loss scaling against torch's GradScaler step by step; master weights; what 16 bits lose."""

import math
import random

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from course.lab02_one_device.experiments import flushed_share, repeated_update
from minillm.measure import memory
from minillm.train import PRECISIONS, LossScaler, MasterWeights

torch_scaler = torch.amp.GradScaler


@pytest.mark.parametrize("seed", range(3))
def test_scaler_is_torchs_step_by_step(seed):
    """Random overflows: the same scale, the same unscaled gradients, the same steps skipped."""
    draw = random.Random(seed)
    ours = LossScaler(scale=2.0**10, interval=3)
    theirs = torch_scaler("cpu", init_scale=2.0**10, growth_interval=3)
    layers = [nn.Linear(5, 3), nn.Linear(5, 3)]
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers]
    skipped = 0
    for _ in range(40):
        x = torch.randn(4, 5)
        overflow = draw.random() < 0.3
        for layer, scale in zip(layers, (ours.scale, theirs.scale), strict=True):
            layer.zero_grad()
            scale(layer(x).square().mean()).backward()
            if overflow:
                layer.weight.grad[0, 0] = draw.choice([float("inf"), float("nan"), -float("inf")])
        ours.unscale_(layers[0].parameters())
        finite = all(bool(p.grad.isfinite().all()) for p in layers[0].parameters())
        theirs.unscale_(optimizers[1])
        if not overflow:
            assert torch.equal(layers[0].weight.grad, layers[1].weight.grad)
        if finite:
            optimizers[0].step()
        theirs.step(optimizers[1])
        ours.update(finite)
        theirs.update()
        assert ours.value == theirs.get_scale() and finite != overflow
        assert ours.good_steps == theirs._growth_tracker.item()
        assert torch.equal(layers[0].weight, layers[1].weight)
        skipped += overflow
    assert 0 < skipped < 40


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_unscaling_many_gradients_is_one_operation():
    """Whether they are finite is not asked for each: the trainer learns it from their norm."""
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(30)]
    for p in parameters:
        p.grad = torch.full((3,), 8.0)
    with Operations() as operations:
        LossScaler(scale=4.0).unscale_(parameters)
    assert operations.names == ["aten::_foreach_mul_.Scalar"]
    assert all(p.grad.tolist() == [2.0] * 3 for p in parameters)


def test_scaler_resumes_and_refuses():
    scaler, other = LossScaler(interval=2), LossScaler(interval=2)
    for finite in (True, False, True):
        scaler.update(finite)
    other.load_state_dict(scaler.state_dict())
    assert (other.value, other.good_steps) == (2.0**15, 1)
    layer = nn.Linear(2, 2).half()
    layer.weight.grad = torch.ones(2, 2).half()
    with pytest.raises(ValueError, match="underflow"):
        scaler.unscale_(layer.parameters())
    with pytest.raises(ValueError, match="backoff 2"):
        LossScaler(backoff=2.0)
    off = LossScaler(enabled=False)
    off.update(False)
    assert off.value == 1.0 and off.unscale_(layer.parameters()) is None and off.scale(layer.weight) is layer.weight


def test_master_weights_follow_a_float32_run():
    """The weights are the rounded weights of an optimizer that only ever sees float32."""
    layer = nn.Linear(8, 8).bfloat16()
    masters = MasterWeights(layer.parameters())
    reference = [nn.Parameter(p.detach().float()) for p in layer.parameters()]
    ours, theirs = (torch.optim.AdamW(p, lr=1e-3) for p in (masters.masters, reference))
    for _ in range(5):
        layer(torch.randn(4, 8).bfloat16()).square().mean().backward()
        for parameter, weight in zip(reference, layer.parameters(), strict=True):
            parameter.grad = weight.grad.float()
        masters.cast_gradients()
        assert all(weight.grad is None for weight in layer.parameters())
        ours.step()
        theirs.step()
        masters.write_weights()
        for weight, parameter in zip(layer.parameters(), reference, strict=True):
            assert torch.equal(weight, parameter.bfloat16())


@pytest.mark.parametrize("precision, weights, optimizer", [("fp32", 4, 8), ("bf16-master", 2, 12), ("bf16-pure", 2, 4)])
def test_bytes_per_parameter(precision, weights, optimizer):
    """16 in float32 and 16 with masters: mixed precision saves no model state."""
    chosen = PRECISIONS[precision]
    layer = nn.Linear(64, 64, bias=False).to(chosen.weights)
    masters = MasterWeights(layer.parameters()) if chosen.master else None
    stepped = masters.masters if masters else list(layer.parameters())
    adam = torch.optim.AdamW(stepped, fused=True)
    count = layer.weight.numel()
    for _ in range(2):
        with memory(layer, adam) as tracker:
            layer(torch.randn(1, 64, dtype=chosen.weights)).sum().backward()
            held = tracker.live
            if masters:
                masters.cast_gradients()
            adam.step()
            if masters:
                masters.write_weights()
            adam.zero_grad()
    counters = 4 * len(stepped)  # Adam's step number, one float per tensor
    found = (held.parameter, held.gradient, held.optimizer - counters)
    assert found == (weights * count, weights * count, optimizer * count)
    assert sum(found) == (16 if optimizer > 4 else 8) * count


def test_bfloat16_weights_stand_still():
    assert repeated_update(torch.bfloat16) == 1.0
    assert repeated_update(torch.float32) == pytest.approx(2.0, abs=1e-3)


def test_float16_flushes_small_gradients_unless_scaled():
    draw = torch.Generator().manual_seed(0)
    values = 10 ** (torch.rand(100_000, generator=draw, dtype=torch.float64) * 10 - 12)  # log-uniform, 1e-12 .. 1e-2
    decades_below = math.log10(2**-25 / 1e-12)  # half of float16's least number rounds to zero
    assert flushed_share(values, torch.float16) == pytest.approx(decades_below / 10, abs=0.01)
    assert flushed_share(values, torch.float16, scale=2.0**16) == 0
    assert flushed_share(values, torch.bfloat16) == 0
