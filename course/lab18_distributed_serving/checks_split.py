"""Lab 18, cards divided: the learner's division against every one of them, and waits found by halving."""

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row


@exercise(
    "choose-split",
    minutes=20,
    difficulty=3,
    hints=(
        "The slower pool decides. What does a card do for prompts alone, within its limit, and what for tokens?",
        "Prompts: the r at which prompt_s + r prompt_s² / 2(1 - r prompt_s) is the limit. Tokens: the largest b up to "
        "most whose step is within the limit; b sequences finish b / (output · step_s(b)) requests a second. Then try "
        "every division.",
    ),
)
def check_split(learner: Callable) -> Receipt:
    rows = []
    short = [Traffic.draw(2, limit, short=True) for limit in (50.5, random.randint(2, 90), 1000)]
    drawn = [Traffic.draw(cards) for cards in (8, 16, 3, 5, 12, *(random.randint(3, 40) for _ in range(4)))]
    for case in (*FIXED, *short, *drawn):
        found = learner(case.cards, case.prompt_s, case.step_s, case.most, case.output, case.ttft, case.tpot)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise CheckFailed(
                f"returned {found!r:.60}; the exercise asks for (cards that prefill, requests per second)"
            )
        count, rate = _whole(case, found[0]), float(found[1])
        best = max(map(case.sustained, range(1, case.cards)))
        rows.append(row(f"{case.cards} cards: requests per second", best, rate, "", 1e-6))
        if not 0 < count < case.cards:
            raise CheckFailed(f"{case}: {count} cards that prefill: each pool needs at least one", rows)
        if rows[-1].verdict == "off":
            raise CheckFailed(
                f"{case}: you say {rate:.4g} requests per second. A card computes the prompts of {case.prompts:.4g} "
                f"and decodes the answers of {case.answers:.4g}, so the best division sustains {best:.4g}",
                rows,
                evidence=rate,
            )
        if abs(case.sustained(count) - best) > 1e-6 * best:
            raise CheckFailed(
                f"{case}: right rate, but {count} cards that prefill sustain {case.sustained(count):.4g}",
                rows,
                evidence=count,
            )
    return receipt("cards divided", rows)


@dataclass(frozen=True)
class Traffic:
    """What choose_split is given. limit: sequences whose step takes the limit on TPOT. A step of b sequences takes
    fixed + each · b seconds, and `steeper` more for each beyond the knee, by so little that more still is better."""

    cards: int
    prompt_s: float
    output: int
    ttft: float
    most: int
    fixed: float
    each: float
    limit: float
    knee: int = 0
    steeper: float = 0.0

    @classmethod
    def draw(cls, cards: int, limit: float | None = None, short: bool = False) -> "Traffic":
        """short: prompts so short that one card is more than enough for them, so tokens decide."""
        prompt_s, most = random.uniform(0.02, 0.6) / (2000 if short else 1), random.randint(4, 300) + 100 * short
        if limit is None:  # often a step of a whole number of sequences takes the limit, to the last bit
            limit = random.choice((1, random.randint(1, 400), random.uniform(1.5, 400)))
        sizes = (cards, prompt_s, random.randint(20, 800), prompt_s * random.uniform(1.2, 6), most)
        fixed, each, knee = random.uniform(0.004, 0.02), random.uniform(1e-5, 4e-4), random.randint(1, most)
        return cls(*sizes, fixed, each, limit, knee, random.choice((0.0, fixed / knee / 2)))

    def step_s(self, sequences: float) -> float:
        beyond = sequences - self.knee
        return self.fixed + self.each * sequences + self.steeper * (abs(beyond) + beyond) / 2

    def sustained(self, count: int) -> float:
        """Requests/s with so many cards that prefill."""
        return min(count * self.prompts, (self.cards - count) * self.answers)

    @property
    def tpot(self) -> float:
        return self.step_s(self.limit)

    @cached_property
    def prompts(self) -> float:
        """Requests/s of a card that prefills."""
        return _rate_by_halving(self.prompt_s, self.ttft)

    @cached_property
    def answers(self) -> float:
        """Requests/s of a card that decodes."""
        running = max(b for b in range(1, self.most + 1) if self.step_s(b) <= self.tpot)
        return running / (self.output * self.step_s(running))

    def __str__(self) -> str:
        knee = f", and {self.steeper * 1e3:.4g} ms more for each beyond {self.knee}" if self.steeper else ""
        return (
            f"{self.cards} cards, prompts of {self.prompt_s * 1e3:.4g} ms, TTFT {self.ttft * 1e3:.4g} ms; "
            f"{self.output} tokens, steps of {self.fixed * 1e3:.4g} + {self.each * 1e3:.4g} b ms{knee}, b up to "
            f"{self.most}, TPOT {self.tpot * 1e3:.4g} ms"
        )


_FLOOR = Traffic(8, 0.1, 125, 0.3, 100, 0.01, 1e-4, 1000)  # the balance is 6.67 cards, and 6 are better than 7
_CEILING = replace(_FLOOR, output=3125)  # 1.33 cards, and 2 are better than 1
_KNEE = replace(_FLOOR, cards=2, prompt_s=1e-5, most=300, each=1e-5, limit=50.5, knee=10, steeper=5e-4)
FIXED = (_FLOOR, _CEILING, _KNEE)


def _whole(case: Traffic, count: object) -> int:
    try:
        return operator.index(count)
    except TypeError:
        raise CheckFailed(f"{case}: {count!r:.20} cards that prefill: a whole number is asked for") from None


def _rate_by_halving(service_s: float, ttft: float) -> float:
    """Requests/s at which the mean time to the first token is the limit."""
    low, high = 0.0, 1 / service_s
    for _ in range(200):
        rate = (low + high) / 2
        late = service_s + rate * service_s**2 / (2 * max(1e-15, 1 - rate * service_s)) > ttft
        low, high = (low, rate) if late else (rate, high)
    return low
