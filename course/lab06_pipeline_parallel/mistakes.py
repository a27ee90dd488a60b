"""Spoilers of lab 06: orders that wait for themselves, fill too much or too little; stages cut in the wrong place."""

import itertools

from course.kit import answers_of
from course.kit.exercises import alternative, mistake
from minillm.parallel.pipeline_parallel.schedules import one_f_one_b

ANSWERS = answers_of("06_pipeline_parallel")


def _order(kinds, microbatches):
    """ "FFB" -> F0 F1 B0: the next microbatch of each kind."""
    upcoming = {"F": itertools.count(), "B": itertools.count()}
    return [f"{kind}{next(upcoming[kind])}" for kind in kinds]


# GPipe


@mistake("gpipe-order", "one-at-a-time", expect="takes 96 where 33 are enough")
def one_at_a_time(stage, stages, microbatches):
    return _order("FB" * microbatches, microbatches)


@mistake("gpipe-order", "last-backward-forgotten", expect=r"B\d is missing")
def forgets_one(stage, stages, microbatches):
    return ANSWERS.gpipe_order(stage, stages, microbatches)[:-1]


@mistake("gpipe-order", "backward-first", expect="does B0 before F0, which it needs")
def backward_first(stage, stages, microbatches):
    order = ANSWERS.gpipe_order(stage, stages, microbatches)
    return order[microbatches:] + order[:microbatches]


@mistake("gpipe-order", "first-stage-in-turns", expect="the ranks wait for each other")
def first_stage_in_turns(stage, stages, microbatches):
    return (ANSWERS.one_f_one_b_order if stage == 0 else ANSWERS.gpipe_order)(stage, stages, microbatches)


@mistake("gpipe-order", "one-f-one-b", expect="GPipe does all forwards first")
def turns(stage, stages, microbatches):
    return ANSWERS.one_f_one_b_order(stage, stages, microbatches)


@alternative("gpipe-order", "backwards-from-the-last-microbatch")
def last_in_first_out(stage, stages, microbatches):
    return [f"F{m}" for m in range(microbatches)] + [f"B{m}" for m in reversed(range(microbatches))]


# 1F1B


@mistake("one-f-one-b-order", "gpipe", expect="that is GPipe")
def gpipe(stage, stages, microbatches):
    return ANSWERS.gpipe_order(stage, stages, microbatches)


@mistake("one-f-one-b-order", "never-fills", expect="takes .* are enough")
def never_fills(stage, stages, microbatches):
    return _order("FB" * microbatches, microbatches)


@mistake("one-f-one-b-order", "same-on-all-stages", expect=r"stage 1 holds 4 microbatches at once where 3")
def same_everywhere(stage, stages, microbatches):
    return ANSWERS.one_f_one_b_order(0, stages, microbatches)


@mistake("one-f-one-b-order", "no-cooldown", expect=r"B5 is missing from the order of rank 0")
def no_cooldown(stage, stages, microbatches):
    to_fill = min(stages - 1 - stage, microbatches)
    return _order("F" * to_fill + "FB" * (microbatches - to_fill), microbatches)


@mistake(
    "one-f-one-b-order",
    "more-fill-than-microbatches",
    expect="4 stages, 2 microbatches: .*contains F2, but microbatches are numbered 0 to 1",
)
def fills_beyond_the_end(stage, stages, microbatches):
    to_fill = stages - 1 - stage
    turns = max(microbatches - to_fill, 0)
    return _order("F" * to_fill + "FB" * turns + "B" * to_fill, microbatches)


@mistake("one-f-one-b-order", "backward-before-forward", expect="the ranks wait for each other|before")
def one_b_one_f(stage, stages, microbatches):
    to_fill = min(stages - 1 - stage, microbatches)
    turns = microbatches - to_fill
    return _order("F" * to_fill + "BF" * turns + "B" * to_fill, microbatches)


@mistake("one-f-one-b-order", "backward-of-the-newest", expect="the oldest microbatch comes first")
def newest_first(stage, stages, microbatches):
    to_fill = min(stages - 1 - stage, microbatches)
    order = [f"F{m}" for m in range(to_fill)]
    for m in range(to_fill, microbatches):
        order += [f"F{m}", f"B{m}"]
    return order + [f"B{m}" for m in range(to_fill)]


@alternative("one-f-one-b-order", "whatever-is-allowed-next")
def by_limit(stage, stages, microbatches):
    forwards, backwards, order = 0, 0, []
    while backwards < microbatches:
        if forwards < microbatches and forwards - backwards < stages - stage:
            order.append(f"F{forwards}")
            forwards += 1
        else:
            order.append(f"B{backwards}")
            backwards += 1
    return order


@alternative("one-f-one-b-order", "as-actions")
def as_actions(stage, stages, microbatches):
    return one_f_one_b(stages, microbatches).actions(stage)


# Balance


@mistake("balance-stages", "as-many-layers-each", expect="your slowest stage takes")
def equal_counts(costs, parts):
    edges = [part * len(costs) // parts for part in range(parts + 1)]
    return [range(*pair) for pair in itertools.pairwise(edges)]


@mistake("balance-stages", "fills-up-to-the-mean", expect="gets no layer|your slowest stage takes")
def greedy(costs, parts):
    mean, edges, held = sum(costs) / parts, [0], 0.0
    for layer, cost in enumerate(costs):
        if held + cost > mean and len(edges) < parts:
            edges.append(layer)
            held = 0.0
        held += cost
    edges += [len(costs)] * (parts + 1 - len(edges))
    return [range(*pair) for pair in itertools.pairwise(edges)]


@mistake("balance-stages", "last-layer-left-out", expect="is not every layer once|gets no layer")
def drops_the_head(costs, parts):
    stages = ANSWERS.balance(costs, parts)
    return [*stages[:-1], range(stages[-1].start, stages[-1].stop - 1)]


@mistake("balance-stages", "numbers-instead-of-ranges", expect="the exercise asks for a list of ranges")
def counts_only(costs, parts):
    return [len(stage) for stage in ANSWERS.balance(costs, parts)]


def _by(score):
    def balance(costs, parts):
        def times(cuts):
            return [sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs)))]

        cuts = min(itertools.combinations(range(1, len(costs)), parts - 1), key=lambda cuts: score(times(cuts)))
        return [range(a, b) for a, b in itertools.pairwise((0, *cuts, len(costs)))]

    return balance


for label, score in {
    "least-sum-of-squares": lambda times: sum(time**2 for time in times),
    "least-spread": lambda times: max(times) - min(times),
}.items():
    mistake("balance-stages", label, expect="your slowest stage takes")(_by(score))


@alternative("balance-stages", "all-cuts-tried")
def brute_force(costs, parts):
    best = min(
        itertools.combinations(range(1, len(costs)), parts - 1),
        key=lambda cuts: max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs)))),
    )
    return [range(*pair) for pair in itertools.pairwise((0, *best, len(costs)))]


@alternative("balance-stages", "tries-caps")
def by_cap(costs, parts):
    """The smallest cap under which filling stages from the left needs no more than `parts`."""
    sums = sorted({sum(costs[a:b]) for a in range(len(costs)) for b in range(a + 1, len(costs) + 1)})
    for cap in sums:
        edges, held = [0], 0.0
        for layer, cost in enumerate(costs):
            needed = len(costs) - layer == parts - len(edges)  # one layer for each stage that has none yet
            if layer > edges[-1] and (held + cost > cap or needed):
                edges.append(layer)
                held = 0.0
            held += cost
        edges.append(len(costs))
        ranges = [range(*pair) for pair in itertools.pairwise(edges)]
        if len(ranges) == parts and max(sum(costs[layer] for layer in stage) for stage in ranges) <= cap:
            return ranges
    raise ValueError("more stages than layers")


@mistake("gpipe-order", "counts-from-1", expect="but microbatches are numbered 0 to")
def from_one(stage, stages, microbatches):
    return [f"{kind}{m}" for kind in "FB" for m in range(1, microbatches + 1)]
