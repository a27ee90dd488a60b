"""Cases of several sizes in one launch: each runs on the group of the first ranks, and the others wait for the next."""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TypeVar

from minillm.comm import Group

Case = TypeVar("Case")
Result = TypeVar("Result")


def first_ranks(group: Group, sizes: Iterable[int]) -> dict[int, Group]:
    """By size, the group of that many first ranks; its rank is -1 on the others. Every rank must call it."""
    return {size: group.subgroup(range(size), f"{size} ranks") for size in sorted(set(sizes))}


def on_groups(
    group: Group,
    cases: Sequence[Case],
    run: Callable[[Case, Group], Result],
    size: Callable[[Case], int] = attrgetter("world_size"),
) -> list[Result | None]:
    """run(case, group of its size's first ranks) for every case; None where this rank is not in that group."""
    groups = first_ranks(group, map(size, cases))
    parts = [groups[size(case)] for case in cases]
    return [run(case, part) if part.rank >= 0 else None for case, part in zip(cases, parts, strict=True)]
