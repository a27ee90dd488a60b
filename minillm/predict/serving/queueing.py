"""One queue, one server: how long requests wait, from the load alone, and request by request.

    M/M/1   arrivals and services exponential, load ρ = λ/μ     mean wait ρ / (μ - λ), share that waits longer than t:
                                                                ρ · exp(-(μ - λ) t)
    M/G/1   services of any kind, S seconds with a spread cv:   mean wait λ E[S²] / 2(1 - ρ), E[S²] = S² (1 + cv²)
                                                                (Pollaczek 1930, Khinchine 1932)
    any     wait of the next = max(0, wait + service - gap)     Lindley 1952, https://doi.org/10.1017/S0305004100027638

Little's law holds for all of them: requests inside = arrivals per second · seconds inside.
"""

import math
from collections.abc import Iterable


def mean_wait(arrivals_per_s: float, services_per_s: float) -> float:
    """Seconds in the queue of an M/M/1 server, service not included. ValueError for a load of 1 or more."""
    _check(arrivals_per_s, services_per_s)
    return arrivals_per_s / services_per_s / (services_per_s - arrivals_per_s)


def wait_quantile(arrivals_per_s: float, services_per_s: float, share: float) -> float:
    """Seconds that `share` of the requests of an M/M/1 server wait at most; 0.99 for p99."""
    _check(arrivals_per_s, services_per_s)
    if not 0 <= share < 1:
        raise ValueError(f"share {share} must lie in 0 .. 1, without 1.")
    load = arrivals_per_s / services_per_s
    return max(0.0, math.log(load / (1 - share)) / (services_per_s - arrivals_per_s))


def mean_wait_any_service(arrivals_per_s: float, service_s: float, cv: float) -> float:
    """Seconds in the queue of an M/G/1 server, by Pollaczek and Khinchine. service_s: mean; cv: standard deviation of
    services divided by their mean, 0 for equal ones, 1 for exponential. ValueError for a load of 1 or more."""
    if not (service_s > 0 and cv >= 0):
        raise ValueError(f"services of {service_s} s with a spread of {cv}: use more than 0, and 0 or more.")
    _check(arrivals_per_s, 1 / service_s)
    load = arrivals_per_s * service_s
    return load / (1 - load) * (1 + cv**2) / 2 * service_s


def backlog(arrivals_per_s: float, services_per_s: float, seconds: float) -> float:
    """Requests that wait after so long with more arrivals than services, as while a replica starts."""
    return max(0.0, arrivals_per_s - services_per_s) * seconds


def waits(gaps_s: Iterable[float], services_s: Iterable[float]) -> list[float]:
    """Seconds each request waits. gaps_s: before each arrival, from the one before; services_s: of each request."""
    found, wait, service = [], 0.0, 0.0
    for gap, own in zip(gaps_s, services_s, strict=True):
        wait = max(0.0, wait + service - gap)
        found.append(wait)
        service = own
    return found


def _check(arrivals_per_s: float, services_per_s: float) -> None:
    if not (arrivals_per_s >= 0 and services_per_s > 0):
        raise ValueError(f"{arrivals_per_s} arrivals and {services_per_s} services per second: give rates above 0.")
    if arrivals_per_s >= services_per_s:
        raise ValueError(
            f"{arrivals_per_s} arrivals per second against {services_per_s} services: the queue grows without end; "
            "a load below 1 has a mean."
        )
