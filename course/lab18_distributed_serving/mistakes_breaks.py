"""Spoilers of lab 18: verdicts that miss a bug in a program's log, or find one that is none."""

from course.kit.exercises import KnownAnswers

which_bug_ranks = KnownAnswers("which-bug-ranks")

which_bug_ranks.mistake(
    "a step may begin anywhere",
    {"if first != computed[request] or sampled != (first + count == known[request]):":
     "if sampled != (first + count == known[request]):"},
    expect="it is 'phases confused after preemption'",
)  # fmt: skip
which_bug_ranks.mistake(
    "a token may come at any time",
    {" or sampled != (first + count == known[request]):": ":"},
    expect="it is 'phases confused after preemption'",
)
which_bug_ranks.mistake(
    "a preemption costs nothing",
    {"computed[details[0]] = 0": "pass"},
    expect="you say 'phases confused after preemption'",
)
which_bug_ranks.mistake(
    "only the prompt is known",
    {"known[request] += sampled": "pass"},
    expect="you say 'phases confused after preemption'",
)
which_bug_ranks.mistake(
    "a block is read once",
    {"reading.discard(details[0])": "pass"},
    expect="you say 'blocks freed before they are sent'",
)
which_bug_ranks.mistake(
    "ranks that stopped elsewhere",
    {"if any(len(set(tokens)) > 1 for tokens in zip(*seen.tokens, strict=False)):": "if len(set(seen.tokens)) > 1:"},
    expect="you say 'rank 1 samples for itself'",
)
which_bug_ranks.mistake(
    "the first token of each rank",
    {"zip(*seen.tokens, strict=False)": "list(zip(*seen.tokens, strict=False))[:1]"},
    expect="it is 'rank 1 samples for itself'",
)
which_bug_ranks.mistake(
    "sent once, sent for ever",
    {
        "seen.prompts, 0), set()": "seen.prompts, 0), set()\n    sent = set()",
        "reading.discard(details[0])": "sent.add(details[0])",
        "elif details[0] in reading:": "elif details[0] in reading - sent:",
    },
    expect="it is 'blocks freed before they are sent'",
)
which_bug_ranks.mistake(
    "one block on the link",
    {"reading.add(details[0])": "reading = {details[0]}"},
    expect="it is 'blocks freed before they are sent'",
)
which_bug_ranks.mistake(
    "a token that is missing",
    {"sampled != (first + count == known[request])": "sampled > (first + count == known[request])"},
    expect="it is 'phases confused after preemption'",
)
which_bug_ranks.mistake(
    "only the first step behind a preemption",
    {"if first != computed[request] or": "if (first and not computed[request]) or"},
    expect="it is 'phases confused after preemption'",
)
which_bug_ranks.mistake(
    "the first twenty tokens",
    {"zip(*seen.tokens, strict=False)": "list(zip(*seen.tokens, strict=False))[:20]"},
    expect="it is 'rank 1 samples for itself'",
)
which_bug_ranks.mistake(
    "only what was sent may be freed",
    {
        "reading.add(details[0])": "reading.discard(details[0])",
        "            reading.discard(details[0])\n        elif details[0] in reading:":
        "            reading.add(details[0])\n        elif details[0] not in reading:",
    },
    expect="you say 'blocks freed before they are sent'",
)  # fmt: skip


@which_bug_ranks.alternative("one question after the other")
def by_question(seen):
    cached, text = dict.fromkeys(seen.prompts, 0), dict(seen.prompts)
    for event in seen.events:
        if event[0] == "preempted":
            cached[event[1]] = 0
        if event[0] == "step":
            _, name, first, count, sampled = event
            if first != cached[name] or (first + count == text[name]) is not sampled:
                return "phases confused after preemption"
            cached[name], text[name] = first + count, text[name] + int(sampled)
    last = {}
    for event in seen.events:
        if event[0] == "freed" and last.get(event[1]) == "sending":
            return "blocks freed before they are sent"
        if event[0] in ("sending", "sent"):
            last[event[1]] = event[0]
    shortest = min(map(len, seen.tokens))
    same = len({tokens[:shortest] for tokens in seen.tokens}) == 1
    return "right" if same else "rank 1 samples for itself"
