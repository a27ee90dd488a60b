"""Packing, and the memory in which gradients live."""

import math

import torch
import torch.distributed as dist
from torch import nn

from minillm.comm import launch
from minillm.measure import ledger
from minillm.parallel import BucketedDDP, NaiveDDP
from minillm.parallel.data_parallel.packing import Bucket, assign
from minillm.predict.training import sharding as predict

KB = 1 / 1024  # in MiB


def error(got, expected):
    return ((got - expected).norm() / expected.norm()).item()


def test_packing():
    layers = [nn.Linear(4, 4, bias=False) for _ in range(5)]  # 64 bytes each
    named = [(f"p{i}", layer.weight) for i, layer in enumerate(layers)]
    names = lambda buckets: [b.names for b in buckets]  # noqa: E731
    assert names(assign(named, 64)) == [["p4"], ["p3"], ["p2"], ["p1"], ["p0"]]
    assert names(assign(named, 65)) == [["p4", "p3"], ["p2", "p1"], ["p0"]]
    assert names(assign(named, 128, 1)) == [["p4"], ["p3", "p2"], ["p1", "p0"]]
    assert names(assign(named, math.inf)) == [["p4", "p3", "p2", "p1", "p0"]]
    assert predict.bucket_sizes([64] * 5, 65) == [128, 128, 64] and predict.bucket_sizes([64] * 5, 128, 1)[0] == 64
    for caps, limits in (((65,), [65]), ((200, 60), [60, 200]), ((100, 128), [128, 100])):
        theirs, _ = dist._compute_bucket_assignment_by_size([p for _, p in reversed(named)], limits)
        assert [[4 - i for i in b] for b in theirs] == [[int(n[1]) for n in b.names] for b in assign(named, *caps)]
    (bucket,) = assign([("a", nn.Parameter(torch.randn(3))), ("b", nn.Parameter(torch.randn(2, 2)))], 1e6, None, 4)
    assert isinstance(bucket, Bucket) and bucket.offsets == [0, 4] and (bucket.numel, bucket.padded) == (7, 8)
    flat = torch.arange(8.0)
    assert [v.tolist() for v in bucket.views(flat)] == [[[0, 1], [2, 3]], [4, 5, 6]]
    assert bucket.views(torch.zeros(10)[2:])[0].storage_offset() == 2
    padded = bucket.empty()
    assert padded.shape == (8,) and padded[7] == 0
    mixed = [("a", nn.Parameter(torch.zeros(8))), ("b", nn.Parameter(torch.zeros(8).double())), named[0]]
    assert names(assign(mixed, 65)) == [["p0", "a"], ["b"]]


def gradients_in_place(group):
    """What becomes of views when gradients are dropped, replaced, accumulated or kept."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    module = BucketedDDP(model, group, bucket_cap_mb=0.1 * KB)
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(group.rank))
    expected = [g.clone() for g in torch.autograd.grad(model(x).square().mean(), list(model.parameters()))]
    expected = [group.all_reduce(g, "avg") for g in expected]

    def check(times, what):
        for p, g in zip(model.parameters(), expected, strict=True):
            index, place = module.reducer._place[p]
            assert error(p.grad, times * g) < 1e-12, what
            if what != "first":
                view = module.reducer.buckets[index].views(module.reducer._flats[index])[place]
                assert p.grad.data_ptr() == view.data_ptr(), what

    def backward():
        module(x).square().mean().backward()

    backward()
    check(1, "first")  # packed anew after it: gradients move with the next backward
    backward()
    check(2, "accumulated twice, synchronised each time, without zero_grad")
    module.zero_grad(set_to_none=True)
    backward()
    check(1, "dropped")
    module.zero_grad(set_to_none=False)
    backward()
    check(1, "zeroed")
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    backward()
    check(1, "replaced")
    module.zero_grad()
    with module.no_sync():
        backward()
    held = [p.grad.data_ptr() for p in model.parameters()]
    backward()
    check(2, "accumulated")
    assert held == [p.grad.data_ptr() for p in model.parameters()]
    with ledger() as led, torch.no_grad():
        module(x)
        module.finish()
    assert not led.events
    again = NaiveDDP(model, group)  # takes the place of the first
    again.zero_grad()
    with ledger() as led:
        again(x).square().mean().backward()
    assert led.calls["all_reduce"] == 4 and not module.reducer._seen
    assert all(error(p.grad, g) < 1e-12 for p, g in zip(model.parameters(), expected, strict=True))
    module.reducer.close()
    assert model[0].weight._post_accumulate_grad_hooks
    again.reducer.close()
    with ledger() as led:
        model(x).sum().backward()
    assert not led.events


def packed_again(group):
    """A model whose layers are registered in another order than they are used in."""
    turned = nn.ModuleDict({"last": nn.Linear(4, 2), "first": nn.Linear(3, 4)})
    turned.forward = lambda x: turned["last"](turned["first"](x))
    module = BucketedDDP(turned, group, bucket_cap_mb=1e-6)  # one for each
    before = [b.names[0].split(".")[0] for b in module.reducer.buckets]
    module(torch.ones(1, 3)).sum().backward()
    assert before == ["first", "first", "last", "last"]
    assert [b.names[0].split(".")[0] for b in module.reducer.buckets] == ["last", "last", "first", "first"]


def memory_and_order(group):
    gradients_in_place(group)
    packed_again(group)


def test_gradients_stay_in_their_buckets_which_follow_the_order_of_backward():
    launch(memory_and_order, 2)
