"""Lab 18, the judge: which bug a program has, from what it logged."""

import random
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from itertools import product

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab18_distributed_serving import experiments_breaks as breaks


@exercise(
    "which-bug-ranks",
    minutes=20,
    difficulty=3,
    hints=(
        "Replay the log: how many tokens of each request are in the cache before a step, and how many are known? Which "
        "blocks does the link still read?",
        "computed starts at 0, is 0 again after a preemption, and every step begins there. A token is sampled exactly "
        "where first + count is all that is known: the prompt and the tokens sampled so far. freed between sending and "
        "sent is a bug. Compare the ranks' tokens as far as both have logged.",
    ),
)
def check_verdict(learner: Callable) -> Receipt:
    programs, judged = Counter(), Counter()
    forms = [(bug, form) for bug, count in breaks.FORMS.items() for form in range(count)]
    for world_size, (bug, form) in product((2, 4, random.choice((3, 8))), forms):
        seen = breaks.run(bug, world_size, form)
        before = deepcopy(seen)
        said = learner(seen)
        if seen != before:
            raise CheckFailed("seen is another after your call: a log is read, so count in something of your own")
        if said not in breaks.VERDICTS:
            told = ", ".join(map(repr, breaks.VERDICTS))
            raise CheckFailed(f"your verdict is {said!r:.60}: it must be one of {told}")
        if said != bug:
            raise CheckFailed(f"a program on {world_size} ranks: you say {said!r}, it is {bug!r}: {_say(bug, seen)}")
        programs[bug] += 1
        judged[said] += 1
    rows = [row(f"programs: {bug}", programs[bug], judged[bug]) for bug in reversed(breaks.VERDICTS)]
    return receipt("verdicts", rows, open_rows=4)


def _say(bug: str, seen: breaks.Seen) -> str:
    """Where the log shows it."""
    if bug == breaks.SAMPLES:
        place = next(i for i, pair in enumerate(zip(*seen.tokens[:2], strict=False)) if len(set(pair)) > 1)
        return f"token {place} is {seen.tokens[0][place]} on rank 0 and {seen.tokens[1][place]} on rank 1"
    if bug == breaks.FREED:
        reading: set[int] = set()
        for event in seen.events:
            if event[0] == "freed" and event[1] in reading:
                return f"block {event[1]} was freed while the link read it"
            if event[0] in ("sending", "sent"):
                (reading.add if event[0] == "sending" else reading.discard)(event[1])
    if bug == breaks.PHASES:
        return _first_wrong_step(seen)
    return "every step begins where the cache ends, every block is sent before it is freed, and the ranks agree"


def _first_wrong_step(seen: breaks.Seen) -> str:
    known, computed = dict(seen.prompts), dict.fromkeys(seen.prompts, 0)
    for what, name, *details in seen.events:
        if what == "preempted":
            computed[name] = 0
        if what == "step":
            first, count, sampled = details
            if first != computed[name] or sampled != (first + count == known[name]):
                cached = f"{computed[name]} of the {known[name]} tokens of {name} are in the cache"
                return f"{(what, name, *details)} is logged when {cached}"
            computed[name], known[name] = first + count, known[name] + sampled
    raise ValueError("every step is right")
