"""Context parallelism on a GPU: by kernels, in Triton's interpreter; and no layer copies positions to the device."""

from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

from minillm.comm import launch
from minillm.parallel.context_parallel import UlyssesAttention, context_attention
from tests.engine.triton_interpreter import check_in_the_interpreter, needs_triton


@pytest.mark.full
@needs_triton
def test_in_the_interpreter():
    check_in_the_interpreter(Path(__file__).with_name("interpreted_context.py"))


class HostTensors(TorchFunctionMode):
    """Counts tensors that are made of Python numbers or sorted: both once per length, not once per call."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.made += func in (torch.tensor, torch.Tensor.argsort, torch.argsort)
        return func(*args, **(kwargs or {}))


def later_calls(group):
    """By context: (tensors made in the first call, in two more)."""
    found = {}
    for context in ("ring", "zigzag", "ulysses", "gather"):
        attention, counts = context_attention(context, group), []
        q = torch.randn(1, 2, 8, 4, requires_grad=True)
        for _ in range(3):
            with HostTensors() as host:
                at = attention.positions_on(16, q.device)
                attention(q, q, q, positions=at).sum().backward()
                attention.own(attention.whole(q.detach()[:, 0]))
            counts.append(host.made)
        found[context] = counts[0], sum(counts[1:])
    return found


def test_positions_are_copied_once():
    for rank in launch(later_calls, 2):
        for context, (first, later) in rank.items():
            of_tiles = 2 if context == "gather" else 0  # on a CPU they are told positions as numbers, in every call
            assert first > 0 and later == of_tiles, context


def test_a_hybrid_keeps_its_positions_too():
    assert launch(_hybrid, 2)[0] == (16, 0)


def _hybrid(group):
    attention = UlyssesAttention(group, inside=context_attention("zigzag", group.subgroup([0, 1], "across")))
    attention.positions_on(32, "cpu")
    with HostTensors() as host:
        places = attention.positions_on(32, "cpu")
    return 2 * len(places), host.made
