"""Communication between ranks: launch, groups, meshes, collectives, emulated links.

A collective on NCCL: `group.py` (the call), `operation.py` (its record and its handle), `backends/native.py` (the
launch and the wait).
A ring all-reduce on the CPU: `group.py`, `operation.py`, `backends/cpu.py` (which thread runs it),
`collectives/ring.py` (the algorithm), `backends/sockets.py` (the messages).
Messages outside of a collective, subgroups, the end of a group: `ranks.py`. Messages that gloo carries, in a tree, on
an emulated link or between machines: `backends/gloo.py`. The other algorithms: `collectives/`.
What an operation leaves for others to see: `diagnostics/mismatch.py`, `diagnostics/flight_recorder.py`.
`launch`: `launch/launcher.py` (the caller), `launch/worker.py` (a rank), `diagnostics/hang_report.py` (who waits for
whom), `launch/torchrun.py` (ranks that torchrun has started).
"""

from minillm.comm.collectives.all_to_all import pairwise_all_to_all
from minillm.comm.collectives.doubling import recursive_doubling_all_reduce
from minillm.comm.collectives.parameter_server import parameter_server_all_reduce
from minillm.comm.collectives.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from minillm.comm.collectives.tree import tree_broadcast, tree_reduce
from minillm.comm.collectives.two_level import hierarchical_all_reduce
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
