"""Lab 18, the judge: which bug a program has, from what it logged."""

import random
from collections.abc import Callable
from copy import deepcopy

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
    rows = []
    for world_size in (2, 4, random.choice((3, 8))):
        forms = [(bug, False) for bug in breaks.VERDICTS]
        for bug, other in (*forms, (breaks.RIGHT, False), (breaks.PHASES, True), (breaks.FREED, True)):
            seen = breaks.run(bug, world_size, other)
            before = deepcopy(seen)
            said = learner(seen)
            if seen != before:
                raise CheckFailed("seen is another after your call: a log is read, so count in something of your own")
            if said not in breaks.VERDICTS:
                told = ", ".join(map(repr, breaks.VERDICTS))
                raise CheckFailed(f"your verdict is {said!r:.60}: it must be one of {told}")
            if said != bug:
                raise CheckFailed(
                    f"a program on {world_size} ranks: you say {said!r}, it is {bug!r}: {_say(bug, seen)}", rows
                )
            rows.append(row(f"{world_size} ranks: a program", bug, said))
    return receipt("verdicts", rows)


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
        event = next(event for event in seen.events if event[0] == "preempted")
        return f"after {event} a step does not begin at 0, or samples too early"
    return "every step begins where the cache ends, every block is sent before it is freed, and the ranks agree"
