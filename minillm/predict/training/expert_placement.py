"""Which expert lives where, so that no rank is much fuller than the others.

    loads        expert 0: 90   1: 50   2: 30   3: 10      two ranks
    contiguous   0 1 = 140    |  2 3 = 40                  as stacked weights are cut
    packed       0 3 = 100    |  1 2 = 80                  heaviest first, to the emptiest rank that has room
    replicated   0 2 3 = 85   |  0 1 1 = 95                a slot more per rank: experts 0 and 1 are in two slots each

A layer lasts as long as its fullest rank. Packing cannot help where one expert alone is hotter than the mean rank;
replicas can, for the memory of a slot each. This is DeepSeek's expert-parallel load balancer
(https://github.com/deepseek-ai/EPLB): replicas one at a time to whatever expert has the most load per replica, then
longest processing time first (Graham 1969); with nodes, groups of experts are packed to nodes before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from minillm.predict.training.moe import check_divides


@dataclass(frozen=True)
class Assignment:
    """slots[rank]: the experts that a rank holds, one for each of its slots. An expert in several slots is split."""

    slots: tuple[tuple[int, ...], ...]

    @property
    def num_experts(self) -> int:
        return 1 + max(expert for held in self.slots for expert in held)

    @property
    def replicas(self) -> list[int]:
        """Slots of each expert."""
        counts = [0] * self.num_experts
        for held in self.slots:
            for expert in held:
                counts[expert] += 1
        return counts

    def rank_loads(self, loads: Sequence[float]) -> list[float]:
        """loads: rows of each expert -> rows of each rank; an expert's replicas share its rows equally."""
        if len(loads) != self.num_experts:
            raise ValueError(f"{len(loads)} loads for {self.num_experts} experts: give one for each.")
        replicas = self.replicas
        return [sum(loads[expert] / replicas[expert] for expert in held) for held in self.slots]


def contiguous(num_experts: int, ranks: int) -> Assignment:
    """Neighbours together, as stacked weights are cut. ValueError if experts do not divide."""
    check_divides(num_experts, ranks)
    each = num_experts // ranks
    return Assignment(tuple(tuple(range(start, start + each)) for start in range(0, num_experts, each)))


def packed(loads: Sequence[float], ranks: int) -> Assignment:
    """Every expert once, equally many on each rank: the heaviest first, to the emptiest rank that has room."""
    check_divides(len(loads), ranks)
    return Assignment(tuple(tuple(rank) for rank in _pack(loads, ranks)))


def replicated(
    loads: Sequence[float], ranks: int, slots_per_rank: int, *, nodes: int = 1, groups: int = 1
) -> Assignment:
    """Hot experts in several of the ranks * slots_per_rank slots.

    nodes: of ranks / nodes neighbours each. Groups of experts (those that a router limited to few groups chooses
    together) are packed to nodes first, so that a token's experts share a node.
    ValueError for fewer slots than experts, and for what does not divide.
    """
    experts, slots = len(loads), ranks * slots_per_rank
    if slots < experts:
        raise ValueError(f"{ranks} ranks of {slots_per_rank} slots hold {slots} experts, not {experts}: add slots.")
    for what, count, parts in (("experts", experts, groups), ("groups", groups, nodes), ("ranks", ranks, nodes)):
        if parts < 1 or count % parts:
            raise ValueError(f"{count} {what} do not divide into {parts}: use a divisor.")
    size = experts // groups
    group_loads = [sum(loads[start : start + size]) for start in range(0, experts, size)]
    placed: list[tuple[int, ...]] = []
    for chosen in _pack(group_loads, nodes):
        own = [group * size + place for group in chosen for place in range(size)]
        copies = _replicate([loads[expert] for expert in own], slots // nodes)
        shares = [loads[own[index]] / copies.count(index) for index in copies]
        for rank in _pack(shares, ranks // nodes):
            placed.append(tuple(own[copies[slot]] for slot in rank))
    return Assignment(tuple(placed))


def _pack(weights: Sequence[float], bins: int) -> list[list[int]]:
    """Indices for each bin, len(weights) / bins of them."""
    room = len(weights) // bins
    packs: list[list[int]] = [[] for _ in range(bins)]
    totals = [0.0] * bins
    for index in sorted(range(len(weights)), key=lambda index: (-weights[index], index)):
        chosen = min((bin for bin in range(bins) if len(packs[bin]) < room), key=lambda bin: (totals[bin], bin))
        packs[chosen].append(index)
        totals[chosen] += weights[index]
    return packs


def _replicate(loads: Sequence[float], slots: int) -> list[int]:
    """An expert for each slot: all once, then whichever has the most load per replica."""
    copies = list(range(len(loads)))
    count = [1] * len(loads)
    for _ in range(slots - len(loads)):
        hottest = max(range(len(loads)), key=lambda expert: (loads[expert] / count[expert], -expert))
        copies.append(hottest)
        count[hottest] += 1
    return copies
