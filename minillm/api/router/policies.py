"""Which replica gets a request: rules that see only how many requests each replica has open.

Round robin counts; it sends a short request where a long one runs. Least outstanding looks at all replicas; several
routers that do so all choose the same one. Power of two choices looks at two, drawn at random, which brings the longest
queue from log n / log log n to log log n (Mitzenmacher 2001, "The power of two choices in randomized load balancing").
Prefix affinity sends requests that begin alike to one replica, whose cache then has their prefix: consistent hashing,
with no replica above `bound` times the mean load (Mirrokni, Thorup, Zadimoghaddam 2018).
"""

import hashlib
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

POINTS = 64  # of each replica on the ring: shares of the keys then differ by about 1 / sqrt(64)


@dataclass(frozen=True)
class Load:
    """What a policy sees of a replica. outstanding: requests it was sent that have not ended."""

    name: str
    outstanding: int


class Policy(Protocol):
    """uses_key: whether `choose` looks at the key, which costs the router a look into the body."""

    uses_key: bool

    def choose(self, loads: Sequence[Load], key: bytes) -> int:
        """The index of the replica that gets the request; loads: of at least one."""


class RoundRobin:
    """Each in turn."""

    uses_key = False

    def __init__(self):
        self._next = 0

    def choose(self, loads: Sequence[Load], key: bytes = b"") -> int:
        chosen = self._next % len(loads)
        self._next += 1
        return chosen


class LeastOutstanding:
    """The one with the fewest open requests; among equals a random one."""

    uses_key = False

    def __init__(self, seed: int | None = None):
        self._random = random.Random(seed)

    def choose(self, loads: Sequence[Load], key: bytes = b"") -> int:
        least = min(load.outstanding for load in loads)
        return self._random.choice([index for index, load in enumerate(loads) if load.outstanding == least])


class TwoChoices:
    """Two at random, of which the one with fewer open requests."""

    uses_key = False

    def __init__(self, seed: int | None = None):
        self._random = random.Random(seed)

    def choose(self, loads: Sequence[Load], key: bytes = b"") -> int:
        drawn = self._random.sample(range(len(loads)), min(2, len(loads)))
        return min(drawn, key=lambda index: loads[index].outstanding)


class PrefixAffinity:
    """The key's replica on the ring; if that is full, the next one clockwise that is not.

    bound: a replica is full at `ceil(bound · mean)` open requests, this one counted in the mean; 1 balances exactly and
    scatters prefixes, infinity never gives way. A replica that joins or leaves moves 1/n of the keys.
    """

    uses_key = True

    def __init__(self, bound: float = 1.25):
        if not bound >= 1:
            raise ValueError(f"a load bound of {bound} leaves no replica for a request: use 1 or more")
        self.bound = bound

    def choose(self, loads: Sequence[Load], key: bytes) -> int:
        total = 1 + sum(load.outstanding for load in loads)
        capacity = math.inf if math.isinf(self.bound) else math.ceil(self.bound * total / len(loads))
        points, owners = ring(tuple(load.name for load in loads))
        start = bisect_left(points, place_of(key))
        for step in range(len(points)):
            owner = owners[(start + step) % len(points)]
            if loads[owner].outstanding < capacity:
                return owner
        raise ValueError("no replica is below the mean load: the loads are not counts")


@lru_cache(maxsize=64)
def ring(names: tuple[str, ...], points: int = POINTS) -> tuple[list[int], list[int]]:
    """Points of all replicas in the order of the ring, and the index in `names` of whose each one is."""
    placed = sorted(
        (place_of(f"{name} {point}".encode()), index) for index, name in enumerate(names) for point in range(points)
    )
    return [place for place, _ in placed], [index for _, index in placed]


def place_of(key: bytes) -> int:
    """Where on the ring, which has 2**64 places, a key lies: the same in every process."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")


POLICIES: dict[str, Callable[[float], Policy]] = {  # by name, from the load bound
    "round-robin": lambda bound: RoundRobin(),
    "least-outstanding": lambda bound: LeastOutstanding(),
    "two-choices": lambda bound: TwoChoices(),
    "prefix-affinity": PrefixAffinity,
}
