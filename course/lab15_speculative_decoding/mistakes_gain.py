"""Spoilers of lab 15: speedups that grow without end, K rules that never give up, verdicts that look at half of it."""

import torch

from course.kit.answers import answers_of
from course.kit.exercises import KnownAnswers
from course.lab15_speculative_decoding.tiny_models import NOTHING, distance, first

right = answers_of("15_speculative_decoding")

# Speedup and best K.

best_k = KnownAnswers("best-k")

best_k.mistake(
    "K times acceptance, less overhead",
    {"sum(alpha**i for i in range(k + 1)) / (1 + c * k)": "k * alpha * (1 - c)"},
    says="That grows with K without end: a draft token counts only if all before it were accepted.",
)
best_k.mistake(
    "each i counted i times",
    {"sum(alpha**i": "sum(i * alpha**i"},
    says="Σ i·αⁱ counts the i-th draft token i times: each accepted one is one token.",
)
best_k.mistake(
    "without the target's own token",
    {"range(k + 1)": "range(1, k + 1)"},
    says="The token that the target adds itself is missing: the sum begins with α⁰ = 1.",
)
best_k.mistake(
    "one c for all draft tokens",
    {"(1 + c * k)": "(1 + c)"},
    says="Each of the k draft tokens costs c, not all of them together.",
)
best_k.mistake(
    "drafting is free", {" / (1 + c * k)": ""}, says="That is tokens per pass: the time of drafting is missing."
)
best_k.mistake(
    "the verifying pass is free",
    {"(1 + c * k)": "max(c * k, 1e-9)"},
    says="The pass that checks the draft tokens takes time, too: 1 + c·k.",
)
best_k.mistake(
    "one power too many",
    {"range(k + 1)": "range(k + 2)"},
    says="The sum goes one power too far: k draft tokens and one of the target are k + 1 tokens at most.",
)
best_k.mistake(
    "a pass per draft token",
    {"(1 + c * k)": "((1 + c) * k + 1)"},
    says="One pass checks all draft tokens at once: 1 + c·k, not (1 + c)·k + 1.",
)
best_k.mistake(
    "each draft token counts alone",
    {"sum(alpha**i for i in range(k + 1))": "(1 + k * alpha)"},
    says="Draft token i counts with αⁱ and not with α: all those before it must have been accepted.",
)
best_k.mistake(
    "a draft's cost for the bonus, too",
    {"(1 + c * k)": "(1 + c * (k + 1))"},
    says="k draft tokens cost c·k: the target's own token needs no draft.",
)
best_k.mistake(
    "the inverse",
    {"sum(alpha**i for i in range(k + 1)) / (1 + c * k)": "(1 + c * k) / sum(alpha**i for i in range(k + 1))"},
    says="That is the inverse: seconds with a draft over seconds without.",
)
best_k.mistake(
    "closed form without its corner",
    {"sum(alpha**i for i in range(k + 1)) / (1 + c * k)": "(1 - alpha ** (k + 1)) / ((1 - alpha) * (c * k + 1))"},
    expect="ZeroDivisionError",
)
best_k.mistake("no return", {"return sum": "gain = sum"}, expect="speedup returned nothing")
best_k.mistake("always draft tokens", {"range(most + 1)": "range(1, most + 1)"}, expect="0 draft tokens is a choice")
best_k.mistake(
    "not a number where α = 1",
    {"return sum": 'return float("nan") if alpha == 1 else sum'},
    expect="your speedup is nan",
)
best_k.mistake("the largest of equals", {", -k)": ", k)"}, expect="best_k is 0")
best_k.mistake("a float", {"return max": "return 1.0 * max"}, expect="asks for an int")
best_k.mistake("most left out", {"range(most + 1)": "range(most)"}, expect="best_k is")


def _closed(alpha, c, k):
    tokens = k + 1 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)
    return tokens / (c * k + 1)


def _by_tensors(alpha, c, k):
    return (torch.tensor(alpha, dtype=torch.float64) ** torch.arange(k + 1)).sum() / (1 + c * k)


def _climb(alpha, c, most):
    k = 0
    while k < most and right.speedup(alpha, c, k + 1) > right.speedup(alpha, c, k):
        k += 1
    return k


best_k.alternative("closed form, and climbing while it gets better")((_closed, _climb))
best_k.alternative("sums of tensors")((_by_tensors, right.best_k))


# Verdicts.

which_is_exact = KnownAnswers("which-is-exact")

which_is_exact.mistake("looks at the first token only", {"(1, 2, 3)": "(1,)"}, expect="program E")


@which_is_exact.mistake("takes a low acceptance for a mistake", expect="program B")
def strict_is_wrong(found, true, accepted, possible):
    return "first token off" if accepted < possible - NOTHING else right.verdict(found, true, accepted, possible)


@which_is_exact.mistake("looks at the acceptance only", expect="program")
def acceptance_only(found, true, accepted, possible):
    return "exact" if abs(accepted - possible) < NOTHING else "exact, accepts less"


which_is_exact.mistake("looks at all tokens together only", {"(1, 2, 3)": "(3,)"}, expect="program A")
which_is_exact.mistake(
    "a tolerance of a thousandth",
    {"true, places)) > 1e-9": "true, places)) > 1e-3", "possible - 1e-9": "possible - 1e-3"},
    expect="program",  # of the programs, too, some are off by less
)
which_is_exact.mistake(
    "a tolerance of a millionth", {"true, places)) > 1e-9": "true, places)) > 1e-6"}, expect="a program that moves"
)
which_is_exact.mistake(
    "a tolerance of a twentieth for the acceptance",
    {"possible - 1e-9": "possible - 0.05"},
    expect="program B|draft tokens accepted of",
)


@which_is_exact.mistake("keys of one side", expect="KeyError")
def keys_of_one_side(found, true, accepted, possible):
    for places in (1, 2, 3):
        a, b = first(found, places), first(true, places)
        if sum(abs(a[each] - b[each]) for each in b) / 2 > NOTHING:
            return "first token off" if places == 1 else "later tokens off"
    return "exact" if accepted > possible - NOTHING else "exact, accepts less"


@which_is_exact.mistake("looks at each place alone", expect="a program that moves")
def each_place(found, true, accepted, possible):
    for place in range(3):
        alone = [{}, {}]
        for shares, each in zip(alone, (found, true), strict=True):
            for tokens, chance in each.items():
                shares[(tokens[place],)] = shares.get((tokens[place],), 0.0) + chance
        if distance(*alone) > NOTHING:
            return "later tokens off" if place else "first token off"
    return "exact" if accepted > possible - NOTHING else "exact, accepts less"


which_is_exact.mistake(
    "compares floats with ==", {"accepted > possible - 1e-9": "accepted == possible"}, expect="it is 'exact'"
)
which_is_exact.mistake(
    "calls a small distance none", {"true, places)) > 1e-9": "true, places)) > 0.5"}, expect="program"
)


@which_is_exact.alternative("probability by probability")
def largest_difference(found, true, accepted, possible):
    def off(n):
        a, b = first(found, n), first(true, n)
        return max(abs(a.get(each, 0) - b.get(each, 0)) for each in a.keys() | b.keys()) > 1e-10

    if off(1):
        return "first token off"
    if off(2) or off(3):
        return "later tokens off"
    return "exact, accepts less" if possible - accepted > NOTHING else "exact"
