"""What a tenant may have: its line in the file of keys, and the token bucket that holds its rate.

ada   KEY-OF-ADA    weight=2 tokens-per-minute=60000 burst=10000 running=8 open=32
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite


@dataclass(frozen=True)
class Terms:
    """weight: share of the service while others wait, see `FairScheduler`; a tier is a weight. tokens_per_minute: of
    prompts and answers together, in the long run; burst: that may be used at once (None = of a minute). running: its
    sequences in the batch; open: its open requests. None = no limit of its own."""

    weight: float = 1.0
    tokens_per_minute: float | None = None
    burst: float | None = None
    running: int | None = None
    open: int | None = None

    def __post_init__(self):
        for name, whole in NAMES.items():
            value = getattr(self, name)
            if value is not None and not (value >= 1 if whole else value > 0 and isfinite(value)):
                raise ValueError(f"{_spelled(name)}={value:g} must be {'at least 1' if whole else 'above 0'}")
        if self.burst is not None and self.tokens_per_minute is None:
            raise ValueError("burst says nothing without tokens-per-minute: give both, or none")

    @classmethod
    def read(cls, words: Sequence[str]) -> "Terms":
        """Words "name=value". ValueError that names the wrong one."""
        given = {}
        for word in words:
            name, _, value = word.partition("=")
            known = name.replace("-", "_")
            if known not in NAMES or name != _spelled(known):
                raise ValueError(f"{word!r} is unknown: use {', '.join(f'{_spelled(each)}=' for each in NAMES)}")
            if known in given:
                raise ValueError(f"{name} stands there twice")
            try:
                given[known] = int(value) if NAMES[known] else float(value)
            except ValueError:
                raise ValueError(f"{word!r}: give a {'whole ' if NAMES[known] else ''}number") from None
        return cls(**given)

    def bucket(self, clock: Callable[[], float] = time.monotonic) -> "TokenBucket | None":
        if self.tokens_per_minute is None:
            return None
        return TokenBucket(self.tokens_per_minute / 60, self.burst or self.tokens_per_minute, clock)


NAMES = {"weight": False, "tokens_per_minute": False, "burst": False, "running": True, "open": True}  # whole numbers?


class TokenBucket:
    """Fills by `rate` tokens a second up to `burst`; what is asked for is taken out, or nothing is.

    Something larger than the burst is let through by a full bucket, which then owes the rest: the rate holds, and no
    request waits forever.
    """

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic):
        self.rate, self.burst, self._clock = rate, burst, clock
        self._level, self._filled = burst, clock()

    @property
    def level(self) -> float:
        """Tokens in it now; below 0 it owes some."""
        now = self._clock()
        self._level = min(self.burst, self._level + self.rate * (now - self._filled))
        self._filled = now
        return self._level

    def take(self, tokens: float) -> float:
        """0 if they were taken; else the seconds until they can be."""
        missing = min(tokens, self.burst) - self.level
        if missing > 0:
            return missing / self.rate
        self._level -= tokens
        return 0.0

    def put_back(self, tokens: float) -> None:
        """What was taken and not used."""
        self._level = min(self.burst, self.level + tokens)


def _spelled(name: str) -> str:
    return name.replace("_", "-")
