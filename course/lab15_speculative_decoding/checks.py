"""Lab 15, speculative decoding: several guesses checked in one pass, the target's distribution unchanged.

    lab_15.py             what to draw after a rejection; the verifier
    lab_15_loop.py        the loop around it
    lab_15_proposers.py   a draft that says what it drew from; prompt lookup
    lab_15_gain.py        how many guesses pay; which programs are exact

Distributions are enumerated on tiny vocabularies (`tiny_models.py`), passes are counted: no check waits for luck.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from course.lab15_speculative_decoding import tiny_models
from course.lab15_speculative_decoding.tiny_models import NOTHING, Tiny
from minillm.labkit.exercises import CheckFailed, exercise
from minillm.labkit.receipts import Receipt, row
from minillm.serve.speculate.verify import choose, uniform

PROMPT = [0, 1]


# The course's own answers.


def residual(p: Tensor, q: Tensor) -> Tensor:
    """[vocab], what to draw from after a rejection: max(p - q, 0), normalised; p itself where p = q."""
    left = (p - q).clamp(min=0)
    total = left.sum()
    return left / total if total > 0 else p


def verify_guesses(target: Tensor, guesses: Sequence[int], q: Tensor, draw: Any) -> list[int]:
    """The accepted guesses and one token more: from the residual after a rejection, else from the target's last row."""
    for place, guess in enumerate(guesses):
        if not uniform(draw) < target[place, guess] / q[place, guess]:
            return [*guesses[:place], choose(residual(target[place], q[place]), draw)]
    return [*guesses, choose(target[len(guesses)], draw)]


# What they are held to.


@exercise(
    "residual",
    minutes=10,
    difficulty=2,
    hints=(
        "Accepting gives every token min(p, q) of probability. How much of p is still missing, token by token?",
        "max(p - q, 0) is missing. It sums to 1 - Σ min(p, q), which is how often a guess is rejected, so it has to be "
        "divided by its own sum. And if p equals q, nothing is missing at all.",
        "left = (p - q).clamp(min=0); total = left.sum(); return left / total if total > 0 else p.",
    ),
)
def check_residual(learner: Callable) -> Receipt:
    generator, rows = tiny_models.seeded(), []
    for vocab in (3, 5, 50):
        p, q = (tiny_models.random_row(generator, vocab) for _ in range(2))
        found = _probabilities(learner(p.clone(), q.clone()), vocab)
        overlap = torch.minimum(p, q)
        if not torch.allclose(found, residual(p, q), atol=NOTHING, rtol=0):
            raise CheckFailed(_say_residual(found, p, q))
        together = overlap + (1 - overlap.sum()) * found
        rows.append(row(f"{vocab} tokens: Σ min(p, q) accepted", None, overlap.sum()))
        rows.append(
            row(
                "    min(p, q) + (1 - Σ min) · residual - p, at most", True, float((together - p).abs().max()) < NOTHING
            )
        )
    p = tiny_models.random_row(generator)
    same = _probabilities(learner(p.clone(), p.clone()), 5)
    if not torch.isfinite(same).all() or abs(float(same.sum()) - 1) > NOTHING:
        raise CheckFailed(f"p = q gives {same.tolist()}: nothing is left over, and 0/0 is no distribution. Return p")
    return Receipt("what a rejection has to make up for", tuple(rows))


def _probabilities(found: Any, vocab: int) -> Tensor:
    if not isinstance(found, Tensor) or found.shape != (vocab,):
        raise CheckFailed(f"you returned {found!r:.60}; asked for is a tensor of {vocab} probabilities")
    return found.double()


def _say_residual(found: Tensor, p: Tensor, q: Tensor) -> str:
    more, less = (p - q).clamp(min=0), (q - p).clamp(min=0)
    said = tiny_models.nearest(
        found,
        {
            "that is p: tokens the draft likes already came through by being accepted, and now come twice": p,
            "that is q: the draft's favourites get what was just taken from them": q,
            f"it sums to {float(more.sum()):.3f}, the share of rejections: divide by its sum": more,
            "that is max(q - p, 0): what the draft says too often, not what it says too rarely": less / less.sum(),
            "that is |p - q|: where the draft says a token too often, nothing is missing": (p - q).abs()
            / (p - q).abs().sum(),
        },
    )
    return said or f"accepted and residual together give {(torch.minimum(p, q) + more.sum() * found).tolist()}, not p"


@exercise(
    "verifier",
    minutes=20,
    difficulty=3,
    hints=(
        "Go through the guesses in order. Guess i was drawn from q[i]; what the target would have drawn from is "
        "target[i]. What happens to the guesses after a rejected one?",
        "Accept with probability min(1, p/q), so if uniform(draw) < target[i, guess] / q[i, guess], with a fresh "
        "number each. At the first rejection: the accepted ones, one token from the residual, stop. None rejected: "
        "the target has one row more than there are guesses.",
        "for i, guess in enumerate(guesses): if not uniform(draw) < target[i, guess] / q[i, guess]: return "
        "[*guesses[:i], choose(residual(target[i], q[i]), draw)]. Behind the loop: "
        "[*guesses, choose(target[-1], draw)].",
    ),
)
def check_verifier(learner: Callable) -> Receipt:
    generator, rows = tiny_models.seeded(), []
    for k, vocab in ((1, 5), (2, 3), (3, 2)):
        target, draft = _differing(generator, vocab)
        rows += hold_verifier(learner, target, draft, k)
    same = Tiny(generator, 2)
    found = tiny_models.enumerated(lambda draw: len(_verified(learner, same, same, 3, draw)[0]))
    rows.append(row("draft = target, K = 3: tokens of every pass", (4,), tuple(found)))
    return Receipt("every outcome of the verifier, enumerated", tuple(rows))


def _differing(generator: torch.Generator, vocab: int) -> tuple[Tiny, Tiny]:
    """Two models that tell mistakes apart: with 5 tokens, each likes at least two more than the other does."""
    while True:
        target, draft = Tiny(generator, vocab), Tiny(generator, vocab)
        more = int((target(PROMPT) > draft(PROMPT)).sum())
        if vocab < 5 or 2 <= more <= vocab - 2:
            return target, draft


def _verified(learner: Callable, target: Tiny, draft: Callable, k: int, draw: Any) -> tuple[list[int], list[int]]:
    """(what the learner returned, the guesses)."""
    guesses, q = tiny_models.drawn_draft(draft, choose, PROMPT, k, draw)
    found = learner(target.rows(PROMPT, guesses), list(guesses), q, draw)
    if not tiny_models.is_tokens(found, target.vocab) or not found:
        raise CheckFailed(f"K = {k}: you returned {found!r:.60}; asked for is a list of at least one token")
    if len(found) > k + 1:
        raise CheckFailed(f"K = {k}: you returned {len(found)} tokens: {k} guesses and one more are all there can be")
    if list(found[:-1]) != guesses[: len(found) - 1]:
        raise CheckFailed(
            f"guesses {guesses}, you returned {list(found)}: only the last token may be new. After a rejected guess, "
            "the others were guessed for a text that does not exist: stop there"
        )
    return list(found), guesses


def hold_verifier(learner: Callable, target: Tiny, draft: Tiny, k: int) -> list:
    """Rows for K = k; CheckFailed with the likeliest mistake if a distribution or the accepted number is off."""

    def run(draw):
        found, guesses = _verified(learner, target, draft, k, draw)
        whole = list(found)
        while len(whole) < k + 1:
            whole.append(choose(target([*PROMPT, *whole]), draw))
        return tuple(whole), len(found), found[: len(guesses)] == guesses and len(found) == k

    everything = tiny_models.enumerated(run)
    tokens, expected = {}, 1 + tiny_models.accepted(target, draft, PROMPT, k)
    for (whole, _, _), chance in everything.items():
        tokens[whole] = tokens.get(whole, 0.0) + chance
    length = sum(size * chance for (_, size, _), chance in everything.items())
    short = sum(chance for (_, _, stopped), chance in everything.items() if stopped)
    off = [
        tiny_models.distance(tiny_models.first(tokens, n), tiny_models.written(target, PROMPT, n))
        for n in range(1, k + 2)
    ]
    rows = [
        row(f"K = {k}, {target.vocab} tokens: distance from the target's distribution is 0", True, max(off) < NOTHING),
        row("    tokens per pass, expected", expected, length, "", NOTHING),
    ]
    if max(off) >= NOTHING:
        raise CheckFailed(_say_verifier(tokens, off, target, draft, k, short > NOTHING), rows)
    if abs(length - expected) > NOTHING:
        raise CheckFailed(_say_length(length, expected, short > NOTHING), rows)
    return rows


def _say_length(length: float, expected: float, no_bonus: bool) -> str:
    head = f"the right distribution, but {length:.3f} tokens per pass where {expected:.3f} are possible: "
    if no_bonus:
        return head + "when all guesses are accepted, the target's last row gives one token more for nothing: the bonus"
    return head + "exact, yet too strict. Accept with min(1, p/q), not less"


def _say_verifier(tokens: dict, off: list[float], target: Tiny, draft: Tiny, k: int, no_bonus: bool) -> str:
    p, q = target(PROMPT), draft(PROMPT)
    if off[0] >= NOTHING:
        found, kept = tiny_models.as_row(tiny_models.first(tokens, 1), len(p)), torch.minimum(p, q)
        upside = q * (q / p).clamp(max=1)
        best = torch.zeros_like(p)
        best[p.argmax()] = 1
        known = {
            "its distribution is the draft's: the first guess is never verified": q,
            "after a rejection you draw from p: draw from the residual": kept + (1 - kept.sum()) * p,
            "after a rejection you draw from q: draw from the residual": kept + (1 - kept.sum()) * q,
            "after a rejection you take the likeliest token: draw from the residual": kept + (1 - kept.sum()) * best,
            "you accept with q/p: the target's probability belongs on top": upside
            + (1 - upside.sum()) * residual(p, q),
        }
        said = tiny_models.nearest(found, known) or "is p divided by q, each at the guessed token?"
        return f"the first token is off by {off[0]:.3f} (total variation): {said}"
    place = next(i for i, each in enumerate(off) if each >= NOTHING)
    if place == k and k == 1:
        return (
            f"the first token is right, the bonus token is off by {off[place]:.3f}: it is drawn from the target's row "
            "after the last guess, the row that no guess needs"
        )
    return (
        f"the first token is right, but the first {place + 1} together are off by {off[place]:.3f}: guess {place + 1} "
        "is accepted or not by what happened to the one before. Each guess needs a number of its own, fresh, and its "
        "own rows of target and q"
    )
