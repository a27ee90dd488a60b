"""Distributed serving as it goes wrong: what six programs leave in their logs, four of them with a bug.

phases confused after preemption     a request that lost its cache goes on as if it had one, or answers too early
blocks freed before they are sent    the next prompt overwrites what the link has not read yet
rank 1 samples for itself            equal logits, another random number: the ranks' tokens part
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

RIGHT, PHASES, FREED, SAMPLES = VERDICTS = (
    "right", "phases confused after preemption", "blocks freed before they are sent", "rank 1 samples for itself",
)  # fmt: skip
BUGS = {"A": FREED, "B": RIGHT, "C": PHASES, "D": SAMPLES, "E": RIGHT, "F": PHASES}
OTHER_FORM = {"A": 2, "F": 1}  # programs whose bug takes another form than the first
NEVER_SENT = 40  # a block that is freed and was never handed over
Event = tuple


@dataclass(frozen=True)
class Seen:
    """What one program logged.

    events, in their order: ("step", request, first, count, sampled): tokens first .. first + count - 1 were computed,
    and whether a token was sampled; ("preempted", request): its blocks are gone; ("sending", block), ("sent", block):
    the link begins to read a block, and is done; ("freed", block). prompts: tokens of each request's prompt. tokens:
    by rank, those that it appended, in order; the ranks stopped within two steps of each other.
    """

    events: tuple[Event, ...]
    prompts: dict[str, int]
    tokens: tuple[tuple[int, ...], ...]


def run(bug: str, world_size: int = 2, form: int = 0) -> Seen:
    """form: of the bug, one of FORMS[bug]."""
    confused, second = None, False
    if bug == PHASES:
        second, number = divmod(form, len(PHASE_FORMS))
        confused = PHASE_FORMS[number]
    events, prompts = _steps(confused, bool(second))
    events = _with_blocks(events, form if bug == FREED else None)
    return Seen(tuple(events), prompts, _tokens(bug == SAMPLES, world_size, form))


# A preempted request's next step as it goes wrong: (tokens of its prompt, known, computed) -> first, end, sampled.

CHUNK = 8  # tokens of a step at most
Step = tuple[int, int, bool]


def goes_on_without_its_cache(prompt: int, known: int, computed: int) -> Step:
    return known - 1, known, True


def answers_early(prompt: int, known: int, computed: int) -> Step:
    """When its prompt ends, as if nothing had been written behind it."""
    end = min(computed + CHUNK, prompt)
    return computed, end, end == prompt


def keeps_its_prompt(prompt: int, known: int, computed: int) -> Step:
    """As if only the answer's blocks had been lost."""
    return prompt, known, True


def goes_on_behind_a_chunk(prompt: int, known: int, computed: int) -> Step:
    return (known - 1, known, True) if computed else _right(known, computed)


def writes_nothing(prompt: int, known: int, computed: int) -> Step:
    """Though all that is known has been computed."""
    return computed, min(computed + CHUNK, known), False


def _right(known: int, computed: int) -> Step:
    end = min(computed + CHUNK, known)
    return computed, end, end == known


PHASE_FORMS = (goes_on_without_its_cache, answers_early, keeps_its_prompt, goes_on_behind_a_chunk, writes_nothing)


def _steps(confused: Callable[[int, int, int], Step] | None, second: bool) -> tuple[list[Event], dict[str, int]]:
    """Requests that are prefilled in chunks, decode, are preempted and come again. confused: the step that goes wrong,
    once, after the first preemption or after the second of the same request."""
    prompts = {name: random.randint(6, 20) for name in "pqr"}
    known, computed = dict(prompts), dict.fromkeys(prompts, 0)
    events: list[Event] = []
    victim, first_preempted = "", random.choice("pqr")
    for tick in range(18):
        for name in "pqr"[: tick + 1]:
            step = right = _right(known[name], computed[name])
            if name == victim and confused:
                step = confused(prompts[name], known[name], computed[name])
                victim = name if step == right else ""
            first, end, sampled = step
            if first < end:  # else the request waits for a token that was never written
                events.append(("step", name, first, end - first, sampled))
                computed[name], known[name] = end, known[name] + sampled
        if tick in (6, 11):
            name = first_preempted if tick == 6 or second else random.choice("pqr")
            events.append(("preempted", name))
            computed[name] = 0
            if tick == (11 if second else 6):
                victim = name
    return events, prompts


# Two blocks, a and b, are on their way at once. Each program has all of the right orders.

RIGHT_ORDERS = (
    "sending a, sending b, sent a, freed a, sent b, freed b",
    "sending a, sending b, sent b, freed b, sent a, freed a",
    "sending a, sent a, sending b, freed a, sent b, freed b",
    "sending a, sent a, freed a, sending b, sent b, freed b",
)
WRONG_ORDERS = (
    "sending a, freed a",  # the log ends with it
    "sending a, sent a, freed a, sending b, freed b, sent b",  # in a block's second hand-over
    "sending a, sending b, freed a, sent a, sent b, freed b",
    "sending a, sending b, sent a, freed b, sent b, freed a",
)


def _with_blocks(events: list[Event], wrong: int | None) -> list[Event]:
    """Hand-overs among them: a block is read by the link, then free. The last two blocks are handed over again; one
    that never was is freed. wrong: the number of a wrong order, which takes a right one's place."""
    blocks = random.sample(range(NEVER_SENT), 6)
    orders = random.sample(RIGHT_ORDERS, 4)
    if wrong is not None:
        orders[3 if wrong == 1 else random.randrange(3)] = WRONG_ORDERS[wrong]
    found = [("freed", NEVER_SENT), *events]
    place = 1
    for number, order in enumerate(orders):
        named = dict(zip("ab", blocks[2 * number :] or random.sample(blocks, 2), strict=False))
        for each in order.split(", "):
            what, block = each.split()
            place = random.randint(place, min(len(found), place + 4))
            found.insert(place, (what, named[block]))
            place += 1
        if order == WRONG_ORDERS[0]:
            return found[:place]
    return found


def _tokens(apart: bool, world_size: int, form: int) -> tuple[tuple[int, ...], ...]:
    """Every rank's tokens; greedy ones agree also where each samples. apart: rank 1 parts from the others at five
    places, in form 1 at the last one that all have. Rank 0 has logged two less than rank 1, in odd forms two more."""
    whole = [random.randrange(4000) for _ in range(30)]
    places = [27] if form == 1 else random.sample(range(4, 26), 5)
    missing = [random.randint(0, 2) for _ in range(world_size)]
    missing[:2] = (0, 2) if form % 2 else (2, 0)
    found = []
    for rank in range(world_size):
        own = list(whole)
        for place in places if apart and rank == 1 else ():
            own[place] = (own[place] + random.randint(1, 3999)) % 4000
        found.append(tuple(own[: len(own) - missing[rank]]))
    return tuple(found)


FORMS = {RIGHT: 2, PHASES: 2 * len(PHASE_FORMS), FREED: len(WRONG_ORDERS), SAMPLES: 2}  # how many each verdict has


def all_programs(world_size: int = 2, seed: int = 5) -> dict[str, Seen]:
    """The six programs, always the same."""
    state = random.getstate()
    random.seed(seed)
    try:
        return {name: run(bug, world_size, OTHER_FORM.get(name, 0)) for name, bug in BUGS.items()}
    finally:
        random.setstate(state)
