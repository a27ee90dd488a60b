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


def run(bug: str, world_size: int = 2) -> Seen:
    events, prompts = _steps(bug == PHASES)
    events = _with_blocks(events, bug == FREED)
    return Seen(tuple(events), prompts, _tokens(bug == SAMPLES, world_size))


def _steps(confused: bool) -> tuple[list[Event], dict[str, int]]:
    """Requests that are prefilled in chunks, decode, are preempted and come again."""
    prompts = {name: random.randint(6, 20) for name in "pqr"}
    known, computed = dict(prompts), dict.fromkeys(prompts, 0)
    events: list[Event] = []
    answers_early = random.random() < 0.5  # of the bug's two forms
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


def _with_blocks(events: list[Event], early: bool) -> list[Event]:
    """Hand-overs among them: a block is read by the link, then free. A block may be handed over more than once."""
    found = list(events)
    place = 0
    blocks = random.sample(range(40), 6)
    wrong = random.choice(blocks) if early else None
    for block in blocks + random.sample(blocks, 2):
        order = ["sending", "sent", "freed"]
        if block == wrong:
            order, wrong = ["sending", "freed", "sent"], None
        for what in order:
            place = random.randint(place, min(len(found), place + 4))
            found.insert(place, (what, block))
            place += 1
            if order[1] == what == "freed" and random.random() < 0.5:
                return found[:place]  # the log ends with it
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
        return {name: run(bug, world_size) for name, bug in BUGS.items()}
    finally:
        random.setstate(state)
