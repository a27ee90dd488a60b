"""Spoilers of lab 14: batches that wait for their longest, plans that stall, overrun or skip."""

import heapq

from course.lab14_continuous_batching import checks as right
from minillm.labkit.exercises import alternative, mistake

# Join and leave


@mistake("join-and-leave", "static-batches", expect="A free seat is taken at once, not when the batch is done")
def static_batches(lengths, seats):
    steps = []
    for first in range(0, len(lengths), seats):
        batch = range(first, min(first + seats, len(lengths)))
        for step in range(max(lengths[r] for r in batch)):
            steps.append([r for r in batch if lengths[r] > step])
    return steps


@mistake("join-and-leave", "ended-rows-go-on-computing", expect=r"is in \d+ batches and needs \d+ tokens")
def padded(lengths, seats):
    steps = []
    for first in range(0, len(lengths), seats):
        batch = list(range(first, min(first + seats, len(lengths))))
        steps += [batch] * max(lengths[r] for r in batch)
    return steps


@mistake("join-and-leave", "seat-free-one-step-late", expect="a seat is free in step")
def one_step_late(lengths, seats):
    left, waiting, running, steps = list(lengths), list(range(len(lengths))), [], []
    while waiting or running:
        free = seats - len(running)
        running = [r for r in running if left[r]]
        while waiting and free:
            running.append(waiting.pop(0))
            free -= 1
        if running:
            steps.append(list(running))
        for request in running:
            left[request] -= 1
    return steps


@mistake("join-and-leave", "leaves-one-step-late", expect=r"is in \d+ batches and needs \d+ tokens")
def one_token_too_many(lengths, seats):
    return right.continuous_batches([length + 1 for length in lengths], seats)


@mistake("join-and-leave", "shortest-first", expect="first come, first served")
def shortest_first(lengths, seats):
    order = sorted(range(len(lengths)), key=lambda r: lengths[r])
    steps = right.continuous_batches([lengths[r] for r in order], seats)
    return [[order[r] for r in step] for step in steps]


@mistake("join-and-leave", "seats-not-counted", expect=r"has \d+ requests in \d+ seats")
def everybody_at_once(lengths, seats):
    return right.continuous_batches(lengths, len(lengths))


@alternative("join-and-leave", "when-each-seat-is-free")
def intervals(lengths, seats):
    free_at, when = [0] * seats, []
    for length in lengths:
        start = heapq.heappop(free_at)
        heapq.heappush(free_at, start + length)
        when.append(range(start, start + length))
    return [[r for r, steps in enumerate(when) if step in steps] for step in range(max(free_at))]


# A step under a budget


def _lacking(sequence):
    return sequence.num_tokens - sequence.num_computed


def _deal(order, budget, chunk):
    plan = []
    for sequence in order:
        if tokens := min(_lacking(sequence), chunk, budget):
            plan.append((sequence, tokens))
            budget -= tokens
    return plan


@mistake("token-budget-step", "prompts-first", expect="lacks one token and gets none: a prompt stalls it")
def prompts_first(running, waiting, budget, chunk, seats):
    return _deal([*sorted(running, key=_lacking, reverse=True), *waiting[: seats - len(running)]], budget, chunk)


@mistake("token-budget-step", "phases-never-mixed", expect="lacks one token and gets none: a prompt stalls it")
def phases(running, waiting, budget, chunk, seats):
    prompts = [s for s in running if _lacking(s) > 1] + waiting[: seats - len(running)]
    return _deal(prompts or running, budget, chunk)


@mistake("token-budget-step", "whole-prompts", expect="more than (a chunk|the budget)")
def whole_prompts(running, waiting, budget, chunk, seats):
    return [(s, _lacking(s)) for s in [*running, *waiting[: seats - len(running)]]]


@mistake("token-budget-step", "no-chunk", expect="more than a chunk")
def no_chunk(running, waiting, budget, chunk, seats):
    order = sorted(running, key=lambda s: _lacking(s) > 1)
    return _deal([*order, *waiting[: seats - len(running)]], budget, budget)


@mistake("token-budget-step", "counts-all-tokens", expect=r"gets \d+ tokens and lacks|more than (a chunk|the budget)")
def from_the_start(running, waiting, budget, chunk, seats):
    order = sorted(running, key=lambda s: _lacking(s) > 1)
    return [(s, min(s.num_tokens, chunk)) for s in [*order, *waiting[: seats - len(running)]]]


@mistake(
    "token-budget-step",
    "only-what-fits-whole",
    expect="has begun its prompt|left over|a later one is let in",
)
def only_whole(running, waiting, budget, chunk, seats):
    plan = []
    for s in [*sorted(running, key=lambda s: _lacking(s) > 1), *waiting[: seats - len(running)]]:
        if _lacking(s) <= min(chunk, budget):
            plan.append((s, _lacking(s)))
            budget -= _lacking(s)
    return plan


@mistake("token-budget-step", "short-prompts-first", expect="waits while a later one is let in|has begun its prompt")
def short_first(running, waiting, budget, chunk, seats):
    queue = sorted(waiting, key=_lacking)[: max(0, seats - len(running))]
    return _deal([*sorted(running, key=lambda s: _lacking(s) > 1), *queue], budget, chunk)


@mistake("token-budget-step", "seats-forgotten", expect="are let in beside")
def no_seats(running, waiting, budget, chunk, seats):
    return _deal([*sorted(running, key=lambda s: _lacking(s) > 1), *waiting], budget, chunk)


@mistake("token-budget-step", "computes-while-planning", expect="a plan only says what the step will compute")
def advances(running, waiting, budget, chunk, seats):
    plan = right.plan_step(running, waiting, budget, chunk, seats)
    for sequence, tokens in plan:
        sequence.num_computed += tokens
    return plan


@alternative("token-budget-step", "one-sorted-line")
def one_line(running, waiting, budget, chunk, seats):
    line = sorted(running, key=lambda s: _lacking(s) > 1) + list(waiting)[: max(0, seats - len(running))]
    return _deal(line, budget, chunk)
