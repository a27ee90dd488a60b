"""Where a shard's state lives: what moves, what is counted, what is on the disk and that nothing is left there."""

import pytest
import torch

from minillm.measure import memory
from minillm.parallel.sharding.offload import Offload


def test_here_nothing_moves_and_nothing_is_counted():
    home, x = Offload(None, "cpu"), torch.arange(4.0)
    own = home.place("x", x, torch.float64)
    assert own.dtype == torch.float64 and torch.equal(own, x.double()) and home.down(x) is x
    home.up(own + 1, x)
    assert torch.equal(x, torch.arange(1.0, 5.0))
    assert (home.down_bytes, home.up_bytes, home.file_bytes, home.active) == (0, 0, 0, False)


@pytest.mark.parametrize("to_file", [False, True])
def test_gradients_come_down_and_weights_go_up_in_their_own_dtype(to_file, tmp_path):
    home = Offload(tmp_path / "nvme" if to_file else "cpu", "cpu")
    weights = torch.randn(6).bfloat16()
    master = home.place("weights", weights, torch.float32)
    master += 1
    assert home.active and not torch.equal(master, weights.float()), "a copy, even if host and device are one"
    assert torch.equal(home.down(weights), weights) and home.down(weights).data_ptr() != weights.data_ptr()
    home.up(master, weights)
    assert torch.equal(weights, master.bfloat16())
    assert (home.down_bytes, home.up_bytes) == (2 * 12, 12)
    assert home.file_bytes == (24 if to_file else 0)


def test_state_lies_in_files_that_cannot_be_left_behind(tmp_path):
    home = Offload(tmp_path, "cpu")
    weights = torch.nn.Parameter(home.place("w", torch.ones(1000)))
    plain = torch.nn.Parameter(torch.ones(1000))
    optimizers = [torch.optim.AdamW([parameter], lr=0.1) for parameter in (weights, plain)]
    for step in range(3):
        for parameter, optimizer in zip((weights, plain), optimizers, strict=True):
            parameter.grad = torch.linspace(-1, 1, 1000) * (step + 1)
            optimizer.step()
        home.keep(optimizers[0])
    assert torch.equal(weights, plain), "stepped in the files, same bits"
    optimizers[0].load_state_dict(optimizers[1].state_dict())  # fresh tensors in memory, into the same files again
    home.keep(optimizers[0])
    assert home.file_bytes == 3 * 4000
    assert not any(tmp_path.iterdir()), "a file without a name cannot be left behind"
    weights.grad = None
    assert memory(None, optimizers[0]).live.total < 100, "what a file holds is not memory"


def test_bad_places(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"offload='nvme' must be None, 'cpu' or the pathlib.Path"):
        Offload("nvme", "cpu")
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"offload='.*file/below' cannot take 1 bytes .*: name a folder on a local disk"
    ):
        Offload(tmp_path / "file" / "below", "cpu")
    home = Offload(tmp_path, "cpu")
    home.place("none", torch.empty(0))

    def full(descriptor, offset, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full, raising=False)
    with pytest.raises(ValueError, match=r"cannot take 4,000 bytes \(No space left on device\)"):
        home.place("w", torch.ones(1000))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_s_host_memory_is_pinned():
    home, x = Offload("cpu", "cuda"), torch.randn(5, device="cuda")
    here = home.down(x)
    assert here.is_pinned() and home.place("x", x, torch.float64).is_pinned()
    home.up(here * 2, x)
    assert torch.equal(x.cpu(), here * 2)
