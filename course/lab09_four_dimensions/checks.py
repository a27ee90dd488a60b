"""Lab 09, four dimensions: groups of a mesh, axes that complete a gradient, bytes that leave a node.

checks.py        by enumeration: every rank of small meshes, of any order and with axes of one rank
checks_plan.py   a layout's bytes and seconds, and a plan that fits
checks_ranks.py  a hybrid step on four ranks
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import product
from typing import Any

import numpy as np

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.shared.diagnose import expect, expect_list, expect_whole

Place = dict[str, int]
AXES = ("dp", "pp", "cp", "tp")


def draw_axes(most: int = 48, least: int = 2) -> dict[str, int]:
    """Four axes in any order, some of one rank, most of different sizes."""
    while True:
        axes = {axis: random.choice((1, 2, 2, 3, 4)) for axis in random.sample(AXES, 4)}
        if least < np.prod(list(axes.values())) <= most and sorted(axes.values())[2] > 1:
            return axes


def ranks_of(axes: Mapping[str, int]) -> np.ndarray:
    """Every rank at its place: one dimension per axis, the last varies fastest."""
    return np.arange(np.prod(list(axes.values()))).reshape(tuple(axes.values()))


@exercise(
    "mesh-strides",
    minutes=15,
    difficulty=2,
    hints=(
        "How far apart in ranks are two neighbours of an axis? Begin with the last axis, which varies fastest.",
        "The stride of an axis is the product of the sizes behind it. Its index is rank // stride % size, and all "
        "ranks of its group differ from this one by multiples of the stride.",
    ),
)
def check_mesh(learner: Callable) -> Receipt:
    rows = []
    first = {"dp": 2, "pp": 3, "tp": 4}, {"cp": 1, "tp": 2, "dp": 1, "pp": 3}, {"copies": 2, "ep": 3}
    for axes in (*first, draw_axes(), draw_axes()):
        mesh, seen = ranks_of(axes), 0
        for place in product(*map(range, mesh.shape)):
            rank = int(mesh[place])
            _judge_rank(learner(rank, dict(axes)), rank, place, axes, mesh)
            seen += len(axes)
        sizes = " · ".join(f"{axis} {size}" for axis, size in axes.items())
        rows.append(row(f"{sizes}: places and groups that are right", len(axes) * mesh.size, seen))
    return receipt("every rank of five meshes", rows)


def _judge_rank(found: Any, rank: int, place: Sequence[int], axes: Mapping[str, int], mesh: np.ndarray) -> None:
    where = f"rank {rank} of {axes}"
    where_it_is, groups = expect_list(found, "two dicts, the place and the groups", f"{where}: you", count=2, of=dict)
    for name, each in (("place", where_it_is), ("groups", groups)):
        if missing := sorted(set(axes) - set(each)):
            raise CheckFailed(
                f"{where}: your {name} names the axes {sorted(each)}; look at {missing[0]}", evidence=found
            )
        if strange := sorted(map(str, set(each) - set(axes))):
            raise CheckFailed(
                f"{where}: your {name} names {strange[0]}, no axis of this mesh: is a dict kept between calls?",
                evidence=found,
            )
    expect_whole(f"{where}: the place", list(where_it_is.values()), "an index along each axis")
    right = dict(zip(axes, place, strict=True))
    if dict(where_it_is) != right:
        raise CheckFailed(f"{where} lies at {right}, not at {where_it_is}", evidence=found)
    for dimension, axis in enumerate(axes):
        line = [int(each) for each in np.moveaxis(mesh, dimension, -1)[tuple(np.delete(place, dimension))]]
        named = expect_whole(f"{where}: the {axis} group", groups[axis], "ranks")
        if named != line:
            raise CheckFailed(f"{where}: its {axis} group is {line}, not {named}", evidence=found)


# Which ranks complete a gradient.

DATA = ("copies", "ep", "cp")  # axes whose ranks see other tokens; copies x ep are the dp ranks
SIZES = {"pp": 2, "copies": 2, "ep": 3, "cp": 2, "tp": 3}
KINDS = ("matrix", "norm", "router", "expert", "tied", "loss")
TOKENS = tuple(product(*(range(SIZES[axis]) for axis in DATA)))  # parts of the batch


@exercise(
    "gradient-axes",
    minutes=15,
    difficulty=3,
    hints=(
        "Take two ranks that differ in one axis only. Do they hold the same numbers of this parameter? And if so, "
        "did they compute the same gradient, or gradients of other tokens?",
        "Same numbers, other tokens: add up. Same numbers, same tokens: both have the same gradient already, and "
        "adding counts it twice. Other numbers: never add; each belongs in the sum of squares.",
        "Nearly everything is summed over the token axes copies, ep and cp. A norm under sequence parallelism saw 1/tp "
        "of the sequence: tp as well. An expert has seen the tokens of all its ep ranks, which hold other experts: "
        "without ep. A tied table is used in two stages: with pp.",
    ),
)
def check_axes(learner: Callable) -> Receipt:
    rows = []
    for kind, sequence in product(KINDS, (False, True)):
        summed, different = _two_sets(learner(kind, sequence), kind)
        _judge_sum(kind, sequence, summed, different)
        if kind != "loss":
            _judge_squares(kind, sequence, summed, different)
        rows.append(row(f"{kind}{', sequence parallel' if sequence else ''}: every token once", True, True))
    return receipt(f"a mesh of {' · '.join(f'{axis} {size}' for axis, size in SIZES.items())}", rows)


def _two_sets(found: Any, kind: str) -> tuple[set[str], set[str]]:
    if kind == "loss" and isinstance(found, list | tuple) and len(found) == 2 and found[1] is None:
        found = found[0], ()
    some = Set | list | tuple  # also the keys of a dict
    summed, different = map(set, expect_list(found, "two sets of axes", f"{kind}: you", count=2, of=some))
    if unknown := (summed | different) - set(SIZES):
        raise CheckFailed(f"{kind}: there is no axis {min(map(str, unknown))!r}; there are {', '.join(SIZES)}")
    return summed, different


def places() -> Iterator[Place]:
    for each in product(*(range(size) for size in SIZES.values())):
        yield dict(zip(SIZES, each, strict=True))


def holds(kind: str, at: Place) -> bool:
    """Whether a rank has such a number at all: a tied table lies on the first and last stage, a loss on the last."""
    last = SIZES["pp"] - 1
    return {"tied": at["pp"] in (0, last), "loss": at["pp"] == last}.get(kind, True)


def owner(kind: str, at: Place) -> tuple[int, ...]:
    """Which of all numbers of this kind a rank holds: its layer, its slice, its expert."""
    axes = {"matrix": ("pp", "tp"), "norm": ("pp",), "router": ("pp",), "expert": ("pp", "ep", "tp"), "tied": ("tp",)}
    return tuple(at[axis] for axis in axes.get(kind, ()))


def share(kind: str, at: Place, sequence: bool) -> Counter:
    """What a rank's gradient is a sum of: parts of the batch, of the sequence, and uses of the parameter."""
    tokens = [tuple(at[axis] for axis in DATA)]
    if kind == "expert":  # its tokens come from all ranks of its ep group
        tokens = [(at["copies"], other, at["cp"]) for other in range(SIZES["ep"])]
    parts = [at["tp"]] if kind == "norm" and sequence else range(SIZES["tp"])
    uses = ("looked up" if at["pp"] == 0 else "head",) if kind == "tied" else ("used",)
    return Counter(product(tokens, parts, uses))


def whole(kind: str) -> Counter:
    uses = ("looked up", "head") if kind == "tied" else ("used",)
    return Counter(product(TOKENS, range(SIZES["tp"]), uses))


def _judge_sum(kind: str, sequence: bool, summed: set[str], different: set[str]) -> None:
    how = f"{kind}{' under sequence parallelism' if sequence and kind == 'norm' else ''}"
    evidence = [kind, sequence, sorted(summed), sorted(different)]
    for start in filter(lambda at: holds(kind, at), places()):
        members = [at for at in _line(start, summed) if holds(kind, at)]
        if strangers := [at for at in members if owner(kind, at) != owner(kind, start)]:
            raise CheckFailed(
                f"{how}: summed over {_named(summed)}, ranks {start} and {strangers[0]} are added up, but they hold "
                "other numbers",
                evidence=evidence,
            )
        total = sum((share(kind, at, sequence) for at in members), Counter())
        if total != whole(kind):
            lost = whole(kind) - total
            what = (
                f"{len(lost)} of {len(whole(kind))} shares are missing"
                if lost
                else "every share is in it more than once"
            )
            raise CheckFailed(f"{how}: summed over {_named(summed)}, {what}", evidence=evidence)


def _judge_squares(kind: str, sequence: bool, summed: set[str], different: set[str]) -> None:
    held = Counter(owner(kind, at) for at in places() if holds(kind, at))
    start = dict.fromkeys(SIZES, 0)
    found = Counter(owner(kind, at) for at in _line(start, different) if holds(kind, at))
    if found != Counter(set(held)):
        what = "is counted more than once" if max(found.values()) > 1 else "is missing"
        raise CheckFailed(
            f"{kind}: with squares added up over {_named(different)}, a part of it {what} in the gradient's norm",
            evidence=[kind, sequence, sorted(summed), sorted(different)],
        )


def _line(start: Place, axes: set[str]) -> Iterator[Place]:
    """All ranks that differ from `start` in these axes alone."""
    chosen = sorted(axes)
    for each in product(*(range(SIZES[axis]) for axis in chosen)):
        yield start | dict(zip(chosen, each, strict=True))


def _named(axes: set[str]) -> str:
    return " x ".join(sorted(axes)) or "no axis"


# What leaves a node.


@exercise(
    "crossing-bytes",
    minutes=15,
    difficulty=3,
    hints=(
        "Every message goes to the next rank of its group. Which ranks have their next neighbour on another node?",
        "A node holds per_node ranks in a row, so rank r lies on node r // per_node. In a ring the last rank of a "
        "group sends to the first; a pipeline is no ring, and each of its borders carries two messages.",
    ),
)
def check_crossing(learner: Callable) -> Receipt:
    rows = []
    easy = ({"dp": 3, "tp": 2}, 2), ({"tp": 2, "dp": 2}, 2), ({"dp": 2, "cp": 1, "tp": 4}, 2), ({"pp": 4, "tp": 2}, 4)
    nodes = (
        ({"dp": 2, "tp": 3}, 1),
        ({"dp": 2, "tp": 3}, 4),
        ({"dp": 2, "pp": 2}, 4),
    )  # of one rank, half full, all in one
    uneven = {"dp": 2, "tp": 2, "cp": 3, "pp": 3}, 4  # groups lie on the nodes in more than one way
    stages = {"pp": 3, "tp": 2}, 2  # each stage a node: two borders, and no third from the last to the first
    for axes, per_node in (*easy, uneven, stages, *nodes, *(_draw_nodes() for _ in range(3))):
        sent = {axis: random.randint(1, 500) * 1000 for axis in axes}
        found, right = learner(dict(axes), per_node, dict(sent)), crossing(axes, per_node, sent)
        where = f"{' · '.join(f'{axis} {size}' for axis, size in axes.items())}, {per_node} ranks to a node"
        fits = isinstance(found, dict) and set(found) == set(axes)
        expect(fits, found, f"a dict with {', '.join(axes)}", f"{where}: you")
        if wrong := [axis for axis in axes if found[axis] != right[axis]]:
            axis = wrong[0]
            raise CheckFailed(
                f"{where}, {axis} sends {sent[axis]:,} bytes a rank: you found {found[axis]:,} that cross; it is "
                f"{right[axis]:,}",
                evidence=[dict(found)],
            )
        rows.append(row(f"{where}: bytes of all axes that cross", sum(right.values()), sum(found.values()), "B"))
    return receipt("messages between nodes, one by one", rows)


def _draw_nodes() -> tuple[dict[str, int], int]:
    while True:
        axes = draw_axes()
        size = int(np.prod(list(axes.values())))
        if nodes := [each for each in range(2, size) if size % each == 0]:
            return axes, random.choice(nodes)


def crossing(axes: Mapping[str, int], per_node: int, sent: Mapping[str, int]) -> dict[str, int]:
    """Counted over arrays: node of every rank, and of its neighbour along each axis."""
    node = ranks_of(axes) // per_node
    found = {}
    for dimension, axis in enumerate(axes):
        crosses = node != np.roll(node, -1, dimension)
        if axis == "pp":  # no way round from the last stage to the first; a border has an activation and a gradient
            crosses = 2 * np.take(crosses, range(axes[axis] - 1), dimension)
        found[axis] = int(crosses.sum()) * sent[axis]
    return found
