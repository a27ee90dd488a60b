"""Spoilers of lab 06: orders that wait for themselves, fill too much or too little; stages cut in the wrong place."""

import itertools

from course.kit import answers_of
from course.kit.exercises import KnownAnswers
from minillm.parallel.pipeline_parallel.schedule.schedules import one_f_one_b

ANSWERS = answers_of("06_pipeline_parallel")


# GPipe

gpipe_order = KnownAnswers("gpipe-order")


@gpipe_order.mistake("one-at-a-time", expect="takes 96 where 33 are enough")
def one_at_a_time(stage, stages, microbatches):
    return [f"{kind}{m}" for m in range(microbatches) for kind in "FB"]


gpipe_order.mistake(
    "last-backward-forgotten",
    {'[f"B{m}" for m in range(microbatches)]': '[f"B{m}" for m in range(microbatches - 1)]'},
    expect=r"B\d is missing",
)
gpipe_order.mistake(
    "backward-first", {'f"F{m}"': "f'B{m}'", 'f"B{m}"': "f'F{m}'"}, expect="does B0 before F0, which it needs"
)


@gpipe_order.mistake("first-stage-in-turns", expect="the ranks wait for each other")
def first_stage_in_turns(stage, stages, microbatches):
    return (ANSWERS.one_f_one_b_order if stage == 0 else ANSWERS.gpipe_order)(stage, stages, microbatches)


@gpipe_order.mistake("stages-disagree", expect="but the last stage makes gradients in the order")
def backwards_differ(stage, stages, microbatches):
    order = ANSWERS.gpipe_order(stage, stages, microbatches)
    return order[:microbatches] + order[microbatches:][:: -1 if stage % 2 else 1]


@gpipe_order.mistake("one-f-one-b", expect="GPipe does all forwards first")
def turns(stage, stages, microbatches):
    return ANSWERS.one_f_one_b_order(stage, stages, microbatches)


@gpipe_order.alternative("backwards-from-the-last-microbatch")
def last_in_first_out(stage, stages, microbatches):
    return [f"F{m}" for m in range(microbatches)] + [f"B{m}" for m in reversed(range(microbatches))]


# 1F1B

one_f_one_b_order = KnownAnswers("one-f-one-b-order")


@one_f_one_b_order.mistake("gpipe", expect="that is GPipe")
def gpipe(stage, stages, microbatches):
    return ANSWERS.gpipe_order(stage, stages, microbatches)


one_f_one_b_order.mistake("never-fills", {"min(stages - 1 - stage, microbatches)": "0"}, expect="takes .* are enough")
one_f_one_b_order.mistake(
    "same-on-all-stages", {"stages - 1 - stage": "stages - 1"}, expect=r"stage 1 holds 4 microbatches at once where 3"
)
one_f_one_b_order.mistake(
    "no-cooldown",
    {' + [f"B{m}" for m in range(microbatches - to_fill, microbatches)]': ""},
    expect=r"B5 is missing from the order of rank 0",
)
one_f_one_b_order.mistake(
    "more-fill-than-microbatches",
    {
        "min(stages - 1 - stage, microbatches)": "stages - 1 - stage",
        "range(microbatches - to_fill, microbatches)": "range(max(microbatches - to_fill, 0), microbatches)",
    },
    expect="4 stages, 2 microbatches: .*contains F2, but microbatches are numbered 0 to 1",
)
one_f_one_b_order.mistake(
    "backward-before-forward",
    {'f"F{to_fill + m}", f"B{m}"': 'f"B{m}", f"F{to_fill + m}"'},
    expect="the ranks wait for each other|before",
)
one_f_one_b_order.mistake(
    "backward-of-the-newest",
    {
        'f"F{to_fill + m}", f"B{m}"': 'f"F{to_fill + m}", f"B{to_fill + m}"',
        "range(microbatches - to_fill, microbatches)": "range(to_fill)",
    },
    expect="take them as they come",
)


@one_f_one_b_order.alternative("whatever-is-allowed-next")
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


@one_f_one_b_order.alternative("microbatches-from-the-last")
def from_the_last(stage, stages, microbatches):
    order = ANSWERS.one_f_one_b_order(stage, stages, microbatches)
    return [f"{action[0]}{microbatches - 1 - int(action[1:])}" for action in order]


@one_f_one_b_order.alternative("as-actions")
def as_actions(stage, stages, microbatches):
    return one_f_one_b(stages, microbatches).actions(stage)


# Balance

balance_stages = KnownAnswers("balance-stages")


@balance_stages.mistake("as-many-layers-each", expect="your slowest stage takes")
def equal_counts(costs, parts):
    edges = [part * len(costs) // parts for part in range(parts + 1)]
    return [range(*pair) for pair in itertools.pairwise(edges)]


@balance_stages.mistake("fills-up-to-the-mean", expect="gets no layer|your slowest stage takes")
def greedy(costs, parts):
    mean, edges, held = sum(costs) / parts, [0], 0.0
    for layer, cost in enumerate(costs):
        if held + cost > mean and len(edges) < parts:
            edges.append(layer)
            held = 0.0
        held += cost
    edges += [len(costs)] * (parts + 1 - len(edges))
    return [range(*pair) for pair in itertools.pairwise(edges)]


balance_stages.mistake(
    "last-layer-left-out",
    {
        "[range(a, b) for a, b in itertools.pairwise((0, *cuts, len(costs)))]": (
            "[range(a, b) for a, b in itertools.pairwise((0, *cuts, len(costs) - 1))]"
        )
    },
    expect="is not every layer once|gets no layer",
)
balance_stages.mistake(
    "numbers-instead-of-ranges", {"range(a, b)": "b - a"}, expect="the exercise asks for a list of ranges"
)
balance_stages.mistake(
    "least-sum-of-squares", {"max(sum(costs[a:b])": "sum(sum(costs[a:b]) ** 2"}, expect="your slowest stage takes"
)


@balance_stages.mistake("head-alone", expect="your slowest stage takes")
def head_alone(costs, parts):
    if parts == 1:
        return [range(len(costs))]
    return [*ANSWERS.balance(costs[:-1], parts - 1), range(len(costs) - 1, len(costs))]


balance_stages.mistake("every-other-layer", {"range(a, b)": "range(a, b, 2)"}, expect="is not every layer once")


@balance_stages.alternative("tries-caps")
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


gpipe_order.mistake(
    "counts-from-1", {'f"F{m}"': 'f"F{m + 1}"', 'f"B{m}"': 'f"B{m + 1}"'}, expect="but microbatches are numbered 0 to"
)
