"""What benches count of a contestant's step beside its time: bytes that are sent and bytes that are held."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from minillm.comm import Group
from minillm.measure import memory, wire


def settling(device: torch.device) -> Callable[[], Any]:
    """For `seconds_per_call(after=...)`: returns when the device has done what is queued."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def sent_in(step: Callable[[], Any], group: Group, steps: int = 3) -> float:
    """Bytes that all ranks send in a step: the least of several, as others on the machine can only add. 0 on a GPU."""
    found = []
    for _ in range(steps):
        group.barrier()
        with wire() if group.device.type == "cpu" else nullcontext() as counted:
            group.barrier()
            step()
            group.barrier()
        found.append(float(counted.sent) if counted else 0.0)
    return min(found)


def peak_in(step: Callable[[], Any], module: nn.Module | None = None, optimizer: object = None) -> float:
    """The most bytes that this rank holds in a step. module, optimizer: as of `memory`."""
    with memory(module, optimizer) as seen:
        step()
    return float(seen.peak.total)
