"""Spoilers of lab 09: wrong meshes, wrong groups of gradients, wrong counts of what crosses; and right ones."""

import itertools
import math

import numpy as np

from course.kit.exercises import KnownAnswers

# Meshes.

mesh_strides = KnownAnswers("mesh-strides")

mesh_strides.mistake(
    "the first axis fastest",
    {"reversed(axes.items())": "axes.items()"},
    says="You let the first axis vary fastest. The last one does: its neighbours are consecutive ranks.",
)
mesh_strides.mistake(
    "groups of consecutive ranks",
    {"first = rank - place[axis] * stride": "first = rank - place[axis]", "first + index * stride": "first + index"},
    says="Only the innermost axis has consecutive ranks in its groups. Members of the others are a stride apart.",
)
mesh_strides.mistake(
    "a group that begins at the rank",
    {"first = rank - place[axis] * stride": "first = rank"},
    says="The group starts at index 0 of the axis, not at this rank: all its members must name the same list.",
)
mesh_strides.mistake(
    "leaves out axes of one rank",
    {"place[axis] = rank": "if size == 1:\n            continue\n        place[axis] = rank"},
    expect="look at",
)
mesh_strides.mistake(
    "the stride counts the axis itself",
    {
        "place[axis] = rank": "stride *= size\n        place[axis] = rank",
        "stride *= size\n    return": "pass\n    return",
    },
    says="Multiply by the size of an axis after you have used the stride for it, not before.",
)
mesh_strides.mistake(
    "no remainder",
    {
        "rank // stride % size": "rank // stride",
        "first = rank - place[axis] * stride": "first = rank - rank // stride % size * stride",
    },
    says="rank // stride goes on counting beyond the axis. Take the remainder by its size.",
)
mesh_strides.mistake(
    "one dict for all calls",
    {
        "def mesh_groups(rank, axes):": "def mesh_groups(rank, axes, place={}, groups={}):",
        "place, groups, stride = {}, {}, 1": "stride = 1",
    },
    expect="is a dict kept between calls",
)
mesh_strides.mistake(
    "strides as floats",
    {"place, groups, stride = {}, {}, 1": "place, groups, stride = {}, {}, 1.0"},
    expect="asks for whole numbers: an index along each axis",
)
mesh_strides.mistake(
    "empties the axes",
    {"    for axis, size in reversed(axes.items()):": "    while axes:\n        axis, size = axes.popitem()"},
    expect="changed its input .axes.",
)


@mesh_strides.alternative("one arange, reshaped")
def by_reshape(rank, axes):
    mesh = np.arange(math.prod(axes.values())).reshape(*axes.values())
    at = [int(index[0]) for index in np.where(mesh == rank)]
    groups = {}
    for dimension, axis in enumerate(axes):
        where = [*at[:dimension], slice(None), *at[dimension + 1 :]]
        groups[axis] = mesh[tuple(where)]
    return dict(zip(axes, at, strict=True)), groups


@mesh_strides.alternative("places of all ranks, compared")
def by_comparison(rank, axes):
    places = list(itertools.product(*map(range, axes.values())))
    mine, groups = places[rank], {}
    for dimension, axis in enumerate(axes):
        others = [p[:dimension] + p[dimension + 1 :] for p in places]
        own = mine[:dimension] + mine[dimension + 1 :]
        groups[axis] = [number for number, other in enumerate(others) if other == own]
    return dict(zip(axes, mine, strict=True)), groups


# Gradients.

gradient_axes = KnownAnswers("gradient-axes")

gradient_axes.mistake(
    "dp alone",
    {'tokens = {"copies", "ep", "cp"}': 'tokens = {"copies", "ep"}'},
    says="cp is missing. Its ranks saw other positions of the same sequences with the same weights, so their gradients "
    "have to meet as those of dp do.",
)
gradient_axes.mistake(
    "ep is no data axis",
    {'tokens = {"copies", "ep", "cp"}': 'tokens = {"copies", "cp"}'},
    says="The ep ranks have different rows of the batch, and outside the experts they are data-parallel ranks.",
)
gradient_axes.mistake(
    "a norm is never summed over tp",
    {'({"tp"} if kind == "norm" and sequence else set())': "set()"},
    says="Under sequence parallelism a norm's weight is whole on each tp rank, but its gradient is not: it comes from "
    "that rank's part of the sequence.",
)
gradient_axes.mistake(
    "a norm is always summed over tp",
    {" and sequence else": " else"},
    says="Without sequence parallelism every tp rank computes the norm of all tokens, so each has the full gradient "
    "already.",
)
gradient_axes.mistake(
    "a router summed over tp",
    {'({"tp"} if kind == "norm" and sequence': '({"tp"} if kind == "router" or sequence'},
    says="A router is whole on every tp rank, and each of them routes all tokens: the gradients are equal, not shares.",
)
gradient_axes.mistake(
    "a router under sequence parallelism",
    {'kind == "norm" and': 'kind in ("norm", "router") and'},
    says="That is right for Megatron Core, whose router works on the shard of the sequence. Here each tp rank's router "
    "sees all tokens, with sequence parallelism too, so the sum counts them tp times.",
)
gradient_axes.mistake(
    "experts as all others",
    {'tokens - {"ep"}': "tokens"},
    says="The ep ranks hold different experts, so their gradients must not be mixed. Copies of one expert lie along "
    "copies and cp only.",
)
gradient_axes.mistake(
    "a tied table in each stage alone",
    {'tokens | {"pp"}': "tokens"},
    says="The first stage has the gradient of the look-up, the last that of the head. It is one parameter, so both "
    "must be added, or the two copies drift apart.",
)
gradient_axes.mistake(
    "norms count on every tp rank",
    {'else set()), {"pp"}': 'else set()), {"pp", "tp"}'},
    says="In the gradient's norm a norm's weight counts tp times: all tp ranks hold the same one. Count it on one.",
)
gradient_axes.mistake(
    "the norm of one stage",
    {
        '{"pp", "ep", "tp"}': '{"ep", "tp"}',
        'return tokens, {"pp", "tp"}': 'return tokens, {"tp"}',
        'else set()), {"pp"}': "else set()), set()",
    },
    says="Your norm of the gradient sees the layers of one stage only. Other stages hold other layers.",
)
gradient_axes.mistake(
    "the tied table counts in both stages",
    {'tokens | {"pp"}, {"tp"}': 'tokens | {"pp"}, {"pp", "tp"}'},
    says="Both stages hold the same table, with the same gradient after the sum: its squares count once.",
)
gradient_axes.mistake(
    "slices added up",
    {'return tokens, {"pp", "tp"}': 'return tokens | {"tp"}, {"pp", "tp"}'},
    says="The tp ranks hold different slices of a matrix. They are added up in the activations, never in gradients.",
)
gradient_axes.mistake(
    "experts count once for all ep ranks",
    {'{"pp", "ep", "tp"}': '{"pp", "tp"}'},
    says="Each ep rank holds experts that no other has: their squares all belong in the norm.",
)


@gradient_axes.alternative("tables of names, as lists")
def by_table(kind, sequence):
    summed = {axis: axis in ("copies", "cp") or (axis == "ep" and kind != "expert") for axis in ("copies", "ep", "cp")}
    summed |= {"pp": kind == "tied", "tp": kind == "norm" and sequence}
    different = {"matrix": "pp tp", "norm": "pp", "router": "pp", "expert": "pp ep tp", "tied": "tp", "loss": ""}
    return [axis for axis, yes in summed.items() if yes], different[kind].split()


@gradient_axes.alternative("keys of dicts, and no second set for a loss")
def by_keys(kind, sequence):
    summed = dict.fromkeys(("copies", "cp") if kind == "expert" else ("copies", "ep", "cp"))
    summed |= dict.fromkeys(("pp",) if kind == "tied" else ("tp",) if kind == "norm" and sequence else ())
    different = {"matrix": "pp tp", "norm": "pp", "router": "pp", "expert": "pp ep tp", "tied": "tp"}
    return summed.keys(), dict.fromkeys(different[kind].split()).keys() if kind in different else None


# What crosses.

crossing_bytes = KnownAnswers("crossing-bytes")

crossing_bytes.mistake(
    "a pipeline as a ring",
    {'if axis == "pp" and at + 1 == len(group)': "if len(group) == 1"},
    says="The last stage sends nothing to the first, so a pipeline has one border less than stages.",
)
crossing_bytes.mistake(
    "activations without gradients",
    {' * (2 if axis == "pp" else 1)': ""},
    says="On each border of a pipeline activations go forward and gradients come back: both cross.",
)
crossing_bytes.mistake(
    "open rings",
    {'axis == "pp" and at + 1': "at + 1"},
    says="The last rank of a ring sends to the first, and that link may cross, too.",
)
crossing_bytes.mistake(
    "all or nothing",
    {"rank // per_node != group[(at + 1) % len(group)] // per_node": "len({each // per_node for each in group}) > 1"},
    says="A group that does not fit into a node does not cross with every message: neighbours that share a node "
    "still talk inside it.",
)
crossing_bytes.mistake(
    "the groups of rank 0 alone",
    {"at = group.index(rank)": "at = group.index(rank)\n            if group[0] != 0:\n                continue"},
    says="You counted one group of each axis. Every line of the mesh is a group, and all of them send.",
)
crossing_bytes.mistake(
    "rank modulo per_node",
    {"rank // per_node !=": "rank % per_node !=", "len(group)] // per_node": "len(group)] % per_node"},
    says="rank % per_node is a rank's seat inside its node. The node itself is rank // per_node.",
)
crossing_bytes.mistake(
    "per_node as a number of nodes",
    {"    for rank in range(ranks):": "    per_node = ranks // per_node\n    for rank in range(ranks):"},
    says="per_node is the number of ranks in a node; you used it as the number of nodes.",
)
crossing_bytes.mistake(
    "both ends of a message",
    {'(2 if axis == "pp" else 1)': '(4 if axis == "pp" else 2)'},
    says="A message crosses once. You counted it where it leaves and where it arrives.",
)
crossing_bytes.mistake(
    "as many nodes as are full",
    {
        "if rank // per_node != group[(at + 1) % len(group)] // per_node": "last = max(0, ranks // per_node - 1)\n"
        "            there = group[(at + 1) % len(group)] // per_node\n"
        "            if min(rank // per_node, last) != min(there, last)"
    },
    says="The last node may be partly filled: its ranks are on a node of their own all the same.",
)


@crossing_bytes.mistake("by the nodes that a group needs at least", expect="that cross; it is")
def fewest_nodes(axes, per_node, sent):
    total, stride, world = {}, 1, math.prod(axes.values())
    for axis, size in reversed(axes.items()):
        nodes = math.ceil(size / max(1, per_node // stride))
        borders = 2 * (nodes - 1) if axis == "pp" else nodes * (nodes > 1)
        total[axis], stride = world // size * borders * sent[axis], stride * size
    return total


@crossing_bytes.alternative("from strides, without lists")
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
