"""Lab 01, collectives: ring, tree, two levels and all-to-all, from messages between two ranks.

Every check tries the learner's function on groups of 1 to 5 real ranks with fresh inputs, and on one larger group whose
size is drawn, and asks: are the values right, did the messages do it, and did they carry as many bytes as the formula
says?
"""

import random
from collections.abc import Callable
from functools import partial

import torch

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, Row, receipt, row
from course.lab01_collectives import judge
from course.shared.diagnose import expect_like, say_parts, say_rounded, say_sum
from course.shared.trials import refuse_ready_made
from minillm.predict import comms


@exercise(
    "ring-reduce-scatter",
    minutes=15,
    difficulty=3,
    hints=(
        "Follow one chunk, not one rank. Chunk c must visit every rank once and be added to at each stop. "
        "At which rank must its journey end, and so where does it begin?",
        "Chunk c ends on rank c, so it starts on rank c+1. Turned around: in round s (from 0 to N-2) rank r sends its "
        "partial sum of chunk r-s-1 to the right and adds what comes from the left to chunk r-s-2, all modulo N.",
    ),
)
def check_reduce_scatter(learner: Callable) -> Receipt:
    cases = [*judge.draw_cases(), *judge.draw_larger()]
    trials = judge.try_on_groups(learner, cases)
    for case, ranks in zip(cases, trials, strict=True):
        total = torch.stack(list(case.inputs)).sum(0).chunk(case.world_size)
        for rank, trial in enumerate(ranks):
            expect_like(judge.who(rank, case), trial.result, total[rank], "its own chunk of the sum, [n / world_size]")
            if not torch.equal(trial.result.flatten(), total[rank]):
                said = say_rounded(trial.result, total[rank])
                said = said or say_sum(trial.result.flatten(), case.inputs, rank, case.world_size)
                raise CheckFailed(f"{judge.who(rank, case)} returned a wrong chunk: {said}")
    refuse_ready_made(trials)
    advice = "in each round send one chunk, not the whole tensor"
    rows = judge.byte_rows(cases, trials, comms.ring_reduce_scatter, advice)
    judge.neighbours_only(cases, trials)
    return receipt("ring reduce-scatter: P(N-1)/N bytes per rank", [*rows, *judge.message_rows(cases, trials)])


@exercise(
    "ring-all-gather",
    minutes=10,
    difficulty=2,
    hints=(
        "Each rank starts with one chunk and passes on, in every round, the chunk that it received last.",
        "In round s rank r sends chunk r-s to the right and receives chunk r-s-1 from the left, modulo N. "
        "Chunks can be received where they belong: no extra buffer is needed.",
    ),
)
def check_all_gather(learner: Callable) -> Receipt:
    cases = [*judge.draw_cases(), *judge.draw_larger()]
    trials = judge.try_on_groups(learner, cases)
    for case, ranks in zip(cases, trials, strict=True):
        known, wanted = {f"rank {r}'s tensor": x for r, x in enumerate(case.inputs)}, torch.cat(list(case.inputs))
        for rank, trial in enumerate(ranks):
            expect_like(judge.who(rank, case), trial.result, wanted, "all ranks' tensors in rank order")
            if not torch.equal(trial.result.flatten(), wanted):
                said = say_parts(trial.result, case.inputs, known)
                said = say_rounded(trial.result, wanted) or f"{said}, not rank {said[6]}'s tensor"
                raise CheckFailed(f"{judge.who(rank, case)} gathered wrongly: {said}")
    refuse_ready_made(trials)
    advice = "pass on only the chunk that came last, not everything you have"
    rows = judge.byte_rows(cases, trials, _gathered(comms.ring_all_gather), advice)
    judge.neighbours_only(cases, trials)
    return receipt("ring all-gather: P(N-1)/N bytes per rank", [*rows, *judge.message_rows(cases, trials)])


def _gathered(cost: Callable[..., comms.Cost]) -> Callable[..., comms.Cost]:
    """The cost of a gather by the size of what one rank brings."""
    return lambda num_elements, itemsize, world_size: cost(num_elements * world_size, itemsize, world_size)


@exercise(
    "ring-all-reduce",
    changes=("x",),
    minutes=5,
    difficulty=1,
    hints=(
        "You have written everything it needs.",
        "Reduce-scatter leaves each rank one chunk of the sum; all-gather brings all chunks to everybody. "
        "The mean is cheapest where the tensor is smallest, between the two.",
    ),
)
def check_all_reduce(learner: Callable) -> Receipt:
    cases = [*judge.draw_cases(), *judge.draw_larger()]
    means = [*judge.draw_cases(("avg",), worlds=(4, 3, 5)), *judge.draw_larger(("avg",))]
    trials = judge.try_on_groups(learner, [*cases, *means])
    for case, ranks in zip([*cases, *means], trials, strict=True):
        total = torch.stack(list(case.inputs)).sum(0)
        wanted = total / case.world_size if case.arguments else total
        for rank, trial in enumerate(ranks):
            name = judge.who(rank, case) + (' with op="avg"' if case.arguments else "")
            judge.in_place(name, trial, case.inputs[rank], wanted, partial(judge.say_all_reduce, case))
        judge.same_bits(case, ranks)
    refuse_ready_made(trials)
    sums, advice = trials[: len(cases)], "reduce-scatter first, then gather only finished chunks"
    rows = judge.byte_rows(cases, sums, comms.ring_all_reduce, advice)
    judge.byte_rows(means, trials[len(cases) :], comms.ring_all_reduce, f'with op="avg": {advice}')
    judge.neighbours_only([*cases, *means], trials)
    return receipt("ring all-reduce: 2P(N-1)/N bytes per rank", [*rows, *judge.message_rows(cases, sums, laps=2)])


@exercise(
    "tree-broadcast",
    changes=("x",),
    minutes=15,
    difficulty=3,
    hints=(
        "After the first round two ranks have the tensor. Nothing keeps both from sending in the second.",
        "Number the ranks from the root: place = (rank - root) % N. In the round with distance d = 1, 2, 4, ... every "
        "place below d sends to place + d (if there is one), and places d to 2d-1 receive from place - d.",
    ),
)
def check_broadcast(learner: Callable) -> Receipt:
    cases = judge.draw_cases((0,), worlds=(*judge.WORLDS, 7, 8), divisible=False)
    for world in (4, 5):
        cases += judge.draw_cases((random.randrange(1, world),), worlds=(world,), divisible=False)
    cases += judge.draw_larger((0,), worlds=(9, 10), divisible=False)
    trials = judge.try_on_groups(learner, cases)
    for case, ranks in zip(cases, trials, strict=True):
        (root,) = case.arguments
        for rank in sorted(range(case.world_size), key=lambda rank: rank != root):
            name, say = f"{judge.who(rank, case)} with root={root}", partial(judge.say_broadcast, case, rank)
            judge.in_place(name, ranks[rank], case.inputs[rank], case.inputs[root], say)
    refuse_ready_made(trials)
    judged = [(case, judge.judge_tree(case, ranks)) for case, ranks in zip(cases, trials, strict=True)]
    rows = [row for case, rows in judged if 2 < case.world_size < 9 for row in rows]
    return receipt("tree broadcast: P(N-1) bytes in ceil(log2 N) rounds", rows)


@exercise(
    "hierarchical-all-reduce",
    changes=("x",),
    minutes=10,
    difficulty=3,
    hints=(
        "Which part of the tensor does each rank have to take across to the other nodes, if the ranks of a node share "
        "that work?",
        "First reduce-scatter inside the node: each rank then holds 1/g of the node's sum. That part goes across, "
        "where g rings run side by side, one per place in the node. Then gather inside the node.",
    ),
)
def check_hierarchical(learner: Callable) -> Receipt:
    layouts, cases = judge.draw_layouts()
    trials = judge.try_on_nodes(learner, layouts, cases)
    for (nodes, per_node), case, ranks in zip(layouts, cases, trials, strict=True):
        for rank, trial in enumerate(ranks):
            name, total = f"rank {rank} of {nodes} nodes of {per_node}", torch.stack(list(case.inputs)).sum(0)
            say = partial(judge.say_two_level, case, rank, per_node)
            judge.in_place(name, trial, case.inputs[rank], total, say)
    refuse_ready_made(trials)
    judged = [judge.judge_two_level(*found) for found in zip(layouts, cases, trials, strict=True)]
    return receipt("two-level all-reduce: few bytes leave the node", [row for rows in judged for row in rows])


@exercise(
    "all-to-all",
    minutes=10,
    difficulty=2,
    hints=(
        "Rank r has one part for each rank, and wants one part from each. No ring: send each part straight there.",
        "In round s, from 1 to N-1, send to the rank s places to the right and receive from the rank s places to the "
        "left: every rank then sends one and receives one. Your own part you copy.",
    ),
)
def check_all_to_all(learner: Callable) -> Receipt:
    cases = [*judge.draw_cases(), *judge.draw_larger()]
    trials = judge.try_on_groups(learner, cases)
    for case, ranks in zip(cases, trials, strict=True):
        n = case.world_size
        known = {f"part {j} of rank {i}": x.chunk(n)[j] for i, x in enumerate(case.inputs) for j in range(n)}
        for rank, trial in enumerate(ranks):
            name, wanted = judge.who(rank, case), [x.chunk(n)[rank] for x in case.inputs]
            expect_like(name, trial.result, case.inputs[rank], "one part from every rank, as large as x")
            if not torch.equal(trial.result.flatten(), torch.cat(wanted)):
                said = f"{say_parts(trial.result, wanted, known)}; place i is for part {rank} of rank i"
                said = say_rounded(trial.result, torch.cat(wanted)) or said
                raise CheckFailed(f"{name} holds the wrong parts: {said}")
    refuse_ready_made(trials)
    rows = judge.byte_rows(cases, trials, comms.pairwise_all_to_all, "send each rank only the part that is for it")
    return receipt("all-to-all: P(N-1)/N bytes per rank", [*rows, *judge.message_rows(cases, trials)])


@exercise(
    "find-the-culprit",
    minutes=5,
    difficulty=2,
    hints=(
        "The rank that most others wait for need not be the one: it may be waiting itself.",
        "Go from a rank to one that it waits for, and on: the culprit is waited for, and waits for nobody. In a circle "
        "there is no such rank.",
    ),
)
def check_culprit(learner: Callable) -> list[Row]:
    low, *middle, high = sorted(random.sample(range(100), 6))
    a, b, c, d = random.sample(middle, 4)
    tables = {
        "a collective that one rank never enters": ({b: [a], c: [a], d: [a], high: [a], a: []}, a),
        "the lowest rank, which all wait for": ({low: [], b: [low], c: [low, b], d: [low]}, low),
        "the highest rank, which all wait for": ({high: [], b: [high], c: [high, b], d: [high]}, high),
        "a chain of receives": ({b: [low], low: [d], d: [a], a: []}, a),
        "a long chain of receives": ({b: [low], low: [d], d: [high], high: [c], c: [a], a: []}, a),
        "most wait for one who waits itself": ({b: [high], c: [high], d: [high], high: [a], a: []}, a),
        "a rank waits for two, one of which waits for it": ({b: [c], c: [b, a], d: [b], a: []}, a),
        "the same, the other way round": ({b: [c], c: [a, b], d: [b], a: []}, a),
        "the lowest rank has finished": ({low: [], b: [a], c: [a], a: []}, a),
        "the highest rank has finished": ({high: [], b: [a], c: [a], a: []}, a),
        "a circle, and above it a rank that others wait for": (
            {low: [a], a: [low], c: [high], d: [high], high: []},
            high,
        ),
        "a circle, and below it a rank that others wait for": (
            {a: [high], high: [a], c: [low], d: [low], low: []},
            low,
        ),
        "a circle of sends": ({a: [b], b: [c], c: [d], d: [a]}, None),
        "a circle, and a rank outside that waits for one of it": ({low: [b], a: [b], b: [c], c: [a]}, None),
        "a circle, and a rank that has finished": ({low: [], a: [b], b: [c], c: [a]}, None),
    }
    rows = []
    for name, (table, answer) in tables.items():
        found = learner(dict(sorted(table.items())))
        rows.append(row(name, "none" if answer is None else answer, "none" if found is None else found))
        if found != answer:
            raise CheckFailed(judge.say_culprit(name, dict(sorted(table.items())), found, answer), rows)
    return rows
