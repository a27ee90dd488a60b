"""Quantization as it goes wrong: six programs that round a layer, three of them with a bug."""

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.quantize import NF4, Format, Int

RIGHT, TENSOR, OUTPUTS, ZERO = VERDICTS = (
    "right", "one scale for the tensor", "groups along the outputs", "zero point off by one",
)  # fmt: skip


def nearest(weight: Tensor, format: Format) -> Tensor:
    """Every weight as its code will be read back."""
    return format.nearest(weight, format.grid(weight))


def sound(weight: Tensor, group: int) -> Tensor:
    """int4 in groups of inputs."""
    return nearest(weight, Int(bits=4, group=group))


def one_scale(weight: Tensor, group: int) -> Tensor:
    """One scale for all weights, whatever the group."""
    return nearest(weight.reshape(1, -1), Int(bits=4)).view_as(weight)


def along_outputs(weight: Tensor, group: int) -> Tensor:
    """Groups of outputs that share a scale, input by input."""
    return sound(weight.T.contiguous(), group).T.contiguous()


def with_zero_point(weight: Tensor, group: int, off: int = 0) -> Tensor:
    """int4 in groups of inputs, turned back with zero points that are `off` too large."""
    format = Int(bits=4, group=group, symmetric=False)
    wide = format.grid(weight).spread(weight.shape[1])
    return format.decode(format.encode(weight, wide), wide._replace(zero=wide.zero + off))


def zero_off_by_one(weight: Tensor, group: int, off: int = 1) -> Tensor:
    """One too large, or with off=-1 too small: AutoGPTQ's first layout stores zero points minus one."""
    return with_zero_point(weight, group, off)


def with_nf4(weight: Tensor, group: int) -> Tensor:
    """16 levels that are not evenly spaced."""
    return nearest(weight, NF4(group=group, double=False))


PROGRAMS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "A": one_scale,
    "B": sound,
    "C": along_outputs,
    "D": with_zero_point,
    "E": zero_off_by_one,
    "F": with_nf4,
}
BUGS = {"A": TENSOR, "B": RIGHT, "C": OUTPUTS, "D": RIGHT, "E": ZERO, "F": RIGHT}


def weights_for(name: str, outputs: int, inputs: int) -> Tensor:
    """Random weights; program B gets three outliers."""
    weight = torch.randn(outputs, inputs) * 0.02
    if name == "B":
        weight.view(-1)[torch.randperm(weight.numel())[:3]] = 1.0
    return weight


def all_programs(
    seed: int = 0, outputs: int = 128, inputs: int = 256, group: int = 64
) -> dict[str, tuple[Tensor, Tensor]]:
    """{program: (weights before, weights after)}, always the same."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        found = {}
        for name, program in PROGRAMS.items():
            weight = weights_for(name, outputs, inputs)
            found[name] = weight, program(weight, group)
        return found
