"""The pretended node by itself, in this process: eight GPUs, right numbers, and every kind of fault is named."""

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.engine.node.counting import Counting, Watch
from tests.engine.node.node import Node, pretend_node
from tests.engine.node.order import Entry, stuck


@pytest.fixture
def node():
    with pretend_node() as node:
        yield node


def test_code_sees_eight_gpus_and_gets_right_numbers(node: Node) -> None:
    assert torch.cuda.is_available() and torch.cuda.device_count() == 8
    torch.cuda.set_device(3)
    layer = torch.nn.Linear(4, 2).cuda()
    x = torch.arange(12.0, device="cuda").view(3, 4)
    assert x.is_cuda and x.device == torch.device("cuda:3") and not torch.ones(1).is_cuda
    layer(x).square().sum().backward()
    assert layer.weight.grad.device == x.device
    expected = 2 * (x.cpu() @ layer.weight.cpu().T + layer.bias.cpu()).T @ x.cpu()
    torch.testing.assert_close(layer.weight.grad.cpu(), expected)
    torch.optim.AdamW(layer.parameters()).step()
    assert torch.cuda.memory_allocated() >= 4 * (2 * 10 + 12)
    with pytest.raises(RuntimeError, match="invalid device ordinal 8, this node has 8"):
        torch.ones(1, device="cuda:8")


def test_nothing_is_left_behind() -> None:
    with pretend_node():
        x = torch.ones(3, device="cuda")
    assert not torch.cuda.is_available() and x.device.type == "cpu" and not x.is_cuda


def test_launches_and_waits_are_counted_without_a_node_too() -> None:
    with Counting(Watch()) as counting:
        x = torch.ones(2, requires_grad=True)
        (x.view(2, 1) * 3).sum().backward()
        x.detach().sum().item()
    assert counting.launches["mul"] == 2 and "view" not in counting.launches
    (wait,) = counting.waits
    assert wait.kind.startswith("the host reads a value") and "test_node.py" in str(wait)


def test_memory_is_counted_and_given_back(node: Node) -> None:
    before = torch.cuda.memory_allocated()
    x = torch.empty(100, device="cuda")
    y = x.view(10, 10)
    assert torch.cuda.memory_allocated() == before + 400
    x.untyped_storage().resize_(0)
    assert torch.cuda.memory_allocated() == before and torch.cuda.max_memory_allocated() >= 400
    x.untyped_storage().resize_(400)
    del x, y
    assert torch.cuda.memory_allocated() == before


def test_a_new_thread_starts_at_gpu_0_and_on_its_default_stream(node: Node) -> None:
    found = []
    with torch.cuda.device(3), torch.cuda.stream(torch.cuda.Stream(3)):
        thread = threading.Thread(
            target=lambda: found.extend((torch.cuda.current_device(), torch.cuda.current_stream()))
        )
        thread.start()
        thread.join()
        assert found == [0, torch.cuda.default_stream(0)] and torch.cuda.current_device() == 3


def test_a_device_behind_its_host_catches_up_in_the_end(node: Node) -> None:
    event = torch.cuda.Event()
    torch.ones(3, device="cuda")
    event.record()
    answers = [event.query() for _ in range(node.lag + 1)]
    assert not any(answers[:-1]) and answers[-1]


def test_a_collective_is_carried_out_when_its_result_is_touched(node: Node) -> None:
    """Until then the host goes on, and another rank may take its time."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda:0"))
    try:
        x = torch.ones(2, device="cuda")
        handle = dist.all_reduce(x, async_op=True)
        handle.wait()
        assert not handle.work._is_filled
        assert (x + 1).tolist() == [2, 2] and handle.work._is_filled
    finally:
        dist.destroy_process_group()


# What a program does wrong, and what is said of it. x: four ones on cuda:0; side: a stream.


def two_streams(x: torch.Tensor, side: torch.cuda.Stream) -> None:
    x.add_(1)
    with torch.cuda.stream(side):
        x.mul(2)


def written_while_read(x: torch.Tensor, side: torch.cuda.Stream) -> None:
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul(2)
    x.zero_()


def freed_while_used(x: torch.Tensor, side: torch.cuda.Stream) -> None:
    y = x + 1
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y.mul(2)
    del y
    x + 1


def read_too_early(x: torch.Tensor, side: torch.cuda.Stream) -> None:
    x.to("cpu", non_blocking=True).sum()


def overwritten(x: torch.Tensor, side: torch.cuda.Stream) -> None:
    host = torch.ones(4).pin_memory()
    x.copy_(host, non_blocking=True)
    host.zero_()


def overwritten_by_numpy(x: torch.Tensor, side: torch.cuda.Stream) -> None:
    host = torch.ones(4).pin_memory()
    x.copy_(host, non_blocking=True)
    host.numpy()[:] = 7
    torch.cuda.current_stream().reach()


WRONG: dict[str, tuple[Callable, str]] = {
    "CPU and GPU": (
        lambda x, _: x + torch.ones(4),
        r"tensors of two devices in add at .*: \[4\] on cuda:0, \[4\] on cpu",
    ),
    "two GPUs": (lambda x, _: x + torch.ones(4, device="cuda:1"), "two devices in add at .*on cuda:1"),
    "written on the CPU": (lambda x, _: torch.ones(4).add_(x), "two devices in add_"),
    "numpy": (lambda x, _: x.numpy(), "can't convert cuda:0 device type tensor to numpy"),
    "item": (lambda x, _: x.sum().item(), "waits for cuda:0: the host reads a value .* at .*test_node.py"),
    "tolist": (lambda x, _: x.tolist(), r"the host reads values \(.tolist\) at .*test_node.py"),
    "print": (lambda x, _: str(x), r"\(.__repr__\)"),
    "bool": (lambda x, _: bool(x.any()), "the host reads a value"),
    "equal": (lambda x, _: torch.equal(x, x.clone()), "waits for cuda:0: equal"),
    "cpu": (lambda x, _: x.cpu(), "blocking copy to the host"),
    "to": (lambda x, _: torch.arange(4).to(x.device), "blocking copy to the device"),
    "copy_": (lambda x, _: x.copy_(torch.ones(4)), "blocking copy to the device"),
    "pageable": (
        lambda x, _: torch.ones(4).cuda(non_blocking=True),
        "pageable memory, which non_blocking does not help",
    ),
    "list": (lambda x, _: torch.tensor([1, 2], device="cuda"), "torch.tensor of the host's values with device=cuda:0"),
    "new_tensor": (lambda x, _: x.new_tensor([1, 2]), "torch.tensor of the host's values with device=cuda:0"),
    "mask that begins anywhere": (
        lambda x, _: F.scaled_dot_product_attention(
            *x.new_zeros(3, 1, 1, 25, 8), attn_mask=x.new_zeros(25, 32)[:, -25:]
        ),
        "misaligned address: _scaled_dot_product.* at .*test_node.py",
    ),
    "nonzero": (lambda x, _: x.nonzero(), "waits for cuda:0: nonzero"),
    "mask": (lambda x, _: x[x > 0], "index with a mask, which needs its nonzero elements"),
    "index of the CPU": (lambda x, _: x[torch.tensor([1, 2])], "index with indices of the CPU"),
    "generator of the CPU": (
        lambda x, _: x.normal_(generator=torch.Generator()),
        "Expected a 'cuda' device type for generator but found 'cpu', in normal_ at .*test_node.py",
    ),
    "drawn on the GPU by the CPU": (
        lambda x, _: torch.randn(4, device="cuda", generator=torch.Generator()),
        "Expected a 'cuda' device type for generator but found 'cpu', in randn",
    ),
    "repeat": (lambda x, _: x.repeat_interleave(x.long()), "repeat_interleave without output_size"),
    "synchronize": (lambda x, _: torch.cuda.synchronize(), "torch.cuda.synchronize"),
    "event": (lambda x, _: torch.cuda.current_stream().record_event().synchronize(), "Event.synchronize"),
    "stream": (lambda x, side: side.synchronize(), "Stream.synchronize"),
    "read on another stream": (
        two_streams,
        "race between streams: mul on side stream .* does not wait for add_ on the def",
    ),
    "written while read": (
        written_while_read,
        "race between streams: zero_ on the default .* writes .* wait for mul on side",
    ),
    "freed while used": (freed_while_used, "memory freed too early: 16 bytes allocated at .* while mul of side stream"),
    "read too early": (read_too_early, "the host touches memory at .* has not reached: wait for an event"),
    "overwritten": (overwritten, "zero_ at .* writes pinned memory that a copy to the device"),
    "overwritten by numpy": (overwritten_by_numpy, "pinned memory changed under its copy to the device"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_fault_is_named(fault: str, node: Node) -> None:
    program, message = WRONG[fault]
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    with pytest.raises((RuntimeError, TypeError), match=message), node.without_waits():
        program(x, side)
    node._copies.clear()


def test_what_is_right_passes(node: Node) -> None:
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    host, after = torch.arange(4.0).pin_memory(), torch.cuda.Event()
    with node.without_waits("test_node.py:listed"):
        on_device = host.to("cuda", non_blocking=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * on_device
        on_device.record_stream(side)
        del on_device
        torch.cuda.current_stream().wait_stream(side)
        y.add_(torch.rand(4, device="cuda", generator=torch.Generator("cuda")).mul_(0))
        back = (y * torch.tensor(2.0)).to("cpu", non_blocking=True)
        after.record()
        assert listed(x) == 4
    assert back.is_pinned()
    after.synchronize()
    assert back.tolist() == [0, 2, 4, 6]


def listed(x: torch.Tensor) -> float:
    return x.sum().item()


# The order of launches.


def entries(rank: int, *launched: str) -> list[Entry]:
    """ "a" is a collective of ranks 0 and 1 on communicator a, "a>1" a message to rank 1 on it."""
    found = []
    for text in launched:
        name, sends, recvs = (
            text[0],
            [int(each) for each in text[2:] if ">" in text],
            [int(text[2:])] if "<" in text else [],
        )
        found.append(Entry(name, (0, 1), f"op of {name}", f"line {len(found)}", sends, recvs))
    return found


@pytest.mark.parametrize(
    ("first", "second"),
    [(["a", "b"], ["a", "b"]), (["a>1", "b", "a<1"], ["a<0", "b", "a>0"]), (["a"], ["a"]), ([], [])],
)
def test_one_order_on_all_ranks(first: list[str], second: list[str]) -> None:
    assert stuck({0: entries(0, *first), 1: entries(1, *second)}) == ""


@pytest.mark.parametrize("first, second", [(["a", "b"], ["b", "a"]), (["a>1", "b"], ["b", "a<0"]), (["a", "a"], ["a"])])
def test_another_order_on_one_rank(first: list[str], second: list[str]) -> None:
    text = stuck({0: entries(0, *first), 1: entries(1, *second)})
    assert "another order" in text and "rank 0" in text and "line" in text
