"""One script, three worlds: run by python, by torchrun, and by two torchrun agents. Prints receipts as JSON."""

import glob
import json
import os
import sys
import tempfile
import time

import torch

from minillm import comm
from minillm.comm import launch
from minillm.comm.launch import torchrun
from minillm.measure import ledger


def receipts(group, seed):
    mesh = comm.Mesh(group, dp=2, tp=2)
    x = torch.arange(10_007.0) + seed * group.rank
    with ledger() as led:
        group.all_reduce(x)
        comm.hierarchical_all_reduce(x, group, 2)
        comm.tree_broadcast(x, group, root=3)
        mesh.dp.all_gather(x)
        mesh.tp.all_reduce(x, async_op=True).wait()
        group.exchange(send=(x, (group.rank + 1) % 4), recv=(x.clone(), (group.rank - 1) % 4))
        group.barrier()
    return {
        "sum": x.double().sum().item(),
        "calls": dict(led.calls),
        "sent": [led.bytes(), led.messages, led.bytes(group="dp"), led.bytes("all_reduce", "tp")],
        "ranks": [group.rank, mesh.dp.ranks, mesh.tp.ranks],
        "left": glob.glob(os.path.join(tempfile.gettempdir(), "minillm-*.board")),
    }


def hang(group, how):
    """Rank 1 does not come along; nobody would notice for half an hour by torch's own defaults."""
    mesh = comm.Mesh(group, dp=1, tp=2)
    if group.rank == 1:
        time.sleep(3600)
    if how == "barrier":
        mesh.tp.barrier()
    elif how == "subgroup":
        group.subgroup([0, 1], "both")
    else:
        mesh.tp.all_reduce(torch.ones(5))


def clinging(group):
    """Leaves circles that hold group and mesh, and has torch import what looks at the process group as it is loaded."""
    group.circle, mesh = [group], comm.Mesh(group, dp=1, tp=2)
    mesh.circle = [mesh]
    torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)
    group.gather_objects(group.rank)


def threads():
    """Names of this process's threads, C++ ones too."""
    return sorted(open(path).read().strip() for path in glob.glob("/proc/self/task/*/comm"))


def talk(group):
    """Until somebody is lost."""
    os.write(1, f"TALKS {group.rank}\n".encode())  # in one piece: ranks share the pipe
    while True:
        group.all_reduce(torch.ones(1000))
        time.sleep(0.01)


def nested(group):
    return launch(receipts, 4, 1)


if __name__ == "__main__":
    if sys.argv[1] == "receipts":
        results = [launch(receipts, 4, seed) for seed in (1, 2)]  # a script may launch more than once
        if comm.is_root():
            print("RECEIPTS " + json.dumps(results))
    elif sys.argv[1] == "threads":
        launch(clinging, 2)
        sys.stdout.write("THREADS " + json.dumps(threads()) + "\n")
    elif sys.argv[1] == "talk":
        torchrun.LAST_WORDS_S = 5.0  # on a busy machine a survivor that answers late would be named, too
        launch(talk, 4, timeout=3600.0)
    elif sys.argv[1] == "nested":
        launch(nested, 4)
    else:
        launch(hang, 4, sys.argv[1], timeout=3.0)
