"""Spoilers of lab 04: partitions that lose elements, a ZeRO-1 that shards nothing, sends too much or sums."""

import torch
from torch import nn

from course.kit import answers_of
from course.kit.exercises import KnownAnswers

ANSWERS = answers_of("04_zero")

# Partition

shard_partition = KnownAnswers("shard-partition")

shard_partition.mistake(
    "rounds-down", {"-(-sum(sizes) // world_size)": "sum(sizes) // world_size"}, expect="nobody's. Round up"
)


@shard_partition.mistake("whole-parameters", expect=r"cut through\s+parameters")
def deals_parameters_out(sizes, world_size, rank):
    length = -(-sum(sizes) // world_size)
    return length, [slice(0, size if i % world_size == rank else 0) for i, size in enumerate(sizes)]


@shard_partition.mistake("pads-each-parameter", expect="pad the whole line once")
def pads_every_parameter(sizes, world_size, rank):
    parts = [-(-size // world_size) for size in sizes]
    slices = [slice(min(rank * n, size), min((rank + 1) * n, size)) for n, size in zip(parts, sizes, strict=True)]
    return sum(parts), slices


shard_partition.mistake(
    "slices-of-the-line",
    {"slice(low, high)": "slice(start + low, start + high)"},
    expect="count from the parameter's own start",
)
shard_partition.mistake(
    "shards-overlap",
    {
        "slices, start = [], 0": (
            "first = min(rank * length, sum(sizes) - length)  # the last rank takes a full "
            "shard, from the end\n"
            "    slices, start = [], 0"
        ),
        "rank * length - start": "first - start",
        "(rank + 1) * length - start": "first + length - start",
    },
    expect=r"ranks \[\d, \d\] hold element",
)
shard_partition.mistake(
    "ends-before-it-begins",
    {
        "min(max(rank * length - start, 0), size)": "max(rank * length - start, 0)",
        "min(max((rank + 1) * length - start, 0), size)": "min((rank + 1) * length - start, size)",
    },
    expect=r"slice\(0, 0\) where the rank holds nothing",
)
shard_partition.mistake(
    "rounds-halves-to-even",
    {"-(-sum(sizes) // world_size)": "round(sum(sizes) / world_size + 0.5)"},
    expect="are enough, yours have",
)
shard_partition.mistake("pairs-of-numbers", {"slice(low, high)": "(low, high)"}, expect="is no slice")
shard_partition.mistake("in-steps", {"slice(low, high)": "slice(low, high, 2)"}, expect="is no slice of neighbours")
shard_partition.alternative("open", {"slice(low, high)": "slice(low or None, high if high < size else None)"})


@shard_partition.alternative("by-element-numbers")
def by_counting(sizes, world_size, rank):
    length = -(-sum(sizes) // world_size)
    slices, start = [], 0
    for size in sizes:
        mine = [i for i in range(size) if rank * length <= start + i < (rank + 1) * length]
        slices.append(slice(mine[0], mine[-1] + 1) if mine else slice(0, 0))
        start += size
    return length, slices


# Stage 1

zero_one_step = KnownAnswers("zero-one-step")


@zero_one_step.mistake("shards-nothing", expect="this shards nothing")
class WholeOptimizer:
    def __init__(self, weights, group, make):
        self.group, self.whole = group, nn.Parameter(group.broadcast(weights))
        self.optimizer = make([self.whole])

    def step(self, gradient):
        self.whole.grad = self.group.all_reduce(gradient, op="avg")
        self.optimizer.step()


zero_one_step.mistake(
    "all-reduce-then-slice",
    {
        "self.shard.grad = self.group.reduce_scatter": "whole = self.group.all_reduce",
        "self.optimizer.step()": (
            "self.shard.grad = whole.chunk(self.group.world_size)[self.group.rank].clone()\n"
            "        self.optimizer.step()"
        ),
    },
    expect="that is 3P",
)
zero_one_step.mistake(
    "forgets-the-gather",
    {
        "self.group.all_gather(self.shard.data, out=self.weights)": (
            "self.weights.chunk(self.group.world_size)[self.group.rank].copy_(self.shard.data)"
        )
    },
    expect="gather the updated parts",
)
zero_one_step.mistake(
    "different-first-weights", {"group.broadcast(weights)": "weights"}, expect="a patchwork: begin with rank 0's"
)
zero_one_step.mistake(
    "own-weights-until-the-first-step",
    {
        "self.weights, self.group = group.broadcast(weights), group": (
            "self.weights, self.group = weights, group\n        weights = group.broadcast(weights.clone())"
        )
    },
    expect="first\\s+gradients come from different models",
)
zero_one_step.mistake("adds-gradients", {', op="avg"': ""}, expect="added up, not averaged")
zero_one_step.mistake(
    "local-gradient",
    {
        'self.group.reduce_scatter(gradient, op="avg")': (
            "gradient.chunk(self.group.world_size)[self.group.rank].clone()"
        )
    },
    expect="owner's own gradient: reduce over the ranks",
)
zero_one_step.mistake(
    "an-optimizer-per-step",
    {
        "self.optimizer = make([self.shard])": "self.make, self.optimizer = make, make([self.shard])",
        "self.optimizer.step()": "self.optimizer = self.make([self.shard])\n        self.optimizer.step()",
    },
    expect="call it once",
)
zero_one_step.mistake(
    "adds-to-the-last-gradient",
    {
        "self.shard.grad = ": "mine = ",
        "self.optimizer.step()": (
            "self.shard.grad = mine if self.shard.grad is None else self.shard.grad + mine\n"
            "        self.optimizer.step()"
        ),
    },
    expect="of this step alone",
)


zero_one_step.mistake(
    "keeps-a-second-copy",
    {"self.optimizer = make([self.shard])": "self.optimizer, self.before = make([self.shard]), self.weights.clone()"},
    expect="a second copy of everything",
)
zero_one_step.mistake(
    "keeps-a-list-of-copies",
    {"self.optimizer = make([self.shard])": "self.optimizer, self.past = make([self.shard]), [self.weights.clone()]"},
    expect="a second copy of everything",
)
zero_one_step.mistake(
    "divides-the-given-gradient",
    {
        'self.group.reduce_scatter(gradient, op="avg")': (
            "self.group.reduce_scatter(gradient.div_(self.group.world_size))"
        )
    },
    expect="changes the gradient that it is given",
)


@zero_one_step.mistake("in-the-class", expect="two objects of the class side by side disturb each other")
class KeptByTheClass:
    def __init__(self, weights, group, make):
        kept = type(self)
        kept.group, kept.weights = group, group.broadcast(weights)
        kept.shard = nn.Parameter(weights.chunk(group.world_size)[group.rank].clone())
        self.optimizer = make([kept.shard])
        self.mine = weights, kept.shard

    def step(self, gradient):
        weights, shard = self.mine
        shard.grad = self.group.reduce_scatter(gradient, op="avg")
        self.optimizer.step()
        self.group.all_gather(type(self).shard.data, out=weights)


@zero_one_step.alternative("shard-is-a-view-of-the-weights")
class ViewOfTheWeights:
    def __init__(self, weights, group, make):
        group.broadcast(weights)
        self.weights, self.group = weights, group
        self.shard = nn.Parameter(weights.chunk(group.world_size)[group.rank])
        self.optimizer = make([self.shard])

    def step(self, gradient):
        self.shard.grad = self.group.reduce_scatter(gradient) / self.group.world_size
        self.optimizer.step()
        self.group.all_gather(self.shard.data, out=self.weights)


@zero_one_step.alternative("a-buffer-for-the-reduced-shard")
class ReducesIntoABuffer(ANSWERS.ZeroOne):
    def __init__(self, weights, group, make):
        super().__init__(weights, group, make)
        self.part = torch.empty_like(self.shard.data)

    def step(self, gradient):
        self.shard.grad = self.group.reduce_scatter(gradient, op="avg", out=self.part)
        self.optimizer.step()
        self.group.all_gather(self.shard.data, out=self.weights)


@zero_one_step.alternative("each-owner-broadcasts")
class OwnersBroadcast(ANSWERS.ZeroOne):
    def step(self, gradient):
        n = self.group.world_size
        parts = self.group.all_to_all(gradient).view(n, -1)
        self.shard.grad = parts.mean(0)
        self.optimizer.step()
        parts = self.weights.chunk(n)
        parts[self.group.rank].copy_(self.shard.data)
        for shift in range(1, n):  # a ring by hand
            source = (self.group.rank - shift) % n
            self.group.exchange(send=(self.shard.data, (self.group.rank + shift) % n), recv=(parts[source], source))
