"""Spoilers of lab 14: batches that wait for their longest, plans that stall, overrun or skip."""

import heapq

from course.kit.exercises import alternative, mistake

# Join and leave


mistake(
    "join-and-leave",
    "static-batches",
    {"while waiting and len(running)": "starts = not running\n        while waiting and starts and len(running)"},
    expect="A free place is taken at once, not when the batch is done",
)
mistake(
    "join-and-leave",
    "ended-rows-go-on-computing",
    {
        "while waiting and len(running)": "starts = not running\n        while waiting and starts and len(running)",
        "running = [request for request in running if left[request]]": "if max(left[r] for r in running) <= 0:\n"
        "            running = []",
    },
    expect=r"is in \d+ batches and needs \d+ tokens",
)
mistake(
    "join-and-leave",
    "place-free-one-step-late",
    {
        "        running = [request for request in running if left[request]]\n": "",
        "        while waiting and len(running) < max_num_seqs:\n"
        "            running.append(waiting.pop(0))": "        free = max_num_seqs - len(running)\n"
        "        running = [request for request in running if left[request]] + waiting[:free]\n"
        "        del waiting[:free]",
    },
    expect="a place is free in step",
)
mistake(
    "join-and-leave",
    "leaves-one-step-late",
    {"list(lengths)": "[length + 1 for length in lengths]"},
    expect=r"is in \d+ batches and needs \d+ tokens",
)
mistake(
    "join-and-leave",
    "shortest-first",
    {"list(range(len(lengths)))": "sorted(range(len(lengths)), key=lengths.__getitem__)"},
    expect="first come, first served",
)
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


mistake(
    "token-budget-step",
    "prompts-first",
    {"[*decoding, *prompts": "[*prompts, *decoding"},
    expect="lacks one token and gets none: a prompt stalls it",
)
mistake(
    "token-budget-step",
    "phases-never-mixed",
    {"[*decoding, *prompts": "[*prompts", "len(running))]]": "len(running))]] or decoding"},
    expect="lacks one token and gets none: a prompt stalls it",
)
mistake(
    "token-budget-step", "no-chunk", {"num_computed, chunk, budget": "num_computed, budget"}, expect="more than a chunk"
)
mistake(
    "token-budget-step",
    "counts-all-tokens",
    {"sequence.num_tokens - sequence.num_computed, chunk, budget": "sequence.num_tokens, chunk"},
    expect=r"gets \d+ tokens and lacks|more than (a chunk|the budget)",
)
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
alternative(
    "token-budget-step",
    "one-sorted-line",
    {"*decoding, *prompts": "*sorted(running, key=lambda s: s.num_tokens - s.num_computed > 1)"},
)
