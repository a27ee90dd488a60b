"""Replicas that a history of samples asks for. Pure: no clock, no fleet, no limits.

reactive     ceil(replicas · load per replica / target), Kubernetes' formula for a HorizontalPodAutoscaler
             (https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale/#algorithm-details)
predictive   ceil(rate forecast for when a replica started now would serve / what one serves)
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

TOLERANCE = 0.1  # Kubernetes' default: a load within 10 % of its target changes nothing


@dataclass(frozen=True)
class Sample:
    """A fleet at one time. at: seconds. rate: requests per second that came since the sample before. waiting, running:
    requests in queues and in batches. ready: replicas that get requests; starting: those that will."""

    at: float
    rate: float
    waiting: int
    running: int
    ready: int
    starting: int

    @property
    def replicas(self) -> int:
        return self.ready + self.starting


class Policy(Protocol):
    def desired(self, history: Sequence[Sample]) -> int:
        """Replicas that should be ready or starting. history: in order of time, the last one is now."""


@dataclass(frozen=True)
class Reactive:
    """target: requests, waiting or running, that each replica should have. Sees a rise once it has happened.

    Replicas that are starting count as there, or each look at the same queue would order them again.
    """

    target: float

    def __post_init__(self):
        _above_zero("target", self.target)

    def desired(self, history: Sequence[Sample]) -> int:
        now = history[-1]
        replicas = max(1, now.replicas)
        ratio = (now.waiting + now.running) / replicas / self.target
        return now.replicas if abs(ratio - 1) <= TOLERANCE else math.ceil(ratio * replicas - 1e-9)


@dataclass(frozen=True)
class Predictive:
    """capacity: requests per second that a replica serves at most. utilization: share of it to plan for. ahead_s: how
    far to look, a cold start and an interval of the controller. window_s: history to fit a line to. season_s: a period
    after which the load repeats, such as a day; None = none known. drain_s: seconds in which a queue should be gone.

    The forecast is the larger of the fitted line and, once a season is known, what came a season before, scaled by how
    today compares with then.
    """

    capacity: float
    utilization: float = 0.7
    ahead_s: float = 60.0
    window_s: float = 300.0
    season_s: float | None = None
    drain_s: float = 60.0

    def __post_init__(self):
        for name in ("capacity", "utilization", "window_s", "drain_s"):
            _above_zero(name, getattr(self, name))
        if self.ahead_s < 0 or (self.season_s is not None and self.season_s <= self.ahead_s):
            raise ValueError(f"ahead_s {self.ahead_s} must be 0 or more, and below season_s {self.season_s}.")

    def desired(self, history: Sequence[Sample]) -> int:
        rate = max(self.line(history), self.seasonal(history)) + history[-1].waiting / self.drain_s
        return math.ceil(rate / (self.capacity * self.utilization) - 1e-9)

    def line(self, history: Sequence[Sample]) -> float:
        """Requests per second `ahead_s` from now, by least squares over the window."""
        now = history[-1].at
        recent = [(each.at - now, each.rate) for each in _since(history, now - self.window_s)]
        middle, mean = fmean(at for at, _ in recent), fmean(rate for _, rate in recent)
        spread = sum((at - middle) ** 2 for at, _ in recent)
        slope = sum((at - middle) * (rate - mean) for at, rate in recent) / spread if spread else 0.0
        if now - history[0].at < self.window_s / 2:
            slope = 0.0  # a line through a few samples follows their noise
        return max(0.0, mean + slope * (self.ahead_s - middle))

    def seasonal(self, history: Sequence[Sample]) -> float:
        """By what came a season before: 0 where that was not seen."""
        now = history[-1].at
        if self.season_s is None or history[0].at > now - self.season_s - self.window_s / 2:
            return 0.0
        then, half = now - self.season_s, self.window_s / 2
        before = _between(history, then - half, then + half)
        coming = _between(history, then + self.ahead_s - half, then + self.ahead_s + half)
        today = _since(history, now - half)
        if not before or not coming or fmean(each.rate for each in before) <= 0:
            return 0.0
        scale = fmean(each.rate for each in today) / fmean(each.rate for each in before)
        return fmean(each.rate for each in coming) * min(2.0, max(0.5, scale))


def _since(history: Sequence[Sample], start: float) -> list[Sample]:
    """The last one at least."""
    return list(history[min(bisect_left(history, start, key=_at), len(history) - 1) :])


def _between(history: Sequence[Sample], start: float, end: float) -> list[Sample]:
    first = bisect_left(history, start, key=_at)
    return list(history[first : bisect_right(history, end, lo=first, key=_at)])


def _at(sample: Sample) -> float:
    return sample.at


def _above_zero(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} {value} must be above 0.")
