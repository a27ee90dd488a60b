"""The step of every layout: on the CPU they run, and what a profile says of overlap is arithmetic on made-up events."""

import math

import pytest

from minillm.bench import layouts
from minillm.bench.layouts import Measured, hidden_share, rows_of, setting, slowest
from minillm.comm import launch
from minillm.train.parallel_config import ParallelConfig


def kernel(name: str, start: float, end: float) -> dict:
    return {"cat": "kernel", "name": name, "ts": start, "dur": end - start}


def test_the_share_that_is_hidden():
    nccl = "ncclDevKernel_AllGather_RING_LL"
    events = [
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 99},
        kernel(nccl, 10, 20),
        kernel(nccl, 18, 30),  # of another communicator, at the same time: 20 in all
        kernel("gemm", 0, 12),
        kernel("gemm", 15, 16),
        kernel("softmax", 15.5, 17),
        kernel("gemm", 28, 40),
        kernel(nccl, 50, 60),
    ]
    assert hidden_share(events) == pytest.approx((2 + 2 + 2) / 30)
    assert hidden_share([kernel("gemm", 0, 1)]) is None
    assert hidden_share([kernel(nccl, 0, 4), kernel("gemm", 0, 4)]) == 1


def test_a_step_takes_as_long_as_its_slowest_rank():
    one, two = Measured([1.0, 4.0], 8, 2.5, 10, 0.5), Measured([2.0, 3.0], 8, 2.5, 20, 0.25)
    assert slowest([one, two]) == Measured([2.0, 4.0], 8, 2.5, 20, 0.25)
    other = Measured([2.0, 3.0], 8, 2.6, None, None)
    assert math.isnan(slowest([other, two]).loss)  # ranks that disagree on the loss


@pytest.mark.full
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_layout_runs_on_the_cpu(world_size):
    losses = {}
    for name, layout in layouts.LAYOUTS[world_size].items():
        model, seq_len, precision = setting(layout, "cpu")
        found = slowest(launch(layouts.measure, world_size, layout, model, seq_len, precision, 1, device="cpu"))
        assert math.isfinite(found.loss) and found.peak_bytes is None and found.hidden is None
        losses[name] = found.loss
    if world_size == 2:  # the same model and data, cut in other ways
        assert losses["dp"] == pytest.approx(losses["fsdp"], abs=1e-4)
        assert losses["tp, sequence"] == pytest.approx(losses["cp, zigzag"], abs=1e-4)


def test_rows(monkeypatch):
    monkeypatch.setattr(layouts, "machine", lambda: None)
    monkeypatch.setattr(layouts, "peak_flops", lambda *_: 1e12)
    model, seq_len, precision = setting(ParallelConfig(), "cuda")
    measured = Measured([0.5, 1.0, 2.0], 4096, 9.0, 2**30, 0.5)
    speed, memory, hidden = rows_of("dp, 2 ranks, cuda", measured, model, seq_len, precision, 2)
    assert speed.name == "dp, 2 ranks, cuda: 4,096 tokens/s" and speed.theirs == 1.0
    assert speed.ours == pytest.approx(6 * 1.236e9 * 2048 / 1e12, rel=0.15)  # 6 FLOP a parameter and token, attention
    assert memory.ours == 1.0 and memory.theirs is None and hidden.ratio == 0.5
    (_, alone, _) = rows_of("one", measured, model, seq_len, precision, 1)
    assert alone.theirs == pytest.approx(25.18, abs=0.01)  # GiB: 1.03 less than on a CPU, whose norms keep more


def test_ranks_draw_the_same_weights():
    model, _, _ = setting(ParallelConfig(), "cpu")
    drawn = layouts.DrawnOn(layouts.torch.device("cpu"))
    one, same, other = (drawn.draw(model, name, (64, 64), 0) for name in ("a.weight", "a.weight", "b.weight"))
    assert one.equal(same) and not one.equal(other) and one.std().item() == pytest.approx(model.init_std, rel=0.05)
    assert drawn.draw(model, "a_norm.weight", (8,), 0).tolist() == [1] * 8


def test_world_sizes_without_layouts():
    with pytest.raises(ValueError, match=r"world sizes \[3\] have no layouts: choose among 1, 2, 8"):
        layouts.run(world_sizes=(3,))
