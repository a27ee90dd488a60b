"""Spoilers of lab 15: speedups that grow without end, K rules that never give up, verdicts that look at half of it."""

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake
from course.lab15_speculative_decoding.tiny_models import NOTHING, distance, first

right = answers_of("15_speculative_decoding")

# Speedup and best K.


def rule(gain, best=None):
    return gain, best or right.best_k


def tokens(alpha, k):
    return sum(alpha**i for i in range(k + 1))


SPEEDUPS = {
    "K times acceptance, less overhead": (
        lambda alpha, c, k: k * alpha * (1 - c),
        "That grows with K without end: a draft token counts only if all before it were accepted.",
    ),
    "each i counted i times": (
        lambda alpha, c, k: sum(i * alpha**i for i in range(k + 1)) / (1 + c * k),
        "Σ i·αⁱ counts the i-th draft token i times: each accepted one is one token.",
    ),
    "without the target's own token": (
        lambda alpha, c, k: (tokens(alpha, k) - 1) / (1 + c * k),
        "The token that the target adds itself is missing: the sum begins with α⁰ = 1.",
    ),
    "one c for all draft tokens": (
        lambda alpha, c, k: tokens(alpha, k) / (1 + c),
        "Each of the k draft tokens costs c, not all of them together.",
    ),
    "drafting is free": (
        lambda alpha, c, k: tokens(alpha, k),
        "That is tokens per pass: the time of drafting is missing.",
    ),
    "the verifying pass is free": (
        lambda alpha, c, k: tokens(alpha, k) / max(c * k, 1e-9),
        "The pass that checks the draft tokens takes time, too: 1 + c·k.",
    ),
    "one power too many": (
        lambda alpha, c, k: tokens(alpha, k + 1) / (1 + c * k),
        "The sum goes one power too far: k draft tokens and one of the target are k + 1 tokens at most.",
    ),
    "a pass per draft token": (
        lambda alpha, c, k: tokens(alpha, k) / ((1 + c) * k + 1),
        "One pass checks all draft tokens at once: 1 + c·k, not (1 + c)·k + 1.",
    ),
    "each draft token counts alone": (
        lambda alpha, c, k: (1 + k * alpha) / (1 + c * k),
        "Draft token i counts with αⁱ and not with α: all those before it must have been accepted.",
    ),
    "a draft's cost for the bonus, too": (
        lambda alpha, c, k: tokens(alpha, k) / (1 + c * (k + 1)),
        "k draft tokens cost c·k: the target's own token needs no draft.",
    ),
    "the inverse": (
        lambda alpha, c, k: (1 + c * k) / tokens(alpha, k),
        "That is the inverse: seconds with a draft over seconds without.",
    ),
}
for label, (function, says) in SPEEDUPS.items():
    mistake("best-k", label, says=says)(rule(function))
mistake("best-k", "closed form without its corner", expect="ZeroDivisionError")(
    rule(lambda alpha, c, k: (1 - alpha ** (k + 1)) / ((1 - alpha) * (c * k + 1)))
)
mistake("best-k", "always draft tokens", expect="0 draft tokens is a choice")(
    rule(right.speedup, lambda alpha, c, most: max(range(1, most + 1), key=lambda k: right.speedup(alpha, c, k)))
)
mistake("best-k", "not a number where α = 1", expect="your speedup is nan")(
    rule(lambda alpha, c, k: float("nan") if alpha == 1 else right.speedup(alpha, c, k))
)
mistake("best-k", "the largest of equals", expect="best_k is 0")(
    rule(right.speedup, lambda alpha, c, most: max(range(most + 1), key=lambda k: (right.speedup(alpha, c, k), k)))
)
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


@mistake("which-is-exact", "a tolerance of a thousandth", expect="a program that moves")
def thousandth(found, true, accepted, possible):
    if distance(first(found, 1), first(true, 1)) > 1e-3:
        return "first token off"
    if distance(found, true) > 1e-3:
        return "later tokens off"
    return "exact" if accepted > possible - 1e-3 else "exact, accepts less"


@mistake("which-is-exact", "looks at each place alone", expect="a program that moves")
def each_place(found, true, accepted, possible):
    for place in range(3):
        alone = [{}, {}]
        for shares, each in zip(alone, (found, true), strict=True):
            for tokens, chance in each.items():
                shares[(tokens[place],)] = shares.get((tokens[place],), 0.0) + chance
        if distance(*alone) > NOTHING:
            return "later tokens off" if place else "first token off"
    return "exact" if accepted > possible - NOTHING else "exact, accepts less"


@mistake("which-is-exact", "compares floats with ==", expect="it is 'exact'")
def strictly_equal(found, true, accepted, possible):
    said = right.verdict(found, true, possible, possible)
    return said if said != "exact" else "exact" if accepted == possible else "exact, accepts less"


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
