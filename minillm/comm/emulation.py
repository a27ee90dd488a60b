"""Emulated links: a message takes `latency + bytes / bandwidth`, however fast the real wire is.

Real multi-node networks are 10 to 100 times slower than the links inside a node; a laptop has neither. A `Link` paces
messages so that costs have the same *shape*: the sender stamps each message with the time at which the emulated wire
would have delivered it, and neither side's handle is done before that. Messages of one rank over one link queue up
behind each other, as they do in a network card. Every number measured this way is labelled *emulated*.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """One direction of one rank's connection: a message takes `latency_s` plus its bytes divided by the bandwidth."""

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = float("inf")
    name: str = "link"

    def __post_init__(self) -> None:
        if not self.latency_s >= 0:
            raise ValueError(f"latency_s={self.latency_s} must be 0 or more seconds, for example 50e-6")
        if not self.bandwidth_bytes_per_s > 0:
            raise ValueError(f"bandwidth_bytes_per_s={self.bandwidth_bytes_per_s} must be positive, for example 1e9")

    def seconds(self, num_bytes: int) -> float:
        """The time of one message that is alone on the wire."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s

    def between(self, src: int, dst: int) -> "Link":
        """The link of a message from global rank src to global rank dst: this one, for any two ranks."""
        return self


@dataclass(frozen=True)
class Topology:
    """Nodes of `ranks_per_node` consecutive ranks: `inter` is the link between nodes, `intra` that between ranks of one
    node (None: not paced). Each rank has its own network card, as in a node with a card per GPU.

    seats: the seat of each rank, counted node by node; None: rank r has seat r. two_level: an all-reduce over several
    nodes runs as `hierarchical_all_reduce` if its ranks are evenly spread and those of a node are neighbours.
    """

    ranks_per_node: int
    inter: Link
    intra: Link | None = None
    seats: tuple[int, ...] | None = None
    two_level: bool = False

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node={self.ranks_per_node} must be 1 or more")
        if self.seats is not None and sorted(self.seats) != list(range(len(self.seats))):
            raise ValueError(f"seats={self.seats} must name every seat from 0 to {len(self.seats) - 1} once")

    def node(self, rank: int) -> int:
        return (rank if self.seats is None else self.seats[rank]) // self.ranks_per_node

    def neighbours(self, ranks: Sequence[int]) -> int:
        """How many ranks of a group each node has, if all have as many and they are neighbours in the group; else 1."""
        nodes = [self.node(rank) for rank in ranks]
        together = len(nodes) // len(set(nodes))
        runs = [nodes[first : first + together] for first in range(0, len(nodes), together)]
        return together if all(len(set(run)) == 1 for run in runs) and len(runs) == len(set(nodes)) else 1

    def between(self, src: int, dst: int) -> Link | None:
        return self.intra if self.node(src) == self.node(dst) else self.inter


class Egress:
    """The sending side of one rank: one queue per link."""

    def __init__(self, links: Link | Topology) -> None:
        self.links = links
        self._free_at: dict[Link, float] = {}
        self._lock = threading.Lock()  # each group sends from a thread of its own

    def deliver_at(self, src: int, dst: int, num_bytes: int) -> float | None:
        """When the emulated wire delivers a message posted now (time.monotonic()); None where nothing is emulated."""
        link = self.links.between(src, dst)
        if link is None:
            return None
        with self._lock:
            sent = max(time.monotonic(), self._free_at.get(link, 0.0)) + num_bytes / link.bandwidth_bytes_per_s
            self._free_at[link] = sent
        return sent + link.latency_s

    def paces(self, src: int, dst: int) -> bool:
        return self.links.between(src, dst) is not None
