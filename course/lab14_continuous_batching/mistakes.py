"""Spoilers of lab 14: batches that wait for their longest, plans that stall, overrun or skip."""

import heapq

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake

ANSWERS = answers_of("14_continuous_batching")


# Join and leave


@mistake("join-and-leave", "static-batches", expect="A free place is taken at once, not when the batch is done")
def static_batches(lengths, max_num_seqs):
    steps = []
    for first in range(0, len(lengths), max_num_seqs):
        batch = range(first, min(first + max_num_seqs, len(lengths)))
        for step in range(max(lengths[r] for r in batch)):
            steps.append([r for r in batch if lengths[r] > step])
    return steps


@mistake("join-and-leave", "ended-rows-go-on-computing", expect=r"is in \d+ batches and needs \d+ tokens")
def padded(lengths, max_num_seqs):
    steps = []
    for first in range(0, len(lengths), max_num_seqs):
        batch = list(range(first, min(first + max_num_seqs, len(lengths))))
        steps += [batch] * max(lengths[r] for r in batch)
    return steps


@mistake("join-and-leave", "place-free-one-step-late", expect="a place is free in step")
def one_step_late(lengths, max_num_seqs):
    left, waiting, running, steps = list(lengths), list(range(len(lengths))), [], []
    while waiting or running:
        free = max_num_seqs - len(running)
        running = [r for r in running if left[r]]
        while waiting and free:
            running.append(waiting.pop(0))
            free -= 1
        if running:
            steps.append(list(running))
        for request in running:
            left[request] -= 1
    return steps


mistake(
    "join-and-leave",
    "leaves-one-step-late",
    {"list(lengths)": "[length + 1 for length in lengths]"},
    expect=r"is in \d+ batches and needs \d+ tokens",
)


@mistake("join-and-leave", "shortest-first", expect="first come, first served")
def shortest_first(lengths, max_num_seqs):
    order = sorted(range(len(lengths)), key=lambda r: lengths[r])
    steps = ANSWERS.continuous_batches([lengths[r] for r in order], max_num_seqs)
    return [[order[r] for r in step] for step in steps]


mistake(
    "join-and-leave",
    "no-limit",
    {"waiting and len(running) < max_num_seqs": "waiting"},
    expect=r"requests, and max_num_seqs is",
)


@alternative("join-and-leave", "when-each-place-is-free")
def intervals(lengths, max_num_seqs):
    free_at, when = [0] * max_num_seqs, []
    for length in lengths:
        start = heapq.heappop(free_at)
        heapq.heappush(free_at, start + length)
        when.append(range(start, start + length))
    return [[r for r, steps in enumerate(when) if step in steps] for step in range(max(free_at))]


# A step under a budget


def _num_uncomputed(sequence):
    return sequence.num_tokens - sequence.num_computed


def _deal(order, budget, chunk):
    plan = []
    for sequence in order:
        if tokens := min(_num_uncomputed(sequence), chunk, budget):
            plan.append((sequence, tokens))
            budget -= tokens
    return plan


mistake(
    "token-budget-step",
    "prompts-first",
    {"[*decoding, *prompts": "[*prompts, *decoding"},
    expect="lacks one token and gets none: a prompt stalls it",
)


@mistake("token-budget-step", "phases-never-mixed", expect="lacks one token and gets none: a prompt stalls it")
def phases(running, waiting, budget, chunk, max_num_seqs):
    prompts = [s for s in running if _num_uncomputed(s) > 1] + waiting[: max_num_seqs - len(running)]
    return _deal(prompts or running, budget, chunk)


mistake(
    "token-budget-step", "no-chunk", {"num_computed, chunk, budget": "num_computed, budget"}, expect="more than a chunk"
)


@mistake("token-budget-step", "counts-all-tokens", expect=r"gets \d+ tokens and lacks|more than (a chunk|the budget)")
def from_the_start(running, waiting, budget, chunk, max_num_seqs):
    order = sorted(running, key=lambda s: _num_uncomputed(s) > 1)
    return [(s, min(s.num_tokens, chunk)) for s in [*order, *waiting[: max_num_seqs - len(running)]]]


mistake(
    "token-budget-step",
    "only-what-fits-whole",
    {"        if tokens:": "        if tokens == sequence.num_tokens - sequence.num_computed:"},
    expect="has begun its prompt|left over|a later one is let in",
)
mistake(
    "token-budget-step",
    "short-prompts-first",
    {"*waiting[:": "*sorted(waiting, key=lambda s: s.num_tokens - s.num_computed)[:"},
    expect="waits while a later one is let in|has begun its prompt",
)
mistake(
    "token-budget-step",
    "no-limit",
    {"waiting[: max(0, max_num_seqs - len(running))]": "waiting"},
    expect="are let in beside",
)
mistake(
    "token-budget-step",
    "computes-while-planning",
    {"            budget -= tokens": "            budget -= tokens\n            sequence.num_computed += tokens"},
    expect="a plan only says what the step will compute",
)


@alternative("token-budget-step", "one-sorted-line")
def one_line(running, waiting, budget, chunk, max_num_seqs):
    line = sorted(running, key=lambda s: _num_uncomputed(s) > 1) + list(waiting)[: max(0, max_num_seqs - len(running))]
    return _deal(line, budget, chunk)
