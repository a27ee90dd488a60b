"""Spoilers of lab 09: wrong meshes, wrong groups of gradients, wrong counts of what crosses; and right ones."""

import itertools
import math

import numpy as np

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake

right = answers_of("09_four_dimensions")

# Meshes.


@mistake(
    "mesh-strides",
    "the first axis fastest",
    says="You let the first axis vary fastest. The last one does: its neighbours are consecutive ranks.",
)
def first_fastest(rank, axes):
    place, groups = right.mesh_groups(rank, dict(reversed(axes.items())))
    return {axis: place[axis] for axis in axes}, {axis: groups[axis] for axis in axes}


@mistake(
    "mesh-strides",
    "groups of consecutive ranks",
    says="Only the innermost axis has consecutive ranks in its groups. Members of the others are a stride apart.",
)
def consecutive(rank, axes):
    place, _ = right.mesh_groups(rank, axes)
    return place, {axis: list(range(rank - place[axis], rank - place[axis] + size)) for axis, size in axes.items()}


@mistake(
    "mesh-strides",
    "a group that begins at the rank",
    says="The group starts at index 0 of the axis, not at this rank: all its members must name the same list.",
)
def begins_here(rank, axes):
    place, groups = right.mesh_groups(rank, axes)
    strides = {axis: group[1] - group[0] if len(group) > 1 else 1 for axis, group in groups.items()}
    return place, {axis: [rank + i * strides[axis] for i in range(size)] for axis, size in axes.items()}


@mistake("mesh-strides", "leaves out axes of one rank", expect="look at")
def without_ones(rank, axes):
    place, groups = right.mesh_groups(rank, {axis: size for axis, size in axes.items() if size > 1})
    return place, groups


@mistake(
    "mesh-strides",
    "the stride counts the axis itself",
    says="Multiply by the size of an axis after you have used the stride for it, not before.",
)
def own_size(rank, axes):
    place, groups, stride = {}, {}, 1
    for axis, size in reversed(axes.items()):
        stride *= size
        place[axis] = rank // stride % size
        first = rank - place[axis] * stride
        groups[axis] = [first + index * stride for index in range(size)]
    return place, groups


@mistake(
    "mesh-strides",
    "no remainder",
    says="rank // stride goes on counting beyond the axis. Take the remainder by its size.",
)
def no_remainder(rank, axes):
    place, groups = right.mesh_groups(rank, axes)
    strides = dict(zip(axes, (math.prod(list(axes.values())[i + 1 :]) for i in range(len(axes))), strict=True))
    return {axis: rank // strides[axis] for axis in place}, groups


@alternative("mesh-strides", "one arange, reshaped")
def by_reshape(rank, axes):
    mesh = np.arange(math.prod(axes.values())).reshape(*axes.values())
    at = [int(index[0]) for index in np.where(mesh == rank)]
    groups = {}
    for dimension, axis in enumerate(axes):
        where = [*at[:dimension], slice(None), *at[dimension + 1 :]]
        groups[axis] = mesh[tuple(where)]
    return dict(zip(axes, at, strict=True)), groups


@alternative("mesh-strides", "places of all ranks, compared")
def by_comparison(rank, axes):
    places = list(itertools.product(*map(range, axes.values())))
    mine, groups = places[rank], {}
    for dimension, axis in enumerate(axes):
        others = [p[:dimension] + p[dimension + 1 :] for p in places]
        own = mine[:dimension] + mine[dimension + 1 :]
        groups[axis] = [number for number, other in enumerate(others) if other == own]
    return dict(zip(axes, mine, strict=True)), groups


# Gradients.


def _changed(kind, sequence, only, summed=lambda axes: axes, different=lambda axes: axes):
    """The right sets with one of them changed for some kinds."""
    own, others = right.gradient_axes(kind, sequence)
    return (summed(own), different(others)) if kind in only else (own, others)


EVERY = ("matrix", "norm", "router", "expert", "tied", "loss")


@mistake(
    "gradient-axes",
    "dp alone",
    says="cp is missing. Its ranks saw other positions of the same sequences with the same weights, so their gradients "
    "have to meet as those of dp do.",
)
def without_cp(kind, sequence):
    return _changed(kind, sequence, EVERY, summed=lambda axes: axes - {"cp"})


@mistake(
    "gradient-axes",
    "ep is no data axis",
    says="The ep ranks have different rows of the batch, and outside the experts they are data-parallel ranks.",
)
def without_ep(kind, sequence):
    return _changed(kind, sequence, EVERY, summed=lambda axes: axes - {"ep"})


@mistake(
    "gradient-axes",
    "a norm is never summed over tp",
    says="Under sequence parallelism a norm's weight is whole on each tp rank, but its gradient is not: it comes from "
    "that rank's part of the sequence.",
)
def norms_apart(kind, sequence):
    return _changed(kind, sequence, ("norm",), summed=lambda axes: axes - {"tp"})


@mistake(
    "gradient-axes",
    "a norm is always summed over tp",
    says="Without sequence parallelism every tp rank computes the norm of all tokens, so each has the full gradient "
    "already.",
)
def norms_twice(kind, sequence):
    return _changed(kind, sequence, ("norm",), summed=lambda axes: axes | {"tp"})


@mistake(
    "gradient-axes",
    "a router summed over tp",
    says="A router is whole on every tp rank, and each of them routes all tokens: the gradients are equal, not shares.",
)
def routers_twice(kind, sequence):
    return _changed(kind, sequence, ("router",), summed=lambda axes: axes | {"tp"})


@mistake(
    "gradient-axes",
    "experts as all others",
    says="The ep ranks hold different experts, so their gradients must not be mixed. Copies of one expert lie along "
    "copies and cp only.",
)
def experts_mixed(kind, sequence):
    return _changed(kind, sequence, ("expert",), summed=lambda axes: axes | {"ep"})


@mistake(
    "gradient-axes",
    "a tied table in each stage alone",
    says="The first stage has the gradient of the look-up, the last that of the head. It is one parameter, so both "
    "must be added, or the two copies drift apart.",
)
def tied_apart(kind, sequence):
    return _changed(kind, sequence, ("tied",), summed=lambda axes: axes - {"pp"})


@mistake(
    "gradient-axes",
    "norms count on every tp rank",
    says="In the gradient's norm a norm's weight counts tp times: all tp ranks hold the same one. Count it on one.",
)
def counted_twice(kind, sequence):
    return _changed(kind, sequence, ("norm", "router"), different=lambda axes: axes | {"tp"})


@mistake(
    "gradient-axes",
    "the norm of one stage",
    says="Your norm of the gradient sees the layers of one stage only. Other stages hold other layers.",
)
def one_stage(kind, sequence):
    return _changed(kind, sequence, EVERY, different=lambda axes: axes - {"pp"})


@mistake(
    "gradient-axes",
    "the tied table counts in both stages",
    says="Both stages hold the same table, with the same gradient after the sum: its squares count once.",
)
def tied_counted_twice(kind, sequence):
    return _changed(kind, sequence, ("tied",), different=lambda axes: axes | {"pp"})


@mistake(
    "gradient-axes",
    "slices added up",
    says="The tp ranks hold different slices of a matrix. They are added up in the activations, never in gradients.",
)
def slices(kind, sequence):
    return _changed(kind, sequence, ("matrix",), summed=lambda axes: axes | {"tp"})


@mistake(
    "gradient-axes",
    "experts count once for all ep ranks",
    says="Each ep rank holds experts that no other has: their squares all belong into the norm.",
)
def experts_once(kind, sequence):
    return _changed(kind, sequence, ("expert",), different=lambda axes: axes - {"ep"})


@alternative("gradient-axes", "tables of names, as lists")
def by_table(kind, sequence):
    summed = {axis: axis in ("copies", "cp") or (axis == "ep" and kind != "expert") for axis in ("copies", "ep", "cp")}
    summed |= {"pp": kind == "tied", "tp": kind == "norm" and sequence}
    different = {"matrix": "pp tp", "norm": "pp", "router": "pp", "expert": "pp ep tp", "tied": "tp", "loss": ""}
    return [axis for axis, yes in summed.items() if yes], different[kind].split()


# What crosses.


def _count(axes, per_node, sent, *, ring=("dp", "cp", "tp"), twice=("pp",), crosses=None, ranks=None):
    """The reference with one thing to change."""
    crosses = crosses or (lambda here, there: here // per_node != there // per_node)
    total = dict.fromkeys(axes, 0)
    for rank in range(math.prod(axes.values()) if ranks is None else ranks):
        for axis, group in right.mesh_groups(rank, axes)[1].items():
            at = group.index(rank) + 1
            if at < len(group) or axis in ring:
                total[axis] += crosses(rank, group[at % len(group)]) * sent[axis] * (2 if axis in twice else 1)
    return total


@mistake(
    "crossing-bytes",
    "a pipeline as a ring",
    says="The last stage sends nothing to the first, so a pipeline has one border less than stages.",
)
def closed_pipeline(axes, per_node, sent):
    return _count(axes, per_node, sent, ring=("dp", "cp", "tp", "pp"))


@mistake(
    "crossing-bytes",
    "activations without gradients",
    says="On each border of a pipeline activations go forward and gradients come back: both cross.",
)
def forward_only(axes, per_node, sent):
    return _count(axes, per_node, sent, twice=())


@mistake(
    "crossing-bytes",
    "open rings",
    says="The last rank of a ring sends to the first, and that link may cross, too.",
)
def open_rings(axes, per_node, sent):
    return _count(axes, per_node, sent, ring=())


@mistake(
    "crossing-bytes",
    "all or nothing",
    says="A group that does not fit into a node does not cross with every message: neighbours that share a node "
    "still talk inside it.",
)
def all_or_nothing(axes, per_node, sent):
    total = dict.fromkeys(axes, 0)
    for rank in range(math.prod(axes.values())):
        for axis, group in right.mesh_groups(rank, axes)[1].items():
            across = len({each // per_node for each in group}) > 1
            last = axis == "pp" and rank == group[-1]
            total[axis] += across * (not last) * sent[axis] * (2 if axis == "pp" else 1)
    return total


@mistake(
    "crossing-bytes",
    "the groups of rank 0 alone",
    says="You counted one group of each axis. Every line of the mesh is a group, and all of them send.",
)
def first_groups(axes, per_node, sent):
    total = dict.fromkeys(axes, 0)
    whole = right.mesh_groups(0, axes)[1]
    for axis, group in whole.items():
        ends = itertools.pairwise([*group, group[0]] if axis != "pp" else group)
        cut = sum(a // per_node != b // per_node for a, b in ends)
        total[axis] = cut * sent[axis] * (2 if axis == "pp" else 1)
    return total


@mistake(
    "crossing-bytes",
    "rank modulo per_node",
    says="rank % per_node is a rank's seat inside its node. The node itself is rank // per_node.",
)
def seats_for_nodes(axes, per_node, sent):
    return _count(axes, per_node, sent, crosses=lambda here, there: here % per_node != there % per_node)


@mistake(
    "crossing-bytes",
    "per_node as a number of nodes",
    says="per_node is the number of ranks in a node; you used it as the number of nodes.",
)
def nodes_for_ranks(axes, per_node, sent):
    return right.crossing_bytes(axes, math.prod(axes.values()) // per_node, sent)


@mistake(
    "crossing-bytes",
    "both ends of a message",
    says="A message crosses once. You counted it where it leaves and where it arrives.",
)
def both_ends(axes, per_node, sent):
    return {axis: 2 * size for axis, size in right.crossing_bytes(axes, per_node, sent).items()}


@alternative("crossing-bytes", "from strides, without lists")
def from_strides(axes, per_node, sent):
    total, stride, world = {}, 1, math.prod(axes.values())
    for axis, size in reversed(axes.items()):
        cut = 0
        for rank in range(world):
            index = rank // stride % size
            if index == size - 1:
                there = rank - index * stride
                cut += axis != "pp" and rank // per_node != there // per_node
            else:
                cut += (2 if axis == "pp" else 1) * (rank // per_node != (rank + stride) // per_node)
        total[axis], stride = cut * sent[axis], stride * size
    return total
