"""Which device a rank computes on, and by which backend its messages go: decided once, by all ranks alike.

    launch(device=)     "cpu"    CPU, gloo
                        "cuda"   a GPU of its own for each rank: NCCL; fewer GPUs than ranks: they share, and use gloo
                        None     a GPU of its own for each rank: NCCL; fewer GPUs than ranks: CPU, gloo

Whether every rank has a GPU of its own does not follow from counting visible devices: with `srun --gpus-per-task=1`,
or a container for each GPU, every process sees one device, and each a different one. So each rank tells the others the
identity (UUID) of the GPU that it would take, and the slot that it is in: instances of one GPU (MIG) have UUIDs of
their own, but NCCL takes one rank per slot. Nobody can pace the messages of NCCL, so emulated links use gloo.

From 2.30 NCCL lets ranks share a GPU where NCCL_MULTI_RANK_GPU_ENABLE=1 says so: slow, for they take turns on it, but
it proves on one GPU what will run on eight.
"""

import ctypes
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # one for each machine, containers and all

SHARING_NCCL = (2, 30)  # the first version whose ranks may share a GPU

Decision = tuple[torch.device, str]  # device, "nccl" or "gloo"


def candidate(wanted: str | None) -> torch.device:
    """The device that this rank would take. ValueError: a GPU is asked for by name, and there is none."""
    gpus = torch.cuda.device_count() if wanted != "cpu" else 0
    if wanted == "cuda" and not gpus:
        raise ValueError("device='cuda' but torch finds no GPU: leave device out to run on the CPU")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % gpus) if gpus else torch.device("cpu")


def agree(store: dist.Store, rank: int, world_size: int, wanted: str | None, emulated: bool) -> Decision:
    """This rank's device, and the backend of all ranks, each of which calls it. Under torchrun rank 0 says why NCCL is
    not used where there are GPUs."""
    if wanted == "cpu":
        return torch.device("cpu"), "gloo"
    mine = candidate(wanted)
    store.set(f"gpu of {rank}", _identity(mine))
    told = store.multi_get([f"gpu of {other}" for other in range(world_size)])
    identities = [gpu.decode().split(" ") for gpu in told if gpu]
    gpus, slots, shares = zip(*identities, strict=True) if identities else ((), (), ())
    has_own = len(gpus) == world_size and ("no" not in shares or world_size == len(set(gpus)) == len(set(slots)))
    if has_own and not emulated and dist.is_nccl_available():
        return mine, "nccl"
    if gpus and rank == 0 and "MINILLM_RANK" not in os.environ:
        why = "links are emulated" if emulated else "torch has no NCCL" if has_own else _shortage(slots, world_size)
        where = "on the GPUs" if wanted else "on the CPU"
        print(f"minillm: {why}, so ranks compute {where} and send through gloo.", file=sys.stderr, flush=True)
    return mine if wanted else torch.device("cpu"), "gloo"


def may_share() -> bool:
    """Whether NCCL takes several ranks on one GPU here."""
    wanted = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return wanted and dist.is_nccl_available() and nccl_version() >= SHARING_NCCL


def nccl_version() -> tuple[int, int]:
    """Of the library that is loaded, in whose place LD_PRELOAD may have put another: torch.cuda.nccl.version() names
    the one that torch was built with, which stands here only where torch holds it itself."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except OSError:
        return torch.cuda.nccl.version()[:2]
    return number.value // 10_000, number.value // 100 % 100


def _identity(device: torch.device) -> str:
    """Which GPU of all machines it is, its slot, and whether its rank may share it; "" for none. A torch that tells no
    slots: the first twice."""
    if device.type != "cuda":
        return ""
    properties, shares = torch.cuda.get_device_properties(device), "yes" if may_share() else "no"
    if not hasattr(properties, "pci_bus_id"):
        return f"{properties.uuid} {properties.uuid} {shares}"
    machine = BOOT_ID.read_text().strip() if BOOT_ID.exists() else platform.node()
    slot = f"{properties.pci_domain_id}:{properties.pci_bus_id}:{properties.pci_device_id}"
    return f"{properties.uuid} {machine}:{slot} {shares}"


def _shortage(slots: Sequence[str], world_size: int) -> str:
    return (
        f"{world_size} ranks see {len(set(slots))} different GPUs (start as many ranks as GPUs, or show each its own)"
    )
