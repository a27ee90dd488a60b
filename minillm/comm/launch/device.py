"""Which device a rank computes on, and by which backend its messages go: decided once, by all ranks alike.

    launch(device=)     "cpu"    CPU, gloo
                        "cuda"   a GPU of its own for each rank: NCCL; fewer GPUs than ranks: they share, and use gloo
                        None     a GPU of its own for each rank: NCCL; fewer GPUs than ranks: CPU, gloo

Whether every rank has a GPU of its own does not follow from counting visible devices: with `srun --gpus-per-task=1`,
or a container for each GPU, every process sees one device, and each a different one. So each rank tells the others the
identity (UUID) of the GPU that it would take. Nobody can pace the messages of NCCL, so emulated links use gloo.
"""

import os
import sys

import torch
import torch.distributed as dist

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
    gpus = [gpu.decode() for gpu in told if gpu]
    has_own = len(gpus) == world_size == len(set(gpus))
    if has_own and not emulated and dist.is_nccl_available():
        return mine, "nccl"
    if gpus and rank == 0 and "MINILLM_RANK" not in os.environ:
        why = "links are emulated" if emulated else "torch has no NCCL" if has_own else _shortage(gpus, world_size)
        where = "on the GPUs" if wanted else "on the CPU"
        print(f"minillm: {why}, so ranks compute {where} and send through gloo.", file=sys.stderr, flush=True)
    return mine if wanted else torch.device("cpu"), "gloo"


def _identity(device: torch.device) -> str:
    """Which GPU of all machines it is; "" for none."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _shortage(gpus: list[str], world_size: int) -> str:
    return f"{world_size} ranks see {len(set(gpus))} different GPUs (start as many ranks as GPUs, or show each its own)"
