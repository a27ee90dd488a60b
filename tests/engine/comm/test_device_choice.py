"""Which device `launch` gives a rank, and by which backend: on nodes that this machine is not, told to torch.cuda."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from minillm.comm import launch
from minillm.comm.launch import device as choice
from minillm.comm.launch import launcher


@pytest.fixture
def node(monkeypatch):
    """node(visible): what ranks see. visible[rank]: the GPUs that a process sees, by UUID."""
    here = threading.local()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(here.gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: properties(here.gpus[d.index]))
    monkeypatch.setattr(choice, "os", SimpleNamespace(environ=EnvironmentOfRank(here)))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)

    def decisions(visible, wanted=None, emulated=False, started_by_launch=False, sharing=()):
        store, found = dist.HashStore(), {}

        def rank_program(rank: int) -> None:
            here.gpus, here.environ = visible[rank], {"LOCAL_RANK": str(rank % 8)}
            here.environ |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if rank in sharing else {}
            here.environ |= {"MINILLM_RANK": str(rank)} if started_by_launch else {}
            found[rank] = choice.agree(store, rank, len(visible), wanted, emulated)

        ranks = [threading.Thread(target=rank_program, args=[rank]) for rank in range(len(visible))]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(30)
        return [(str(device), backend) for device, backend in (found[rank] for rank in range(len(visible)))]

    return decisions


def properties(gpu: str) -> SimpleNamespace:
    """gpu: its UUID, or the UUID of an instance @ the bus of the GPU that it is a part of."""
    uuid, _, bus = gpu.partition("@")
    slot = {"pci_domain_id": 0, "pci_bus_id": int(bus), "pci_device_id": 0} if bus else {}
    return SimpleNamespace(uuid=uuid, **slot)


class EnvironmentOfRank:
    """The environment of the rank that asks."""

    def __init__(self, here: threading.local) -> None:
        self.here = here

    def get(self, name: str, default: str | None = None) -> str | None:
        return self.here.environ.get(name, default)

    def __contains__(self, name: str) -> bool:
        return name in self.here.environ


EIGHT = [f"GPU-{index}" for index in range(8)]


def test_a_node_whose_ranks_see_every_gpu(node, capfd):
    assert node([EIGHT] * 8) == [(f"cuda:{rank}", "nccl") for rank in range(8)]
    assert node([EIGHT] * 4, started_by_launch=True) == [(f"cuda:{rank}", "nccl") for rank in range(4)]
    assert capfd.readouterr().err == ""


def test_one_visible_gpu_per_process_is_one_of_its_own(node, capfd):
    """`srun --gpus-per-task=1`, or a container for each GPU: device_count() is 1 on a node of eight ranks."""
    for wanted in (None, "cuda"):
        assert node([[gpu] for gpu in EIGHT], wanted) == [("cuda:0", "nccl")] * 8
    assert capfd.readouterr().err == ""


def test_one_gpu_for_all_is_shared_by_name_only_and_both_are_said(node, capfd):
    assert node([["GPU-0"]] * 8) == [("cpu", "gloo")] * 8
    said = capfd.readouterr().err
    assert said.startswith(
        "minillm: 8 ranks see 1 different GPUs (start as many ranks as GPUs, or show each its own), "
    )
    assert said.endswith("so ranks compute on the CPU and send through gloo.\n") and said.count("\n") == 1
    assert node([["GPU-0"]] * 8, "cuda") == [("cuda:0", "gloo")] * 8
    assert "compute on the GPUs and send through gloo" in capfd.readouterr().err


def test_instances_of_one_gpu_have_no_nccl(node, capfd):
    """MIG: a UUID for each instance, and NCCL says "Duplicate GPU detected" for two on one bus."""
    assert node([["MIG-a@7"], ["MIG-b@7"]], "cuda") == [("cuda:0", "gloo")] * 2
    assert "2 ranks see 1 different GPUs" in capfd.readouterr().err
    assert node([["MIG-a@7"], ["MIG-b@8"]]) == [("cuda:0", "nccl")] * 2


@pytest.mark.parametrize("version", [(2, 30), (3, 0), (2, 29)])
def test_ranks_share_a_gpu_where_nccl_lets_all_of_them(node, monkeypatch, version):
    monkeypatch.setattr(choice, "nccl_version", lambda: version)
    together = [("cuda:0", "nccl")] * 4 if version >= (2, 30) else [("cpu", "gloo")] * 4
    assert node([["GPU-0"]] * 4, sharing=range(4)) == together
    assert node([["GPU-0"]] * 4, sharing=range(3)) == [("cpu", "gloo")] * 4
    assert node([["GPU-0"]] * 3 + [[]], sharing=range(4)) == [("cpu", "gloo")] * 4  # one sees none


def test_the_version_is_that_of_the_library_that_is_loaded(monkeypatch):
    def answers(pointer):
        pointer._obj.value = 23_007

    loaded = {"libnccl.so.2": SimpleNamespace(ncclGetVersion=answers)}
    monkeypatch.setattr(choice.ctypes, "CDLL", loaded.__getitem__)
    assert choice.nccl_version() == (2, 30)

    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(choice.ctypes, "CDLL", absent)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    assert choice.nccl_version() == (2, 28)


def test_the_same_bus_of_two_machines_is_two_slots(node, monkeypatch):
    machines = iter(["one", "two"])
    monkeypatch.setattr(choice, "BOOT_ID", SimpleNamespace(exists=lambda: True, read_text=lambda: next(machines)))
    assert node([["GPU-a@7"], ["GPU-b@7"]]) == [("cuda:0", "nccl")] * 2


def test_nodes_that_differ_decide_alike(node):
    """Two nodes of eight ranks, the second with four GPUs: one backend for all."""
    second = [f"GPU-b{index}" for index in range(4)]
    assert node([EIGHT] * 8 + [second] * 8) == [("cpu", "gloo")] * 16


def test_no_gpu_is_nothing_to_say(node, capfd):
    assert node([[]] * 4) == [("cpu", "gloo")] * 4
    assert node([EIGHT] * 4, "cpu") == [("cpu", "gloo")] * 4
    assert node([["GPU-0"]] * 2, started_by_launch=True) == [("cpu", "gloo")] * 2
    assert capfd.readouterr().err == ""


def test_emulated_links_are_gloo_s(node, capfd):
    assert node([EIGHT] * 2, emulated=True) == [("cpu", "gloo")] * 2
    assert "links are emulated" in capfd.readouterr().err


def test_launch_stays_on_the_cpu_unless_a_gpu_is_asked_for(monkeypatch):
    """Programs of CPU tensors, as in notebooks, run on a node with GPUs as they run on a laptop."""
    jobs = []
    monkeypatch.setattr(launcher, "Run", lambda folder, job: jobs.append(job) or SimpleNamespace(results=list))
    launch(len, 4)
    launch(len, 4, device=None)
    assert [job.device for job in jobs] == ["cpu", None]
