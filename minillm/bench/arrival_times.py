"""When requests come: as a Poisson process, in bursts, or as a recorded trace says.

    poisson_times(100, rate=8)           gaps exponential: their spread (standard deviation / mean) is 1
    bursty_times(100, rate=8, cv=4)      gaps from a gamma distribution of that spread: many at once, then a pause
    read_trace(Path("day.jsonl"))        lines {"at": 0.25, "prompt_tokens": 100, "answer_tokens": 20}

Waiting grows with the square of the spread (Kingman 1961, https://doi.org/10.1017/S0305004100036094), so a rate alone
says little about a load.
"""

import json
import math
import random
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from minillm.files import opened

NAMES = ("at", "prompt_tokens", "answer_tokens", "tenant", "group")


@dataclass(frozen=True)
class TraceLine:
    """A recorded request. at: seconds from the start. group: requests of one begin with the same tokens; "" = none."""

    at: float
    prompt_tokens: int
    answer_tokens: int
    tenant: str = ""
    group: str = ""

    def __post_init__(self):
        if isinstance(self.at, bool) or not isinstance(self.at, int | float) or not 0 <= self.at < math.inf:
            raise ValueError(f"at {self.at!r} must be seconds, 0 or more")
        for name in ("prompt_tokens", "answer_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} {value!r} must be a whole number of 1 or more")
        for name in ("tenant", "group"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} {getattr(self, name)!r} must be a text")


def poisson_times(count: int, rate: float, seed: int = 0) -> list[float]:
    """Seconds from the start at which each of `count` requests comes, `rate` per second on average."""
    return bursty_times(count, rate, 1.0, seed)


def bursty_times(count: int, rate: float, cv: float, seed: int = 0) -> list[float]:
    """cv: standard deviation of the gaps divided by their mean. 0: evenly spaced; 1: Poisson; 4: bursts."""
    if not 0 < rate < math.inf:
        raise ValueError(f"rate {rate} must be above 0 requests per second.")
    if not 0 <= cv < math.inf:
        raise ValueError(f"cv {cv} must be 0 (evenly spaced), 1 (Poisson) or more (bursts).")
    rng = random.Random(seed)
    gaps = (1 / rate if cv == 0 else rng.gammavariate(cv**-2, cv**2 / rate) for _ in range(count))
    return list(accumulate(gaps))


def read_trace(path: Path) -> list[TraceLine]:
    """A file of JSON lines, in the order of their times. ValueError names the line that cannot be read."""
    lines = []
    try:
        with opened(path, "r") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    lines.append(_parsed(text, f"{path}, line {number}"))
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): give a file of JSON lines") from None
    if not lines:
        raise ValueError(f"{path} has no request: write a JSON object with {', '.join(NAMES[:3])} on each line")
    return sorted(lines, key=lambda line: line.at)


def _parsed(text: str, where: str) -> TraceLine:
    try:
        found: Any = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError(f"{found!r:.40} is no JSON object")
        if unknown := sorted(set(found) - set(NAMES)):
            raise ValueError(f"{unknown[0]!r} is unknown")
        if missing := [name for name in NAMES[:3] if name not in found]:
            raise ValueError(f"{missing[0]} is missing")
        return TraceLine(**found)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{where}: {error}; a line has {', '.join(NAMES[:3])}, and may have tenant and group"
        ) from None


def stretched(lines: list[TraceLine], rate: float) -> list[TraceLine]:
    """The same requests in the same pattern, at another mean rate (requests per second)."""
    span = lines[-1].at - lines[0].at
    if span <= 0:
        raise ValueError("all requests of this trace come at once: it has no rate that could be changed.")
    scale = (len(lines) - 1) / (span * rate)
    return [replace(each, at=(each.at - lines[0].at) * scale) for each in lines]
