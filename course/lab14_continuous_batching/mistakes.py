"""Spoilers of lab 14: batches that wait for their longest, plans that stall, overrun or skip."""

import heapq

from course.kit.exercises import KnownAnswers

# Join and leave

join_and_leave = KnownAnswers("join-and-leave")

join_and_leave.mistake(
    "static-batches",
    {"while waiting and len(running)": "starts = not running\n        while waiting and starts and len(running)"},
    expect="A free place is taken at once, not when the batch is done",
)
join_and_leave.mistake(
    "ended-rows-go-on-computing",
    {
        "while waiting and len(running)": "starts = not running\n        while waiting and starts and len(running)",
        "running = [request for request in running if left[request]]": (
            "if max(left[r] for r in running) <= 0:\n            running = []"
        ),
    },
    expect=r"is in \d+ batches and needs \d+ tokens",
)
join_and_leave.mistake(
    "place-free-one-step-late",
    {
        "        running = [request for request in running if left[request]]\n": "",
        ("        while waiting and len(running) < max_num_seqs:\n            running.append(waiting.pop(0))"): (
            "        free = max_num_seqs - len(running)\n"
            "        running = [request for request in running if left[request]] + waiting[:free]\n"
            "        del waiting[:free]"
        ),
    },
    expect="a place is free in step",
)
join_and_leave.mistake(
    "leaves-one-step-late",
    {"list(lengths)": "[length + 1 for length in lengths]"},
    expect=r"is in \d+ batches and needs \d+ tokens",
)
join_and_leave.mistake(
    "shortest-first",
    {"list(range(len(lengths)))": "sorted(range(len(lengths)), key=lengths.__getitem__)"},
    expect="first come, first served",
)
join_and_leave.mistake(
    "no-limit", {"waiting and len(running) < max_num_seqs": "waiting"}, expect=r"requests, and max_num_seqs is"
)


@join_and_leave.alternative("when-each-place-is-free")
def intervals(lengths, max_num_seqs):
    free_at, when = [0] * max_num_seqs, []
    for length in lengths:
        start = heapq.heappop(free_at)
        heapq.heappush(free_at, start + length)
        when.append(range(start, start + length))
    return [[r for r, steps in enumerate(when) if step in steps] for step in range(max(free_at))]


# A step under a budget

token_budget_step = KnownAnswers("token-budget-step")

token_budget_step.mistake(
    "prompts-first",
    {"[*decoding, *prompts": "[*prompts, *decoding"},
    expect="lacks one token and gets none: a prompt stalls it",
)
token_budget_step.mistake(
    "phases-never-mixed",
    {"[*decoding, *prompts": "[*prompts", "len(running))]]": "len(running))]] or decoding"},
    expect="lacks one token and gets none: a prompt stalls it",
)
token_budget_step.mistake(
    "no-chunk", {"num_computed, chunk, budget": "num_computed, budget"}, expect="more than a chunk"
)
token_budget_step.mistake(
    "counts-all-tokens",
    {"sequence.num_tokens - sequence.num_computed, chunk, budget": "sequence.num_tokens, chunk"},
    expect=r"gets \d+ tokens and lacks|more than (a chunk|the budget)",
)
token_budget_step.mistake(
    "only-what-fits-whole",
    {"        if tokens:": "        if tokens == sequence.num_tokens - sequence.num_computed:"},
    expect="has begun its prompt|left over|a later one is let in|which comes after it",
)
token_budget_step.mistake(
    "short-prompts-first",
    {"*waiting[:": "*sorted(waiting, key=lambda s: s.num_tokens - s.num_computed)[:"},
    expect="waits while a later one is let in|has begun its prompt|which comes after it",
)
token_budget_step.mistake(
    "no-limit", {"waiting[: max(0, max_num_seqs - len(running))]": "waiting"}, expect="are let in beside"
)
token_budget_step.mistake(
    "computes-while-planning",
    {"            budget -= tokens": "            budget -= tokens\n            sequence.num_computed += tokens"},
    expect="a plan only says what the step will compute",
)
token_budget_step.mistake(
    "budget-shared-out-evenly",
    {
        "    plan = []": "    shares = max(1, len(prompts) + min(len(waiting), max_num_seqs - len(running)))\n"
        "    even, plan = max(1, (budget - len(decoding)) // shares), []",
        "num_computed, chunk, budget": "num_computed, chunk, budget, even",
    },
    expect="which comes after it|left over|has begun its prompt",
)
token_budget_step.mistake(
    "names-the-sequences-running",
    {"            plan.append(": "            sequence.state = type(sequence.state).RUNNING\n            plan.append("},
    expect="your plan changes state",
)
token_budget_step.alternative(
    "one-sorted-line", {"*decoding, *prompts": "*sorted(running, key=lambda s: s.num_tokens - s.num_computed > 1)"}
)
