"""Lab 21: a server with random traffic, request by request."""

import random

from minillm.predict.serving import queueing

REQUESTS = 200_000


def simulated_waits(load: float, *, seed: int = 0, regular: bool = False, requests: int = REQUESTS) -> list[float]:
    """Waits in service times, sorted. regular: arrivals evenly spaced instead of random."""
    draw = random.Random(seed)
    gaps = (1 / load if regular else draw.expovariate(load) for _ in range(requests))
    return sorted(queueing.waits(gaps, [draw.expovariate(1.0) for _ in range(requests)]))


def quantile(waits: list[float], share: float) -> float:
    return waits[min(len(waits) - 1, int(share * len(waits)))]


def bounded(load: float, room: int, *, seed: int = 0, requests: int = REQUESTS) -> tuple[float, float]:
    """(p99 of the wait, share rejected) of a queue with so many places."""
    draw, free, waits, rejected, now = random.Random(seed), [], [], 0, 0.0
    last = 0.0  # when the server is free
    for _ in range(requests):
        now += draw.expovariate(load)
        free = [end for end in free if end > now]  # ends of those inside
        if len(free) > room:
            rejected += 1
            continue
        start = max(now, last)
        waits.append(start - now)
        last = start + draw.expovariate(1.0)
        free.append(last)
    return quantile(sorted(waits), 0.99), rejected / requests
