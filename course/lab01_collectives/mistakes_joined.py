"""Spoilers of lab 01, the whole ring all-reduce: halves that people join wrongly."""

import torch

from course.kit.answers import answers_of
from course.kit.exercises import KnownAnswers
from course.lab01_collectives.mistakes import sends_each_chunk_to_its_owner, tells_every_rank

right = answers_of("01_collectives")

ring_all_reduce = KnownAnswers("ring-all-reduce")

ring_all_reduce.mistake(
    "no-division", {"mine /= group.world_size": "pass"}, expect="it is the sum, 4 times the mean: divide"
)
ring_all_reduce.mistake("always-divides", {'if op == "avg"': "if True"}, expect="it is the mean, but op is 'sum'")
ring_all_reduce.mistake(
    "divides-twice", {"/= group.world_size": "/= group.world_size**2"}, expect="divided by 4 once more"
)
ring_all_reduce.mistake(
    "divides-by-4", {"group.world_size": "4"}, expect=r"rank \d of 3 with op=\"avg\" ended with wrong values"
)
ring_all_reduce.mistake(
    "not-in-place", {"x.copy_(all_gather(mine, group))": "all_gather(mine, group)"}, expect="did not write them into x"
)
ring_all_reduce.mistake(
    "other-data-in-x",
    {"return x.copy_(all_gather(mine, group))": "x.data = all_gather(mine, group)\n    return x"},
    expect="returned the right values but did not write them into x",
)
ring_all_reduce.mistake(
    "returns-nothing", {"return x.copy_": "x.copy_"}, expect=r"returned nothing \(None\): return x as well"
)
ring_all_reduce.mistake(
    "gathers-everything",
    {
        "reduce_scatter(x, group)": "all_gather(x, group).view(group.world_size, -1).sum(0)",
        "all_gather(mine, group)": "mine",
    },
    expect="times as many: reduce-scatter first",
)
ring_all_reduce.mistake(
    "sums-in-float32",
    {"reduce_scatter(x, group)": "reduce_scatter(x.float(), group)"},
    expect=r"rank \d of [678] ended with wrong values .*digits only",
)
ring_all_reduce.mistake(
    "returns-the-gathered-tensor",
    {"return x.copy_(all_gather(mine, group))": "x.copy_(mine := all_gather(mine, group))\n    return mine"},
    expect="returned another tensor: return x itself",
)
ring_all_reduce.mistake(
    "no-gather",
    {"return x.copy_(all_gather(mine, group))": "x.chunk(group.world_size)[group.rank].copy_(mine)\n    return x"},
    expect="in place",
)


ring_all_reduce.mistake(
    "mean-of-everything",
    {
        "mine = reduce_scatter(x, group)": (
            'if op == "avg":\n        return x.copy_(all_gather(x, group).view(group.world_size, -1).mean(0))\n'
            "    mine = reduce_scatter(x, group)"
        )
    },
    expect='times as many: with op="avg": reduce-scatter first',
)


@ring_all_reduce.mistake("owners-instead-of-a-ring", expect="which is not its neighbour")
def one_owner_per_chunk(x, group, op="sum"):
    mine = sends_each_chunk_to_its_owner(x, group)
    return x.copy_(tells_every_rank(mine / group.world_size if op == "avg" else mine, group))


@ring_all_reduce.mistake("owner-divides-otherwise", expect=r"has other last digits in x than rank 0")
def divides_its_own_chunk_and_multiplies_the_others(x, group, op="sum"):
    n, r = group.world_size, group.rank
    right.all_reduce(x, group)
    if op == "avg":
        mine = x.chunk(n)[r] / n
        x.mul_(1 / n).chunk(n)[r].copy_(mine)
    return x


@ring_all_reduce.alternative("one-loop")
def both_laps_in_one_loop(x, group, op="sum"):
    n, r = group.world_size, group.rank
    chunks = x.chunk(n)
    for s in range(2 * (n - 1)):
        arriving, target = torch.empty_like(chunks[0]), chunks[(r - s - 2) % n]
        if s == n - 1 and op == "avg":
            chunks[r].div_(n)
        group.exchange(send=(chunks[(r - s - 1) % n], (r + 1) % n), recv=(arriving, (r - 1) % n))
        target.copy_(target + arriving if s < n - 1 else arriving)
    return x


@ring_all_reduce.alternative("divides-first")
def divides_before_adding(x, group, op="sum"):
    return right.all_reduce(x.div_(group.world_size) if op == "avg" else x, group)
