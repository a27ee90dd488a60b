"""Lab 15, what draft tokens are worth: the best K, and which verifiers deserve the word exact."""

import random
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from course.kit.answers import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab15_speculative_decoding import experiments_breaks, tiny_models
from course.lab15_speculative_decoding.tiny_models import NOTHING, Tiny
from course.shared.diagnose import expect
from minillm.predict.serving import speculation as predict

VERDICTS = ("exact", "exact, accepts less", "first token off", "later tokens off")
USUAL = dict(zip("ABCDEF", (VERDICTS[i] for i in (2, 1, 2, 0, 3, 2)), strict=True))


ANSWERS = answers_of("15_speculative_decoding")


@exercise(
    "best-k",
    minutes=15,
    difficulty=2,
    hints=(
        "How often does a pass yield at least 1 token, at least 2, at least k + 1? The mean is the sum of these.",
        "At least i + 1 tokens with probability αⁱ: the first i draft tokens right. The time: one pass, and k draft "
        "tokens of c passes each. Plain decoding yields 1 token in 1 pass.",
    ),
)
def check_best_k(learner: Any) -> Receipt:
    if not (isinstance(learner, tuple) and len(learner) == 2 and all(map(callable, learner))):
        raise CheckFailed("the exercise asks for two functions: (speedup, best_k)")
    gain, best = learner
    drawn, rows = random.Random(random.random()), []
    for alpha, c, k in [(0.8, 0.1, 4), (1.0, 0.0, 3), (0.0, 0.25, 2), (0.95, 0.03, drawn.randint(10, 400))] + [
        (drawn.random(), drawn.uniform(0, 0.5), drawn.randint(0, 9)) for _ in range(100)
    ]:
        found, due = gain(alpha, c, k), predict.speedup(alpha, c, k)
        found = found.item() if getattr(found, "shape", None) == () else found  # a tensor will do
        name = f"α = {alpha:.3f}, c = {c:.3f}, K = {k}"
        expect(isinstance(found, Real), found, "a number", f"{name}: speedup")
        if not abs(found - due) <= NOTHING:  # NaN, too
            shown = "{:.4g}" if not abs(found - due) < 1e-3 * due else "{:.10g}"
            raise CheckFailed(
                f"{name}: your speedup is {shown.format(found)}, but it is {shown.format(due)}.", evidence=found
            )
    for alpha, c, k in ((0.8, 0.1, 4), (0.8, 0.1, 8), (0.8, 0.02, 8)):
        rows.append(
            row(f"α = {alpha}, c = {c}, K = {k}: speedup", predict.speedup(alpha, c, k), gain(alpha, c, k), "", 1e-9)
        )
    for alpha, c, most in (
        [(0.8, 0.1, 16), (0.8, 0.02, 16), (0.5, 0.25, 4), (0.2, 0.3, 16), (1.0, 0.0, 7), (1.0, 1.0, 3)]
        + [(drawn.random(), drawn.uniform(0, 0.6), 16) for _ in range(100)]
        + [(0.99, 0.0, drawn.randint(20, 60)), (0.9, 0.0, 0)]
    ):
        found, right = best(alpha, c, most), predict.best_k(alpha, c, most)
        found = found.item() if getattr(found, "shape", None) == () else found
        expect(isinstance(found, Integral), found, "an int", "best_k")
        if found != right:
            told = f"speedup {predict.speedup(alpha, c, right):.3f} at K = {right}"
            other = f", {predict.speedup(alpha, c, found):.3f} at your {found}" if found >= 0 else ""
            hint = ": 0 draft tokens is a choice, too" if right == 0 else ""
            raise CheckFailed(
                f"α = {alpha:.3f}, c = {c:.3f}, at most {most}: best_k is {right}, you say {found}: {told}{other}{hint}"
            )
    for alpha, c in ((0.8, 0.1), (0.8, 0.02), (0.2, 0.3)):
        rows.append(row(f"α = {alpha}, c = {c}: best K", predict.best_k(alpha, c, 16), best(alpha, c, 16)))
    return receipt("speedup and the K that is best", rows)


@exercise(
    "which-is-exact",
    minutes=15,
    difficulty=3,
    hints=(
        "Two questions, in this order: is the distribution the target's, and if so, were as many draft tokens "
        "accepted as can be? A low acceptance alone is no mistake.",
        "The first token can be right while the tokens together are not. So compare the first "
        "token, then the first two together, and so on. A distance: Σ |a - b| / 2 over all keys of both.",
    ),
)
def check_verdict(learner: Callable) -> Receipt:
    generator, rows = tiny_models.seeded(), []
    for name, program in experiments_breaks.PROGRAMS.items():
        right = ""
        while right != USUAL[name]:  # with some pairs of models a mistake makes no difference
            target, draft = Tiny(generator, experiments_breaks.VOCAB), Tiny(generator, experiments_breaks.VOCAB)
            evidence = experiments_breaks.evidence(program, target, draft)
            right = ANSWERS.verdict(*evidence)
        found = learner(*evidence)
        if found not in VERDICTS:
            raise CheckFailed(f"your verdict is {found!r}: it must be one of {', '.join(map(repr, VERDICTS))}")
        if found != right:
            raise CheckFailed(f"program {name}: you say {found!r}, it is {right!r}: {_say_verdict(evidence)}", rows)
        rows.append(row(f"program {name}", right, found))
    _hold_small_faults(learner, evidence[1], rows)
    return receipt("verdicts by enumeration", rows)


def _hold_small_faults(learner: Callable, true: dict, rows: list) -> None:
    """A fault of 1e-8 is one, too, even if each place alone is right, and rounding of 1e-13 is none."""
    places = {tokens[0] for tokens in true}
    gone, new = min(places), next(token for token in range(experiments_breaks.VOCAB) if token not in places)
    found = {((new if tokens[0] == gone else tokens[0]), *tokens[1:]): chance for tokens, chance in true.items()}
    if (said := learner(found, true, 1.0, 1.0)) != VERDICTS[2]:
        raise CheckFailed(f"a program that writes first token {new} instead of {gone}: you say {said!r}", rows)
    likely = max(true, key=true.get)
    first_, second, third = ((token + 1) % experiments_breaks.VOCAB for token in likely)
    away, later = (first_, *likely[1:]), (*likely[:-1], third)
    joint = ((likely, -1), ((first_, second, likely[2]), -1), (away, 1), ((likely[0], second, likely[2]), 1))
    for amount, moves, right in (
        (1e-8, ((likely, -1), (away, 1)), VERDICTS[2]),
        (1e-8, ((likely, -1), (later, 1)), VERDICTS[3]),
        (1e-8, joint, VERDICTS[3]),
        (1e-13, ((likely, -1), (away, 1)), VERDICTS[0]),
    ):
        found = dict(true)
        for tokens, sign in moves:
            found[tokens] = found.get(tokens, 0.0) + sign * amount
        said = learner(found, true, 1.0 - 1e-13, 1.0)
        if said != right:
            moved = ", ".join(f"{tokens} by {sign * amount:+g}" for tokens, sign in moves)
            raise CheckFailed(
                f"a program that moves the probability of {moved}: you say {said!r}, it is {right!r}", rows
            )
    for accepted, possible, right in ((0.5, 0.5, VERDICTS[0]), (1.5, 1.6, VERDICTS[1]), (1.5, 1.5 + 1e-8, VERDICTS[1])):
        if (said := learner(dict(true), true, accepted, possible)) != right:
            raise CheckFailed(
                f"the target's own distribution, {accepted} draft tokens accepted of {possible} possible: you say "
                f"{said!r}, it is {right!r}",
                rows,
            )
    rows.append(row("differences of 1e-8 found, rounding of 1e-13 not", True, True))


def _say_verdict(evidence: tuple) -> str:
    found, true, accepted, possible = evidence
    off = tiny_models.distance(tiny_models.first(found, 1), tiny_models.first(true, 1))
    whole = tiny_models.distance(found, true)
    return (
        f"the first token's distribution is off by {off:.4f}, all {len(next(iter(true)))} tokens together by "
        f"{whole:.4f}; {accepted:.3f} draft tokens of {possible:.3f} possible are accepted"
    )
