"""The tracker against sizes worked out by hand. Everything is exact: bytes, not percentages."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from minillm.measure import memory
from minillm.measure.memory_tracker import KINDS

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda])]


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return request.param


def mlp(device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device, dtype)


PARAMETERS, TENSORS = 64 * 128 + 128 + 128 * 10 + 10, 4


@pytest.mark.parametrize("dtype, width", [(torch.float32, 4), (torch.bfloat16, 2)])
def test_a_training_step_by_hand(device, dtype, width):
    model = mlp(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(32, 64, device=device, dtype=dtype)
    with memory(model, optimizer) as tracker:
        assert dict(tracker.live) == dict.fromkeys(KINDS, 0) | {"parameter": PARAMETERS * width}
        loss = model(x).sum()
        # Saved for the backward pass: the first layer's input, and ReLU's output, which is also the second's input.
        assert tracker.live.activation == (32 * 64 + 32 * 128) * width
        loss.backward()
        assert tracker.live.gradient == PARAMETERS * width
        assert tracker.live.activation == 32 * 64 * width  # x is still held by us
        optimizer.step()
    live = tracker.live
    assert live.parameter == live.gradient == PARAMETERS * width
    assert live.optimizer == 2 * PARAMETERS * width + 4 * TENSORS  # Adam's `step` is one fp32 number per tensor
    assert live.total == sum(live[kind] for kind in KINDS)
    assert tracker.at_peak.total == tracker.peak.total >= live.total
    assert all(tracker.peak[kind] >= max(live[kind], tracker.at_peak[kind]) for kind in KINDS)


def test_sixteen_bytes_per_parameter_two_ways():
    """fp32 AdamW: 4 + 4 + 8. Mixed precision with master weights: 2 + 2 + (4 + 4 + 4)."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert memory(model, optimizer).live.total == 16 * PARAMETERS + 4 * TENSORS

    model = mlp(dtype=torch.bfloat16)
    masters = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters)
    for p, master in zip(model.parameters(), masters, strict=True):
        p.grad, master.grad = torch.zeros_like(p), torch.zeros_like(master)
    optimizer.step()
    for master in masters:
        master.grad = None
    live = memory(model, optimizer).live
    assert (live.parameter, live.gradient) == (2 * PARAMETERS, 2 * PARAMETERS)
    assert live.optimizer == 12 * PARAMETERS + 4 * TENSORS


def test_peak_of_inference_is_input_and_output_of_one_layer(device):
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)]).to(device)
    x = torch.randn(100, 256, device=device)
    with torch.no_grad(), memory(model) as tracker:
        model(x)
    row = 100 * 256 * 4
    # x, one layer's input and its output; from the third layer on the first intermediate is gone.
    assert tracker.peak.total == 4 * 256 * 256 * 4 + 3 * row
    assert tracker.peak.activation == 0
    assert tracker.live.other == row  # x


def test_activations_pile_up_and_recomputation_does_without():
    layers, row = 6, 50 * 32 * 4
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()) for _ in range(6))

    def forward(x, recompute):
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return x

    def step(recompute):
        blocks.zero_grad()
        x = torch.randn(50, 32, requires_grad=True)
        with memory(blocks) as tracker:
            y = forward(x, recompute)
            held = tracker.live.activation
            y.sum().backward()
        return held, tracker.peak, [p.grad.clone() for p in blocks.parameters()]

    torch.manual_seed(1)
    held, peak, gradients = step(recompute=False)
    assert held == row * (1 + 2 * layers)  # the input, and every Tanh's output
    torch.manual_seed(1)
    held_less, peak_less, same = step(recompute=True)
    assert held_less == row * layers  # the input of every block
    assert row * layers < peak_less.activation < peak.activation  # one block at a time comes back
    assert peak_less.total < peak.total
    assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))


def test_each_storage_counts_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, 8)
            self.head = nn.Linear(8, 50, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("table", torch.zeros(7))
            self.register_buffer("view", self.table[2:])

    model = Tied()
    live = memory(model).live
    assert (live.parameter, live.buffer, live.total) == (50 * 8 * 4, 7 * 4, 50 * 8 * 4 + 7 * 4)

    flat = torch.zeros(1000)  # parameters and gradients as views of flat buffers, as ZeRO and DDP keep them
    model = nn.Linear(10, 10)
    model.weight.data, model.bias.data = flat[:100].view(10, 10), flat[100:110]
    assert memory(model).live.parameter == 4000


def test_views_in_place_and_freeing():
    with memory() as tracker:
        a = torch.zeros(1000)
        view = a.view(10, 100)[3:].t()
        a.add_(1).mul_(2)
        assert tracker.live.total == tracker.peak.total == 4000
        del a
        assert tracker.live.total == 4000  # the view holds the storage
        del view
        assert tracker.live.total == 0
        b = torch.zeros(10)
        b.resize_(500)
        assert tracker.live.total == 2000
        b.untyped_storage().resize_(0)  # what FSDP does; no operation is dispatched
        assert tracker.live.total == 0
    assert tracker.peak.total == 4000


def test_peak_per_kind_is_not_the_mix_at_the_peak():
    """The activations are gone when the optimizer's first step fills the memory."""
    model = nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    with memory(model, optimizer) as tracker:
        model(torch.randn(50, 100)).sum().backward()
        optimizer.step()
    assert tracker.peak.activation == 50 * 100 * 4
    assert tracker.at_peak.activation == 0
    assert tracker.at_peak.gradient == tracker.at_peak.parameter == 10100 * 4


def test_gradients_that_are_freed_at_once_are_still_gradients():
    """A hook that drops each gradient as it comes (as ZeRO-2 does) leaves one gradient at a time, not none."""
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(5)])
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with memory(model) as tracker:
        model(torch.randn(8, 64)).sum().backward()
    assert tracker.peak.gradient == 64 * 64 * 4
    assert tracker.live.gradient == 0
    assert not any(len(p._post_accumulate_grad_hooks) > 1 for p in model.parameters())  # ours are gone


def test_accumulated_gradients_cost_once():
    model = mlp()
    with memory(model) as tracker:
        for _ in range(3):
            model(torch.randn(4, 64)).sum().backward()
    assert tracker.peak.gradient == PARAMETERS * 4


def test_without_module_parameters_are_recognised_by_use():
    model = nn.Linear(10, 20)
    with memory() as tracker:
        model(torch.randn(3, 10)).sum()
    assert tracker.at_peak.parameter == (10 * 20 + 20) * 4
    model = nn.Linear(10, 20)
    model.weight.grad = torch.zeros_like(model.weight)
    live = memory(optimizer=torch.optim.SGD(model.parameters())).live
    assert (live.parameter, live.gradient, live.optimizer) == (220 * 4, 200 * 4, 0)


def test_a_home_made_optimizer_and_nested_ones():
    class Mine:
        def __init__(self, parameters):
            self.param_groups = [{"params": list(parameters)}]
            self.inner = torch.optim.SGD(self.param_groups[0]["params"], momentum=0.9)
            self.shards = [{"m": torch.zeros(5), "v": (torch.zeros(6),)}]
            self.itself = self

        def step(self):
            self.inner.step()

    model = nn.Linear(4, 4)
    optimizer = Mine(model.parameters())
    with memory(model, optimizer) as tracker:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    assert tracker.live.optimizer == (5 + 6 + 20) * 4
    assert tracker.peak.optimizer == tracker.live.optimizer


def test_counts_only_the_wanted_device():
    with memory(device="cpu") as here, memory(device="cuda") as there:
        a = torch.zeros(10)
        torch.zeros(10, device="meta")
    assert here.live.total == a.nbytes
    assert there.peak.total == 0


def test_leaves_results_errors_and_garbage_as_they_were(device):
    model = mlp(device)
    x = torch.randn(5, 64, device=device)
    twin = copy.deepcopy(model)
    model(x).square().sum().backward()
    with memory(twin) as tracker:
        twin(x).square().sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert tracker.live.total == tracker.live.parameter + tracker.live.gradient + x.nbytes

    with memory(), pytest.raises(RuntimeError, match="inplace operation"):
        w = torch.randn(3, requires_grad=True)
        y = w * 2
        z = y.square()
        y.add_(1)
        z.sum().backward()

    with pytest.raises(ZeroDivisionError), memory(twin):
        _ = 1 / 0
    gc.collect()
    assert not any(p._post_accumulate_grad_hooks for p in twin.parameters())


def test_prints_and_reads_like_a_dict():
    live = memory(nn.Linear(512, 512, bias=False)).live
    assert dict(live.items())["parameter"] == live["parameter"] == 2**20
    assert "parameter       1.000 MiB" in str(live)
    with pytest.raises(KeyError, match="no kind 'weights'"):
        _ = live["weights"]


@pytest.mark.parametrize(
    "call, names",
    [(lambda: memory([nn.Linear(1, 1)]), "module is a list"), (lambda: memory(None, {}), "optimizer is a dict")],
)
def test_bad_input_is_one_clear_sentence(call, names):
    with pytest.raises(ValueError, match=names):
        call()


@pytest.mark.cuda
def test_peak_agrees_with_the_allocator():
    """Sizes are multiples of 512 bytes, so the allocator's rounding plays no part."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)]).cuda()
    x = torch.randn(1024, 1024, device="cuda")
    model(x).sum().backward()  # the libraries' workspaces
    model.zero_grad()
    before = torch.cuda.memory_allocated() - 5 * 2**22
    torch.cuda.reset_peak_memory_stats()
    with memory(model) as tracker:
        model(x).sum().backward()
    assert tracker.peak.total == pytest.approx(torch.cuda.max_memory_allocated() - before, rel=0.01)
