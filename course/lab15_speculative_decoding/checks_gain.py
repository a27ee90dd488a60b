"""Lab 15, what guesses are worth: the best K, and which verifiers deserve the word exact."""

import random
from collections.abc import Callable
from typing import Any

from course.lab15_speculative_decoding import experiments_breaks as breaks
from course.lab15_speculative_decoding import tiny_models
from course.lab15_speculative_decoding.tiny_models import NOTHING, Tiny
from minillm.labkit.exercises import CheckFailed, exercise
from minillm.labkit.receipts import Receipt, row
from minillm.predict import speculation as predict

VERDICTS = ("exact", "exact, accepts less", "first token off", "later tokens off")
USUAL = dict(zip("ABCDEF", (VERDICTS[i] for i in (2, 1, 2, 0, 3, 2)), strict=True))


# The course's own answers.


def speedup(alpha: float, c: float, k: int) -> float:
    """Plain seconds per token / speculative ones: Σ αⁱ for i = 0 .. k tokens in the time of 1 + ck passes."""
    return sum(alpha**i for i in range(k + 1)) / (1 + c * k)


def best_k(alpha: float, c: float, most: int) -> int:
    """The k of 0 .. most with the largest speedup; the smallest of equals."""
    return max(range(most + 1), key=lambda k: (speedup(alpha, c, k), -k))


def verdict(found: tiny_models.Distribution, true: tiny_models.Distribution, accepted: float, possible: float) -> str:
    """One of the four, from exact distributions of the same number of tokens and expected accepted guesses."""
    length = len(next(iter(true)))
    for places in range(1, length + 1):
        if tiny_models.distance(tiny_models.first(found, places), tiny_models.first(true, places)) > NOTHING:
            return "first token off" if places == 1 else "later tokens off"
    return "exact" if accepted > possible - NOTHING else "exact, accepts less"


# What they are held to.


@exercise(
    "best-k",
    minutes=15,
    difficulty=2,
    hints=(
        "How often does a pass yield at least 1 token, at least 2, at least k + 1? The mean is the sum of these.",
        "At least i + 1 tokens with probability αⁱ: the first i guesses right. The time: one pass, and k guesses of c "
        "passes each. Plain decoding yields 1 token in 1 pass.",
        "speedup: sum(alpha**i for i in range(k + 1)) / (1 + c * k), which also works for alpha = 1. best_k: the "
        "maximum over range(most + 1), 0 included, ties to the smaller.",
    ),
)
def check_best_k(learner: Any) -> Receipt:
    if not (isinstance(learner, tuple) and len(learner) == 2 and all(map(callable, learner))):
        raise CheckFailed("asked for are two functions: (speedup, best_k)")
    gain, best = learner
    drawn, rows = random.Random(), []
    for alpha, c, k in [(0.8, 0.1, 4), (1.0, 0.0, 3), (0.0, 0.25, 2)] + [
        (drawn.random(), drawn.uniform(0, 0.5), drawn.randint(0, 9)) for _ in range(100)
    ]:
        found = gain(alpha, c, k)
        if not isinstance(found, int | float) or abs(found - speedup(alpha, c, k)) > NOTHING:
            raise CheckFailed(_say_speedup(float(found), alpha, c, k))
    for alpha, c, k in ((0.8, 0.1, 4), (0.8, 0.1, 8), (0.8, 0.02, 8)):
        rows.append(
            row(f"α = {alpha}, c = {c}, K = {k}: speedup", predict.speedup(alpha, c, k), gain(alpha, c, k), "", 1e-9)
        )
    for alpha, c in [(0.8, 0.1), (0.8, 0.02), (0.5, 0.25), (0.2, 0.3), (1.0, 0.0)] + [
        (drawn.random(), drawn.uniform(0, 0.6)) for _ in range(100)
    ]:
        found, right = best(alpha, c, 16), predict.best_k(alpha, c, 16)
        if found != right:
            told = f"speedup {speedup(alpha, c, right):.3f} at K = {right}"
            other = f", {speedup(alpha, c, found):.3f} at your {found}" if isinstance(found, int) and found >= 0 else ""
            hint = ": 0 guesses is a choice, too" if right == 0 else ""
            raise CheckFailed(f"α = {alpha:.3f}, c = {c:.3f}: best_k is {right}, you say {found}: {told}{other}{hint}")
    for alpha, c in ((0.8, 0.1), (0.8, 0.02), (0.2, 0.3)):
        rows.append(row(f"α = {alpha}, c = {c}: best K", predict.best_k(alpha, c, 16), best(alpha, c, 16)))
    return Receipt("speedup and the K that is best", tuple(rows))


def _say_speedup(found: float, alpha: float, c: float, k: int) -> str:
    right = speedup(alpha, c, k)
    head = f"α = {alpha:.3f}, c = {c:.3f}, K = {k}: you say {found:.3f}, it is {right:.3f}. "
    tokens = right * (1 + c * k)
    ways = {
        "that grows with K without end: a guess counts only if all before it were accepted": k * alpha * (1 - c),
        "Σ i·αⁱ counts the i-th guess i times: each accepted guess is one token": sum(
            i * alpha**i for i in range(k + 1)
        )
        / (1 + c * k),
        "the token that the target adds itself is missing: the sum begins with α⁰ = 1": (tokens - 1) / (1 + c * k),
        "each of the k guesses costs c, not all of them together": tokens / (1 + c),
        "guesses cost time, and the pass that checks them does, too": tokens / max(c * k, 1e-9),
        "that is tokens per pass: the time of guessing is missing": tokens,
    }
    return head + next((why for why, value in ways.items() if abs(value - found) < NOTHING), "Σ αⁱ / (1 + cK)")


@exercise(
    "which-is-exact",
    minutes=15,
    difficulty=3,
    hints=(
        "Two questions, in this order: is the distribution the target's, and if so, were as many guesses accepted as "
        "can be? A low acceptance alone is no mistake.",
        "Each token alone can have the right distribution while the tokens together have not. So compare the first "
        "token, then the first two together, and so on. A distance: Σ |a - b| / 2 over all keys of both.",
        "first(found, n) gives the distribution of the first n tokens, distance(a, b) compares. The first n with a "
        "distance above 1e-9: n = 1 or later. None: compare accepted with possible.",
    ),
)
def check_verdict(learner: Callable) -> Receipt:
    generator, rows = tiny_models.seeded(), []
    for name, program in breaks.PROGRAMS.items():
        right = ""
        while right != USUAL[name]:  # with some pairs of models a mistake makes no difference
            target, draft = Tiny(generator, breaks.VOCAB), Tiny(generator, breaks.VOCAB)
            evidence = breaks.evidence(program, target, draft)
            right = verdict(*evidence)
        found = learner(*evidence)
        if found not in VERDICTS:
            raise CheckFailed(f"your verdict is {found!r}: it must be one of {', '.join(map(repr, VERDICTS))}")
        if found != right:
            raise CheckFailed(f"program {name}: you say {found!r}, it is {right!r}: {_say_verdict(evidence)}", rows)
        rows.append(row(f"program {name}", right, found))
    return Receipt("verdicts by enumeration", tuple(rows))


def _say_verdict(evidence: tuple) -> str:
    found, true, accepted, possible = evidence
    off = tiny_models.distance(tiny_models.first(found, 1), tiny_models.first(true, 1))
    whole = tiny_models.distance(found, true)
    return (
        f"the first token's distribution is off by {off:.4f}, all {len(next(iter(true)))} tokens together by "
        f"{whole:.4f}; {accepted:.3f} guesses of {possible:.3f} possible are accepted"
    )
