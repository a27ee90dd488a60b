"""What all groups of one rank share: its device, its flight recorder, its timeout, emulated links."""

import datetime
import os
import platform
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from minillm.comm.diagnostics.flight_recorder import RUNNING, FlightRecorder
from minillm.comm.emulation import Egress

TORCH_TIMEOUT_S = 1800.0  # torch's own default


class Releases(Protocol):
    def release(self) -> None: ...


class World:
    """rank: this process's global rank; local_ranks: those on this machine; wait_s: the longest wait, in seconds.

    egress: emulated links, None without.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        recorder: FlightRecorder,
        local_ranks: Iterable[int],
        wait_s: float,
        egress: Egress | None = None,
    ) -> None:
        self.rank, self.device, self.recorder, self.egress = rank, device, recorder, egress
        self.local_ranks, self.timeout = frozenset(local_ranks), datetime.timedelta(seconds=wait_s)
        self.groups = 0
        self.kept: list[Releases] = []  # groups and meshes: other ranks may still need connections of dropped ones

    def next_ordinal(self) -> int:
        """The next group's number. Ranks create groups in the same order, so a number is the same group on all."""
        self.groups += 1
        return 2 * self.groups  # even: collectives; the odd number after it: point-to-point messages

    def close(self) -> None:
        """Let go of torch's process groups, ending their threads, even if a `Group` is still referenced: a thread of
        gloo that frees a tensor while Python shuts down would end the process ("terminate called ...")."""
        for each in self.kept:
            each.release()


def world_around(
    process_group: dist.ProcessGroup | None, device: torch.device | str | None, wait_s: float
) -> tuple[World, dist.ProcessGroup]:
    """The arguments of `Group.from_process_group` -> the world of its ranks, and torch's process group."""
    if not dist.is_initialized():
        raise ValueError("no process group yet: call torch.distributed.init_process_group() or Accelerator() first")
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"rank {dist.get_rank()} is not in the process group: only its members make a Group of it")
    process_group = process_group or dist.group.WORLD
    gpus = torch.cuda.is_available() and "cuda" in backends(process_group)
    device = torch.device(device if device is not None else "cuda" if gpus else "cpu")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return joined_world(process_group, device, wait_s), process_group


def joined_world(
    process_group: dist.ProcessGroup, device: torch.device, wait_s: float, egress: Egress | None = None
) -> World:
    """The world of ranks that somebody else has started. They agree on who shares a machine and on a flight recorder.

    Every rank of the process group calls it. The recorder's file is unlinked once all have opened it, so nothing is
    left behind.
    """
    rank, ranks = dist.get_rank(), dist.get_process_group_ranks(process_group)
    machine = (platform.node(), tempfile.gettempdir())
    machines = _all_gather_object(machine, process_group)
    local_ranks = [other for other, where in zip(ranks, machines, strict=True) if where == machine]
    made = rank == local_ranks[0]
    if made:
        file, name = tempfile.mkstemp(prefix="minillm-", suffix=".recorder")
        os.close(file)
        recorder = FlightRecorder(name, local_ranks)
    names = dict(zip(ranks, _all_gather_object(name if made else "", process_group), strict=True))
    if not made:
        recorder = FlightRecorder(names[local_ranks[0]], local_ranks)
    _all_gather_object(None, process_group)  # all have opened it
    if made:
        Path(name).unlink(missing_ok=True)
    recorder.set_state(rank, RUNNING)
    return World(rank, device, recorder, local_ranks, wait_s, egress)


def backends(process_group: dist.ProcessGroup) -> dict[str, str]:
    """Device type -> backend, for example {"cpu": "gloo", "cuda": "nccl"}."""
    return dict(pair.split(":") for pair in dist.get_backend_config(process_group).split(","))


def backend_name(process_group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that moves tensors on `device`."""
    names = backends(process_group)
    if device.type not in names:
        raise ValueError(f"the process group serves {', '.join(names)}, not {device}: pass device= or another backend")
    return names[device.type]


def _all_gather_object(value: Any, process_group: dist.ProcessGroup) -> list[Any]:
    values: list[Any] = [None] * process_group.size()
    dist.all_gather_object(values, value, process_group)
    return values
