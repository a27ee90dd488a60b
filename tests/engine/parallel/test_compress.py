"""Compression hooks: bytes exact by closed form, the same bits on every rank, and error feedback that pays back."""

import math

import pytest
import torch
from torch import nn

from minillm.comm import launch
from minillm.measure import ledger
from minillm.parallel import BucketedDDP
from minillm.parallel.data_parallel.compression import bf16, fp16, int8_error_feedback, power_sgd, top_k
from minillm.parallel.data_parallel.packing import assign
from minillm.predict.training import sharding as predict

KB = 1 / 1024
SHARE = 0.02
HOOKS = {
    "none": None,
    "bf16": bf16,
    "fp16": fp16,
    "int8": int8_error_feedback,
    "top_k": top_k(SHARE),
    "top_k without feedback": top_k(SHARE, error_feedback=False),
    "power_sgd": power_sgd(1),
    "power_sgd without feedback": power_sgd(1, error_feedback=False),
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 30), nn.Tanh(), nn.Linear(30, 14), nn.Tanh(), nn.Linear(14, 4))


def problem(rank):
    """Inputs and what a teacher says about them; each rank has its own."""
    torch.manual_seed(100)
    teacher = network()
    for p in teacher.parameters():
        nn.init.normal_(p, std=0.5)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(rank))
    return x, teacher(x).detach()


def expected_cost(name, buckets, world_size):
    elements = [b.numel for b in buckets]
    shapes = [[tuple(p.shape) for p in b.parameters] for b in buckets]
    if name == "none":
        return predict.all_reduce(elements, 4, world_size)
    if name in ("bf16", "fp16"):
        return predict.all_reduce([b.padded for b in buckets], 2, world_size)
    if name == "int8":
        return predict.int8(elements, world_size)
    if name.startswith("top_k"):
        return predict.top_k(elements, SHARE, 4, world_size)
    return predict.power_sgd(shapes, 1, 4, world_size)


def curves(group, steps):
    """Per hook: loss of the group before every step; bytes and calls of the last one; whether replicas are equal."""
    torch.set_num_threads(1)
    x, y = problem(group.rank)
    found = {}
    for name, hook in HOOKS.items():
        model = BucketedDDP(network(), group, bucket_cap_mb=2 * KB, first_bucket_mb=0.5 * KB, hook=hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            with ledger() as led:
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        same = len(set(group.gather_objects(weights.numpy().tobytes()))) == 1
        mean = [sum(pair) / group.world_size for pair in zip(*group.gather_objects(losses), strict=True)]
        buckets = model.reducer.buckets
        cost = expected_cost(name, buckets, group.world_size).sent_per_rank[group.rank]
        found[name] = (mean, led.bytes(), cost, led.calls["all_reduce"] == len(buckets) > 1, same)
    return found


def test_bytes_are_exact_and_error_feedback_restores_the_loss_curve():
    for found in launch(curves, 2, 32):
        for name, (_, num_bytes, cost, calls_fit, same) in found.items():
            assert num_bytes == cost and calls_fit and same, name
        plain = found["none"][1]
        assert found["bf16"][1] == found["fp16"][1] == plain / 2
        assert found["int8"][1] < 0.27 * plain and found["top_k"][1] < 0.05 * plain
        assert found["power_sgd"][1] < 0.3 * plain
        first, last = found["none"][0][0], found["none"][0][-1]
        gained = {name: (first - curve[-1]) / (first - last) for name, (curve, *_) in found.items()}
        for name in ("bf16", "fp16", "int8"):
            assert gained[name] == pytest.approx(1, abs=0.02), (name, gained)
        for name in ("top_k", "power_sgd"):
            assert gained[name] > 0.9 > gained[f"{name} without feedback"], gained


def one_step(group):
    """Each hook on a gradient of which every number is known; overflow; a bucket that does not divide."""
    torch.set_num_threads(1)
    n = group.world_size
    draw = torch.Generator().manual_seed(group.rank)
    named = [
        ("a", nn.Parameter(torch.zeros(6, 5))),
        ("b", nn.Parameter(torch.zeros(5))),
        ("c", nn.Parameter(torch.zeros(()))),
    ]
    mine = torch.randn(36, generator=draw)
    everyone = torch.stack([torch.tensor(g) for g in group.gather_objects(mine.tolist())])
    mean = everyone.mean(0)

    def run(hook, times=1, gradient=mine):
        (bucket,) = assign(named, math.inf, multiple_of=n)
        total = torch.zeros(36)
        for _ in range(times):
            flat = bucket.empty()
            flat[:36] = gradient
            hook(bucket, flat, group)
            assert not bucket.numel < bucket.padded or flat[36:].abs().max() == 0
            total += flat[:36]
        return total / times, bucket

    assert (run(bf16)[0] - mean).abs().max() < 2**-7 * everyone.abs().max()
    assert (run(fp16)[0] - mean).abs().max() < 2**-10 * everyone.abs().max()
    assert (run(int8_error_feedback)[0] - mean).abs().max() <= 1.01 * everyone.abs().max() / 127
    # A debt is paid: over many steps the mean of what arrives is the gradient, to 1/steps of what one step owes.
    for hook in (int8_error_feedback, top_k(0.4), power_sgd(1)):
        once, often = (error := [(run(hook, times)[0] - mean).norm() for times in (1, 24)])
        assert often < once / 5, (hook.__name__, error)
    for hook in (top_k(0.4, error_feedback=False), power_sgd(1, error_feedback=False)):
        once, often = (error := [(run(hook, times)[0] - mean).norm() for times in (1, 24)])
        assert often > once / 2, (hook.__name__, error)

    top = run(top_k(1 / 6))[0]
    expected = torch.zeros(n, 36)
    for row, gradient in zip(expected, everyone, strict=True):
        places = gradient.abs().topk(6).indices
        row[places] = gradient[places]
    assert torch.allclose(top, expected.mean(0))
    assert torch.allclose(run(top_k(1.0))[0], mean, atol=1e-6)

    low = (torch.arange(6.0)[:, None] * torch.arange(1.0, 6)[None]).flatten()  # a matrix of rank 1 arrives whole
    exact, bucket = run(power_sgd(1), gradient=torch.cat([torch.ones(6), low]))
    assert torch.allclose(exact, torch.cat([torch.ones(6), low]), atol=1e-4)
    assert bucket.names == ["c", "b", "a"]

    # What overflows anywhere is seen everywhere, and is not owed for ever.
    bad = mine.clone()
    bad[7] = math.inf if group.rank == 0 else bad[7]
    for hook in (bf16, fp16, int8_error_feedback, top_k(0.1), power_sgd(1)):
        (bucket,) = assign(named, math.inf, multiple_of=n)
        for gradient, finite in ((bad, False), (mine, True), (mine, True)):
            flat = bucket.empty()
            flat[:36] = gradient
            hook(bucket, flat, group)
            assert bool(flat.isfinite().all()) == finite, (hook.__name__, finite)
    return True


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_hook_on_known_numbers(world_size):
    assert all(launch(one_step, world_size))


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="share is 0"):
        top_k(0)
    with pytest.raises(ValueError, match=r"share is 1\.5"):
        top_k(1.5)
    with pytest.raises(ValueError, match="rank is 0"):
        power_sgd(0)
