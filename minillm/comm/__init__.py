"""Communication between ranks: launch, groups, meshes, collectives, emulated links.

A collective on NCCL: `group.py` (the call), `operation.py` (its record, its handle, what a backend has to offer),
`backends/native.py` (the launch and the wait).
A ring all-reduce on the CPU: `group.py`, `operation.py`, `backends/cpu.py` (which thread runs it, which messages it
sends), `collectives.py` (the algorithm), `backends/sockets.py` (the bytes).
What an operation leaves for others to see: `diagnostics/mismatch.py`, `diagnostics/flight_recorder.py`.
`launch`: `launch/launcher.py` (the caller), `launch/worker.py` (a rank), `diagnostics/hang_report.py` (who waits for
whom), `launch/torchrun.py` (ranks that torchrun has started).
"""

from minillm.comm.collectives import (
    hierarchical_all_reduce,
    pairwise_all_to_all,
    parameter_server_all_reduce,
    recursive_doubling_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_broadcast,
    tree_reduce,
)
from minillm.comm.emulation import Link, Topology
from minillm.comm.errors import HangError, MismatchError, PeerLostError, RankError
from minillm.comm.group import Group
from minillm.comm.launch.launcher import launch
from minillm.comm.launch.torchrun import is_root
from minillm.comm.mesh import Mesh
from minillm.comm.operation import Work

__all__ = [
    "Group",
    "HangError",
    "Link",
    "Mesh",
    "MismatchError",
    "PeerLostError",
    "RankError",
    "Topology",
    "Work",
    "hierarchical_all_reduce",
    "is_root",
    "launch",
    "pairwise_all_to_all",
    "parameter_server_all_reduce",
    "recursive_doubling_all_reduce",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "tree_broadcast",
    "tree_reduce",
]
