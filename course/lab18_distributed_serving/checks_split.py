"""Lab 18, cards divided: the learner's division against every one of them, and waits found by halving."""

import operator
import random
from collections.abc import Callable

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
    for number, cards in enumerate((2, 2, 2, 8, 16, 3, 5, 12, *(random.randint(3, 40) for _ in range(4)))):
        short = number < 3  # first prompts so short that one card is more than enough for them: tokens decide
        prompt_s, output = random.uniform(0.02, 0.6) / (2000 if short else 1), random.randint(20, 800)
        ttft, most = prompt_s * random.uniform(1.2, 6), random.randint(4, 300) + 100 * short
        fixed, each = random.uniform(0.004, 0.02), random.uniform(1e-5, 4e-4)
        at_limit = random.choice((1, 1, random.randint(1, 400)))  # a step of so many takes the limit, to the last bit
        between, last = random.choice((at_limit, random.uniform(1.5, 400))), random.randint(2, 90)
        tpot = fixed + each * ((50.5, last, most + 0.5)[number] if short else between)

        def step_s(sequences: int, fixed: float = fixed, each: float = each) -> float:
            return fixed + each * sequences

        found = learner(cards, prompt_s, step_s, most, output, ttft, tpot)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise CheckFailed(
                f"returned {found!r:.60}; the exercise asks for (cards that prefill, requests per second)"
            )
        count, rate = _whole(found[0]), float(found[1])
        prompts = _rate_by_halving(prompt_s, ttft)
        running = max(b for b in range(1, most + 1) if step_s(b) <= tpot)
        answers = running / (output * step_s(running))
        best = max(min(n * prompts, (cards - n) * answers) for n in range(1, cards))
        case = (
            f"{cards} cards, prompts of {prompt_s:.3f} s, TTFT {ttft:.3f} s; {output} tokens, steps of "
            f"{fixed * 1e3:.2f} + {each * 1e3:.3f} b ms, b up to {most}, TPOT {tpot * 1e3:.2f} ms"
        )
        rows.append(row(f"{cards} cards: requests per second", best, rate, "", 1e-6))
        if not 0 < count < cards:
            raise CheckFailed(f"{case}: {found[0]!r:.20} cards that prefill: each pool needs at least one", rows)
        if rows[-1].verdict == "off":
            raise CheckFailed(
                f"{case}: you say {rate:.4g} requests per second. A card computes the prompts of {prompts:.4g} and "
                f"decodes the answers of {answers:.4g}, so the best division sustains {best:.4g}",
                rows,
                evidence=rate,
            )
        sustained = min(count * prompts, (cards - count) * answers)
        if abs(sustained - best) > 1e-6 * best:
            raise CheckFailed(
                f"{case}: right rate, but {count} cards that prefill sustain {sustained:.4g}", rows, evidence=count
            )
    return receipt("cards divided", rows)


def _whole(count: object) -> int:
    """0 for what is no whole number."""
    try:
        return operator.index(count)
    except TypeError:
        return 0


def _rate_by_halving(service_s: float, ttft: float) -> float:
    """Requests/s at which the mean time to the first token is the limit."""
    low, high = 0.0, 1 / service_s
    for _ in range(200):
        rate = (low + high) / 2
        late = service_s + rate * service_s**2 / (2 * max(1e-15, 1 - rate * service_s)) > ttft
        low, high = (low, rate) if late else (rate, high)
    return low
