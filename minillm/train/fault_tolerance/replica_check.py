"""Silent data corruption: replicas must hold the same bits, and a hash of each parameter shows which rank's differ.

    rank 0   w: 8f3a…  b: 11c2…  ┐
    rank 1   w: 8f3a…  b: 11c2…  ├ the majority is right: rank 2 has other weights in w
    rank 2   w: 07d9…  b: 11c2…  ┘

A device that computes wrongly now and then raises no error (Dixit et al. 2021, https://arxiv.org/abs/2102.11245). Ranks
that hold the same make the check cheap: one pass over the tensors, and a name and 8 bytes of traffic for each.
"""

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.comm import Group

CHUNK = 1 << 20  # elements at a time: the hash needs 16 bytes of memory for each
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, as a signed number
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Divergence:
    """Ranks of the group whose tensor `name` differs from that of most; without a majority, all that differ."""

    ranks: tuple[int, ...]
    name: Hashable
    has_majority: bool

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        if self.has_majority:
            return f"rank {ranks} differs from the other replicas in {self.name}"
        return f"the replicas on ranks {ranks} differ in {self.name}, and none of them is a majority"


@torch.no_grad()
def hash_tensor(x: Tensor) -> Tensor:
    """A 64-bit hash of a tensor's bits, a scalar on its device. Any one changed element changes it.

    Σ word_i · multiplier_i modulo 2^64, where multipliers are odd and so can be inverted: a changed word cannot cancel
    to zero. Different multipliers see elements that have changed places.
    """
    words = x.detach().contiguous().view(-1).view(_WORDS[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, words.numel(), CHUNK):
        part = words[start : start + CHUNK].to(torch.int64)
        place = torch.arange(start, start + part.numel(), device=x.device)
        total += (part * (place * _ODD).bitwise_or_(1)).sum()
    return total


def hashes(named: Iterable[tuple[Hashable, Tensor]]) -> dict[Hashable, int]:
    """The hashes by name. The host waits for the device once."""
    found = {name: hash_tensor(tensor) for name, tensor in named}
    return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True)) if found else {}


def divergence(by_rank: Iterable[Mapping[Hashable, int]]) -> Divergence | None:
    """The first tensor in which ranks differ, of those that have it, and these ranks; None if they agree."""
    by_rank = list(by_rank)
    for name in dict.fromkeys(itertools.chain(*by_rank)):
        values = {rank: found[name] for rank, found in enumerate(by_rank) if name in found}
        (most, count), *others = Counter(values.values()).most_common()
        if not others:
            continue
        has_majority = 2 * count > len(values)
        ranks = [rank for rank, value in values.items() if not has_majority or value != most]
        return Divergence(tuple(ranks), name, has_majority)
    return None


def check_replicas(named: Iterable[tuple[Hashable, Tensor]], group: Group) -> Divergence | None:
    """Compares this rank's tensors with those of the same names on all ranks of `group`, which all call it and get the
    same answer."""
    return divergence(group.gather_objects(hashes(named)))
