"""Spoilers of lab 15: speedups that grow without end, K rules that never give up, verdicts that look at half of it."""

from course.lab15_speculative_decoding import checks_gain as right
from course.lab15_speculative_decoding.tiny_models import NOTHING, distance, first
from minillm.labkit.exercises import alternative, mistake

# Speedup and best K.


def rule(gain, best=right.best_k):
    return gain, best


mistake("best-k", "K times acceptance, less overhead", expect="grows with K without end")(
    rule(lambda alpha, c, k: k * alpha * (1 - c))
)
mistake("best-k", "each i counted i times", expect="counts the i-th guess i times")(
    rule(lambda alpha, c, k: sum(i * alpha**i for i in range(k + 1)) / (1 + c * k))
)
mistake("best-k", "without the target's own token", expect="the token that the target adds itself is missing")(
    rule(lambda alpha, c, k: sum(alpha**i for i in range(1, k + 1)) / (1 + c * k))
)
mistake("best-k", "one c for all guesses", expect="each of the k guesses costs c")(
    rule(lambda alpha, c, k: right.speedup(alpha, c, k) * (1 + c * k) / (1 + c))
)
mistake("best-k", "guessing is free", expect="the time of guessing is missing")(
    rule(lambda alpha, c, k: right.speedup(alpha, c, k) * (1 + c * k))
)
mistake("best-k", "closed form without its corner", expect="ZeroDivisionError")(
    rule(lambda alpha, c, k: (1 - alpha ** (k + 1)) / ((1 - alpha) * (c * k + 1)))
)
mistake("best-k", "always guesses", expect="0 guesses is a choice")(
    rule(right.speedup, lambda alpha, c, most: max(range(1, most + 1), key=lambda k: right.speedup(alpha, c, k)))
)
mistake("best-k", "the most guesses", expect="best_k is")(rule(right.speedup, lambda alpha, c, most: most))
mistake("best-k", "most left out", expect="best_k is")(
    rule(right.speedup, lambda alpha, c, most: max(range(most), key=lambda k: right.speedup(alpha, c, k)))
)


def _closed(alpha, c, k):
    tokens = k + 1 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)
    return tokens / (c * k + 1)


def _climb(alpha, c, most):
    k = 0
    while k < most and right.speedup(alpha, c, k + 1) > right.speedup(alpha, c, k):
        k += 1
    return k


alternative("best-k", "closed form, and climbing while it gets better")((_closed, _climb))


# Verdicts.


@mistake("which-is-exact", "looks at the first token only", expect="program E")
def first_only(found, true, accepted, possible):
    if distance(first(found, 1), first(true, 1)) > NOTHING:
        return "first token off"
    return "exact" if accepted > possible - NOTHING else "exact, accepts less"


@mistake("which-is-exact", "takes a low acceptance for a mistake", expect="program B")
def strict_is_wrong(found, true, accepted, possible):
    return "first token off" if accepted < possible - NOTHING else right.verdict(found, true, accepted, possible)


@mistake("which-is-exact", "looks at the acceptance only", expect="program")
def acceptance_only(found, true, accepted, possible):
    return "exact" if abs(accepted - possible) < NOTHING else "exact, accepts less"


@mistake("which-is-exact", "looks at all tokens together only", expect="program A")
def all_together(found, true, accepted, possible):
    if distance(found, true) > NOTHING:
        return "later tokens off"
    return "exact" if accepted > possible - NOTHING else "exact, accepts less"


@mistake("which-is-exact", "calls a small distance none", expect="program")
def tolerant(found, true, accepted, possible):
    if distance(first(found, 1), first(true, 1)) > 0.5:
        return "first token off"
    return "later tokens off" if distance(found, true) > 0.5 else right.verdict(true, true, accepted, possible)


@alternative("which-is-exact", "probability by probability")
def largest_difference(found, true, accepted, possible):
    def off(n):
        a, b = first(found, n), first(true, n)
        return max(abs(a.get(each, 0) - b.get(each, 0)) for each in a.keys() | b.keys()) > 1e-10

    if off(1):
        return "first token off"
    if off(2) or off(3):
        return "later tokens off"
    return "exact, accepts less" if possible - accepted > NOTHING else "exact"
