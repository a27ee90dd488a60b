"""Observe, decide, resize, sleep: a policy within limits, for any fleet."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from minillm.api.autoscale.policies import Policy, Sample


class Fleet(Protocol):
    def observe(self) -> Sample: ...

    def resize(self, count: int) -> None:
        """So many replicas ready or starting; those that are too many end what they have begun."""

    def sleep(self, seconds: float) -> None: ...


@dataclass(frozen=True)
class Scaling:
    """least, most: replicas. interval_s: between decisions. cool_down_s: a replica goes only when none of the decisions
    of so many seconds wanted it (Kubernetes' stabilization window). Growing is never delayed."""

    least: int = 1
    most: int = 10
    interval_s: float = 15.0
    cool_down_s: float = 300.0

    def __post_init__(self):
        if not 1 <= self.least <= self.most:
            raise ValueError(f"{self.least} to {self.most} replicas: use 1 or more, the most at least the least.")
        if not (0 < self.interval_s < math.inf and 0 <= self.cool_down_s < math.inf):
            raise ValueError(
                f"an interval of {self.interval_s} s, a cool-down of {self.cool_down_s} s: above 0, and 0 or more."
            )


class Controller:
    """keep_s: seconds of history to remember for the policy."""

    def __init__(self, policy: Policy, scaling: Scaling | None = None, keep_s: float = 2 * 86_400.0):
        self.policy, self.scaling, self.keep_s = policy, scaling or Scaling(), keep_s
        self.history: list[Sample] = []
        self._wanted: deque[tuple[float, int]] = deque()

    def decide(self, sample: Sample) -> int:
        """Replicas that should be ready or starting from now on."""
        self.history.append(sample)
        if self.history[0].at < sample.at - 1.5 * self.keep_s:  # now and then, since it moves all that is kept
            self.history = [each for each in self.history if each.at >= sample.at - self.keep_s]
        limits = self.scaling
        self._wanted.append((sample.at, min(limits.most, max(limits.least, self.policy.desired(self.history)))))
        while self._wanted[0][0] < sample.at - limits.cool_down_s:
            self._wanted.popleft()
        now = self._wanted[-1][1]
        if now >= sample.replicas:
            return now
        return min(max(count for _, count in self._wanted), max(limits.least, sample.replicas))

    def run(self, fleet: Fleet, seconds: float = math.inf, tell: Callable[[Sample, int], None] | None = None) -> None:
        """Until the fleet's own clock has gone on by so many seconds. tell: of each sample and its decision."""
        end = None
        while True:
            sample = fleet.observe()
            end = sample.at + seconds if end is None else end
            if sample.at >= end:
                return
            count = self.decide(sample)
            if tell is not None:
                tell(sample, count)
            fleet.resize(count)
            fleet.sleep(min(self.scaling.interval_s, end - sample.at))
