"""Ranks and what they say to each other: launch, groups, meshes, collectives, emulated links.

To read a ring all-reduce: `group.py` (the call), `operation.py` (on record), `backends/cpu.py` (in which thread, by
which messages), `collectives.py` (the algorithm), `backends/sockets.py` (the bytes). On NCCL: `group.py`,
`operation.py`, `backends/native.py`. What these three share is named in `protocol.py`.
To read `launch`: `launch/launcher.py` (the caller), `launch/worker.py` (a rank), `diagnostics/flight_recorder.py` (what
each rank does), `diagnostics/hang_report.py` (who waits for whom), `launch/torchrun.py` (ranks already there).
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
