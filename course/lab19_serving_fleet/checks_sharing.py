"""Lab 19: a queue that is fair among tenants, and a ring that keeps prefixes together without drowning a replica."""

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.shared.diagnose import expect


class _Request:
    """As requests are in a fleet: nothing orders two of them."""

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return self.name

    def __lt__(self, other) -> bool:
        raise CheckFailed("two requests are compared, and requests have no order: the oldest is the one pushed first")

    __gt__ = __le__ = __ge__ = __lt__


@exercise(
    "fair-queue",
    minutes=25,
    difficulty=3,
    hints=(
        "A tenant that sends nothing all night has the smallest counter in the morning. What would the queue do with "
        "the others then, and for how long? When exactly does push have to prevent it?",
        "push, if nothing of this tenant waits: counter = max(counter, floor). The floor is the smallest counter among "
        "tenants that wait, else the counter of whoever's queue became empty last. pop: the smallest counter.",
    ),
)
def check_fair(learner: Callable) -> Receipt:
    queue = learner()
    if queue.pop() is not None:
        raise CheckFailed("pop of an empty queue gives None")
    for _ in range(60):
        _drive(learner(), random.randint(2, 5))
    _hold_apart(learner)
    rows = []
    received = _busy(learner(), {"small": (10, 10), "large": (100, 300)})
    rows.append(
        row("always busy, requests of 20 and 400 tokens: shares", 1.0, received["large"] / received["small"], "", 0.02)
    )
    received = _back_after_a_pause(learner())
    rows.append(
        row("one was away for 1,000 turns: shares after it is back", 1.0, received["away"] / received["here"], "", 0.05)
    )
    return receipt("tokens that tenants received", rows)


def _hold_apart(learner: Callable) -> None:
    """A queue that is made meanwhile changes nothing of another."""
    queue = learner()
    for tenant in ("ada", "alan"):
        queue.push(tenant, tenant)
    queue.charge("ada", 100)
    learner().push("grace", "grace")
    found = [queue.pop(), queue.pop(), queue.pop()]
    right = [("alan", "alan"), ("ada", "ada"), None]
    learner()
    for tenant in ("barbara", "ada"):  # barbara is raised to ada, who left last: both have 100
        queue.push(tenant, tenant)
    found.append(queue.pop())
    right.append(("ada", "ada"))
    expect(all(each is None or isinstance(each, tuple | list) for each in found), found, "(tenant, request), or None")
    found = [each if each is None else tuple(each) for each in found]
    if found != right:
        raise CheckFailed(f"with a second queue made meanwhile, pop gave {found}, and right is {right}", evidence=found)


class _Reference:
    """The same by one list of all requests, in order of arrival."""

    def __init__(self):
        self.requests, self.counters, self.last = [], {}, None

    def push(self, tenant, request):
        waiting = {name for name, _ in self.requests}
        if tenant not in waiting:
            floors = [self.counters[name] for name in waiting] or [self.counters.get(self.last, 0.0)]
            self.counters[tenant] = max(self.counters.get(tenant, 0.0), min(floors))
        self.requests.append((tenant, request))

    def pop(self):
        if not self.requests:
            return None
        chosen = min((self.counters[name], name) for name, _ in self.requests)[1]
        found = next(each for each in self.requests if each[0] == chosen)
        self.requests.remove(found)
        if all(name != chosen for name, _ in self.requests):
            self.last = chosen
        return found

    def charge(self, tenant, tokens):
        self.counters[tenant] = self.counters.get(tenant, 0.0) + tokens


def _drive(queue, tenants: int) -> None:
    """Pushes, pops and charges in any order: a tenant is charged while its answer comes, other pops in between."""
    reference, story, answering = _Reference(), [], []
    popped, wrong, number = [], "", 0
    names = random.sample(["ada", "alan", "grace", "edsger", "barbara"], tenants)
    while number < (240 if wrong else 60):  # a wrong one goes on: what it gives tells which mistake it is
        number += 1
        what = random.random()
        if what < 0.43:
            tenant, request = random.choice(names), _Request(f"request {number}")
            story.append(f"push {tenant}")
            queue.push(tenant, request)
            reference.push(tenant, request)
            continue
        if what < 0.57 and answering:
            _charge(random.choice(answering), queue, reference, story)
            continue
        found, right = queue.pop(), reference.pop()
        expect(
            found is None or (isinstance(found, tuple | list) and len(found) == 2), found, "(tenant, request), or None"
        )
        found = None if found is None else tuple(found)
        if found != right:
            counters = ", ".join(f"{name} {count:g}" for name, count in sorted(reference.counters.items()))
            said = f"after {'; '.join(story[-8:])}: pop gave {found}, and right is {right} (counters: {counters})."
            wrong = wrong or said
        popped.append(repr(found))  # by name: a request equals only itself
        story.append("pop" if right is None else f"pop {right[0]}")
        if right is not None:
            answering.append(right[0])
            if random.random() < 0.5:
                _charge(right[0], queue, reference, story)
    if wrong:
        raise CheckFailed(wrong, evidence=popped)


def _charge(tenant: str, queue, reference: _Reference, story: list[str]) -> None:
    tokens = random.randint(1, 200)
    story.append(f"charge {tenant} {tokens}")
    queue.charge(tenant, tokens)
    reference.charge(tenant, tokens)


def _busy(queue, sizes: dict[str, tuple[int, int]]) -> Counter:
    received: Counter = Counter()
    for name in sizes:
        for _ in range(3):
            queue.push(name, _Request(name))
    for _ in range(2000):
        tenant, _ = queue.pop()
        for tokens in sizes[tenant]:
            queue.charge(tenant, tokens)
            received[tenant] += tokens
        queue.push(tenant, _Request(tenant))
    return received


def _back_after_a_pause(queue) -> Counter:
    received: Counter = Counter()
    for _ in range(3):
        queue.push("here", 0)
    for turn in range(1400):
        if turn == 1000:
            for _ in range(3):
                queue.push("away", 0)
        tenant, _ = queue.pop()
        queue.charge(tenant, 10)
        queue.push(tenant, 0)
        if turn >= 1000:
            received[tenant] += 10
    return received


@exercise(
    "bounded-ring",
    minutes=25,
    difficulty=3,
    hints=(
        "Sort all points of all replicas once. Where in that list does a key begin, and what comes after the last "
        "point?",
        "bisect_left(points, (place_of(key), '')) is the first point at or after the key; go on from there, modulo the "
        "number of points, to the first owner below ceil(bound · (1 + total) / replicas).",
    ),
)
def check_ring(learner: Callable) -> Receipt:
    rows = []
    for replicas, points in ((1, 64), (3, 1), (4, 16), (random.randint(5, 9), 64)):
        names = [f"{random.choice('abcxyz')}{n}" for n in range(replicas)]
        given = list(names)
        ring = learner(given, points)
        keys = [f"prefix {random.random()}" for _ in range(10)]  # each comes again with other loads
        cases = [(f"{name} 0", 1e9, dict.fromkeys(names, 0)) for name in names]  # keys that are points
        cases += [
            (
                random.choice(keys),
                random.choice((1.0, 1.25, 2.0, 1e9)),
                {name: random.choice((0, 0, 1, 3, 12)) for name in names},
            )
            for _ in range(150)
        ]
        for key, bound, loads in cases:
            handed = dict(loads)
            found, right = ring.choose(key, handed, bound), _clockwise(names, points, key, loads, bound)
            if handed != loads or given != names:
                changed = "outstanding" if handed != loads else "replicas"
                raise CheckFailed(f"`{changed}` is changed, and its caller still needs it as it was")
            if found != right:
                capacity = math.ceil(bound * (1 + sum(loads.values())) / replicas)
                said = (
                    f"{replicas} replicas with {points} points each, key {key!r}, open {loads}, bound {bound:g} "
                    f"(capacity {capacity}): you chose {found!r}, and the ring says {right!r}."
                )
                raise CheckFailed(said, evidence=(key, found))
        if points < 16 or replicas < 4:
            continue
        more, idle = learner([*names, "new"], points), dict.fromkeys([*names, "new"], 0)
        busy = dict.fromkeys(names, 1)
        if ring.choose("a key", dict(busy), 1.0) != _clockwise(names, points, "a key", busy, 1.0):
            raise CheckFailed("a second ring that is made meanwhile changes what the first one chooses")
        keys = [f"key {n}" for n in range(600)]
        before, after = ([each.choose(key, idle, 1e9) for key in keys] for each in (ring, more))
        moved = sum(a != b for a, b in zip(before, after, strict=True))
        strays = sum(a != b and b != "new" for a, b in zip(before, after, strict=True))
        rows.append(row(f"one more than {replicas} replicas: keys that moved between old ones", 0, strays))
        rows.append(row("    share that moved to the new one, expected 1 / n", None, moved / len(keys)))
        if strays:
            raise CheckFailed(f"a new replica moved {strays} of 600 keys from one old replica to another", rows)
        alike = sum(
            learner(list(names)[::-1], points).choose(key, idle, 1e9) == a for key, a in zip(keys, before, strict=True)
        )
        if alike != len(keys):
            raise CheckFailed(
                "the same replicas named in another order own other keys: two routers would disagree", rows
            )
    return receipt("a ring with bounded loads", rows)


def _clockwise(names: list[str], points: int, key: str, loads: dict[str, int], bound: float) -> str:
    """By distance, all points looked at."""

    def place(text: str) -> int:
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")

    capacity = math.ceil(bound * (1 + sum(loads.values())) / len(names))
    free = [name for name in names if loads[name] < capacity]
    own = place(key)
    return min(((place(f"{name} {n}") - own) % 2**32, name) for name in free for n in range(points))[1]
