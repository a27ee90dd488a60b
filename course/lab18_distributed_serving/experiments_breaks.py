"""Distributed serving as it goes wrong: what six programs leave in their logs, four of them with a bug.

phases confused after preemption     a request that lost its cache goes on as if it had one, or answers too early
blocks freed before they are sent    the next prompt overwrites what the link has not read yet
rank 1 samples for itself            equal logits, another random number: the ranks' tokens part
"""

import random
from dataclasses import dataclass

RIGHT, PHASES, FREED, SAMPLES = VERDICTS = (
    "right", "phases confused after preemption", "blocks freed before they are sent", "rank 1 samples for itself",
)  # fmt: skip
BUGS = {"A": FREED, "B": RIGHT, "C": PHASES, "D": SAMPLES, "E": RIGHT, "F": PHASES}
OTHER_FORM = "F"  # the program whose bug takes its other form
NEVER_SENT = 40  # a block that is freed and was never handed over
Event = tuple


@dataclass(frozen=True)
class Seen:
    """What one program logged.

    events, in their order: ("step", request, first, count, sampled): tokens first .. first + count - 1 were computed,
    and whether a token was sampled; ("preempted", request): its blocks are gone; ("sending", block), ("sent", block):
    the link begins to read a block, and is done; ("freed", block). prompts: tokens of each request's prompt. tokens:
    by rank, those that it appended, in order; the ranks stopped within a step of each other.
    """

    events: tuple[Event, ...]
    prompts: dict[str, int]
    tokens: tuple[tuple[int, ...], ...]


def run(bug: str, world_size: int = 2, other_form: bool = False) -> Seen:
    """other_form: phases confused: the request answers too early, instead of going on without its cache; freed: in the
    block's second hand-over, instead of at the end of the log."""
    events, prompts = _steps(bug == PHASES, answers_early=other_form)
    events = _with_blocks(events, bug == FREED, second=other_form)
    return Seen(tuple(events), prompts, _tokens(bug == SAMPLES, world_size))


def _steps(confused: bool, answers_early: bool) -> tuple[list[Event], dict[str, int]]:
    """Requests that are prefilled in chunks, decode, are preempted and come again."""
    prompts = {name: random.randint(6, 20) for name in "pqr"}
    known, computed = dict(prompts), dict.fromkeys(prompts, 0)
    events: list[Event] = []
    victim, ended = None, False
    for tick in range(14):
        for name in prompts:
            if tick < "pqr".index(name):
                continue
            missing = known[name] - computed[name]
            if confused and name == victim and not ended and not answers_early:
                first, count, ended = known[name] - 1, 1, True  # a decode step without a cache
            elif confused and name == victim and not ended:
                first, count = computed[name], min(missing, 8, prompts[name] - computed[name])
                ended = first + count == prompts[name]  # as if nothing had been written behind the prompt
            else:
                first, count = computed[name], min(missing, 8)
            sampled = first + count == known[name] or (confused and name == victim and ended)
            events.append(("step", name, first, count, sampled))
            computed[name] = first + count
            if sampled:
                known[name] += 1
            if confused and name == victim and ended:
                victim = None
        if tick in (6, 10):
            name = random.choice([name for name in prompts if known[name] > prompts[name] + 1])
            events.append(("preempted", name))
            computed[name] = 0
            victim = name if tick == 6 else victim
    return events, prompts


def _with_blocks(events: list[Event], early: bool, second: bool) -> list[Event]:
    """Hand-overs among them: a block is read by the link, then free. Two blocks are handed over again; one that never
    was is freed."""
    found = list(events)
    place = 0
    blocks = random.sample(range(NEVER_SENT), 6)
    order = blocks + random.sample(blocks, 2)
    wrong = (random.choice((6, 7)) if second else random.randrange(6)) if early else None
    for number, block in enumerate(order):
        forms = ("sending", "freed", "sent") if number == wrong else ("sending", "sent", "freed")
        for what in forms:
            place = random.randint(place, min(len(found), place + 4))
            found.insert(place, (what, block))
            place += 1
            if number == wrong and what == "freed" and not second:
                return [("freed", NEVER_SENT), *found[:place]]  # the log ends with it
    found.insert(random.randrange(len(found)), ("freed", NEVER_SENT))
    return found


def _tokens(apart: bool, world_size: int) -> tuple[tuple[int, ...], ...]:
    """Every rank's tokens. Ranks may have logged a step more or less; greedy ones agree also where each samples."""
    whole = [random.randrange(4000) for _ in range(30)]
    found = []
    for rank in range(world_size):
        own = list(whole)
        if apart and rank == 1:
            for place in sorted(random.sample(range(4, 26), 5)):
                own[place] = (own[place] + random.randint(1, 3999)) % 4000
        found.append(tuple(own[: len(own) - random.randint(0, 2)]))
    return tuple(found)


def all_programs(world_size: int = 2, seed: int = 5) -> dict[str, Seen]:
    """The six programs, always the same."""
    state = random.getstate()
    random.seed(seed)
    try:
        return {name: run(bug, world_size, name == OTHER_FORM) for name, bug in BUGS.items()}
    finally:
        random.setstate(state)
