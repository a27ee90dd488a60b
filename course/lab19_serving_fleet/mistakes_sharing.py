"""Spoilers of lab 19: queues that pay for idleness, rings that lose their bound, scaling that sees only today."""

import heapq

from course.kit.exercises import KnownAnswers

# A fair queue

fair_queue = KnownAnswers("fair-queue")

fair_queue.mistake(
    "credit-for-idleness",
    {"            self.counter[tenant] = max(self.counter[tenant], floor)\n": ""},
    says="A tenant that was away comes back with a credit and is served alone until it has caught up.",
)
fair_queue.mistake(
    "raised-to-the-largest",
    {"floor = min(others)": "floor = max(others)"},
    says="A tenant that comes is raised to the largest counter: it waits for all that have received less.",
)
fair_queue.mistake(
    "counter-lowered",
    {"self.counter[tenant] = max(self.counter[tenant], floor)": "self.counter[tenant] = floor"},
    says="A tenant's counter is lowered when it comes: by sending one request at a time it is always served first.",
)
fair_queue.mistake(
    "nobody-waits-so-zero",
    {"floor = 0.0 if self.last_left is None else self.counter[self.last_left]": "floor = 0.0"},
    says="While nobody waits, a tenant that comes is not raised to the one that left last: its credit is back.",
)
fair_queue.mistake(
    "counts-requests",
    {"self.counter[tenant] += tokens": "self.counter[tenant] += 1"},
    says="You count requests. A tenant with long ones then receives many times as many tokens.",
)
fair_queue.mistake(
    "newest-first",
    {"self.waiting[tenant].popleft()": "self.waiting[tenant].pop()"},
    says="Of a tenant's own requests the newest is served first, so its oldest may wait for ever.",
)


fair_queue.mistake(
    "smallest-request-first",
    {"self.waiting[tenant].popleft()": "min(self.waiting[tenant])\n        self.waiting[tenant].remove(request)"},
    expect="requests have no order",
)
fair_queue.mistake(
    "charges-only-the-last",
    {
        "        return tenant, request\n": "        self.last = tenant\n        return tenant, request\n",
        "self.counter[tenant] += tokens": "self.counter[tenant] += tokens if tenant == self.last else 0",
    },
    says="A charge that comes after the next pop is lost: an answer comes while others are served.",
)


@fair_queue.alternative("one list of all requests")
class OneList:
    def __init__(self):
        self.requests, self.counters, self.last = [], {}, None

    def push(self, tenant, request):
        waiting = {name for name, _ in self.requests}
        self.counters.setdefault(tenant, 0.0)
        if tenant not in waiting:
            floors = [self.counters[name] for name in waiting] or [self.counters.get(self.last, 0.0)]
            self.counters[tenant] = max(self.counters[tenant], min(floors))
        self.requests.append((tenant, request))

    def pop(self):
        if not self.requests:
            return None
        place = min(
            range(len(self.requests)), key=lambda n: (self.counters[self.requests[n][0]], self.requests[n][0], n)
        )
        tenant, request = self.requests.pop(place)
        if all(name != tenant for name, _ in self.requests):
            self.last = tenant
        return tenant, request

    def charge(self, tenant, tokens):
        self.counters[tenant] = self.counters.get(tenant, 0.0) + tokens


# A ring

bounded_ring = KnownAnswers("bounded-ring")

bounded_ring.mistake(
    "no-bound",
    {"        if outstanding[name] < capacity:\n": "        if True:\n"},
    says="The first owner clockwise gets the request however full it is.",
)
bounded_ring.mistake(
    "bound-without-this-one",
    {"(1 + sum(outstanding.values()))": "sum(outstanding.values())"},
    expect="you chose None|and the ring says",
)
bounded_ring.mistake(
    "no-way-round",
    {"self.points[(start + step) % len(self.points)]": "self.points[min(start + step, len(self.points) - 1)]"},
    says="After the last point the ring begins again: a key beyond it belongs to the first.",
)
bounded_ring.mistake(
    "modulo",
    {'start = bisect.bisect_left(self.points, (place_of(key), ""))': "start = place_of(key) % len(self.points)"},
    says="You count points instead of looking for the key's place: one replica more moves nearly all keys.",
)
bounded_ring.mistake(
    "at-capacity",
    {"outstanding[name] < capacity": "outstanding[name] <= capacity"},
    says="A replica that is at its capacity gets one more.",
)
bounded_ring.mistake("rounded-down", {"math.ceil(bound": "math.floor(bound"}, expect="you chose None|and the ring says")


bounded_ring.mistake(
    "after-the-key",
    {
        'bisect.bisect_left(self.points, (place_of(key), ""))': (
            "bisect.bisect([at for at, _ in self.points], place_of(key))"
        )
    },
    says="A key that is itself a place is sent past the point there: bisect looks behind an equal one.",
)
bounded_ring.mistake(
    "remembers-keys",
    {
        "self.replicas = list(replicas)": "self.replicas, self.seen = list(replicas), {}",
        "                return name": "                return self.seen.setdefault(key, name)",
    },
    says="A key stays where it went first, however full that replica is later.",
)
bounded_ring.mistake(
    "counts-itself",
    {"                return name": "                outstanding[name] += 1\n                return name"},
    expect="`outstanding` is changed",
)


@bounded_ring.alternative("by distances")
class ByDistance:
    def __init__(self, replicas, points=64):
        self.names, self.points = list(replicas), points

    def choose(self, key, outstanding, bound):
        import hashlib

        def place(text):
            return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")

        capacity = -(-bound * (1 + sum(outstanding.values())) // len(self.names))
        free = [name for name in self.names if outstanding[name] < capacity]
        heap = [((place(f"{name} {n}") - place(key)) % 2**32, name) for name in free for n in range(self.points)]
        heapq.heapify(heap)
        return heap[0][1]
