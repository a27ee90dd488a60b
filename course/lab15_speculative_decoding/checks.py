"""Lab 15, speculative decoding: several draft tokens checked in one pass, the target's distribution unchanged.

    checks.py             what to sample after a rejection; the verifier
    checks_loop.py        the loop around it
    checks_proposers.py   a draft that says what it drew from; prompt lookup
    checks_gain.py        how many draft tokens pay; which programs are exact

Distributions are enumerated on tiny vocabularies (`tiny_models.py`), passes are counted: no check waits for luck.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from course.kit.answers import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab15_speculative_decoding import tiny_models
from course.lab15_speculative_decoding.tiny_models import NOTHING, Tiny
from course.shared.diagnose import expect
from minillm.serve.speculate.verify import choose

PROMPT = [0, 1]


ANSWERS = answers_of("15_speculative_decoding")


@exercise(
    "residual",
    minutes=10,
    difficulty=2,
    hints=(
        "Accepting gives every token min(p, q) of probability. How much of p is still missing, token by token?",
        "max(p - q, 0) is missing. It sums to 1 - Σ min(p, q), which is how often a draft token is rejected, so it "
        "has to be divided by its own sum. And if p equals q, nothing is missing at all.",
    ),
)
def check_residual(learner: Callable) -> Receipt:
    generator, rows = tiny_models.seeded(), []
    for name, p, q in _pairs(generator):
        answer = _probabilities(learner(p.clone(), q.clone()), len(p))
        found = answer.double()
        overlap = torch.minimum(p, q)
        left = (p - q).clamp(min=0)
        off = float((found - left / left.sum()).abs().max())
        if not off <= NOTHING:  # NaN, too
            raise CheckFailed(
                f"{name}, p = {_show(p)}, q = {_show(q)}: you returned {_show(found)}, but it is "
                f"{_show(left / left.sum())}. They differ by up to {off:.1e}, and {NOTHING:g} is allowed."
                f"{_say_dtype(answer)}",
                evidence=found,
            )
        together = overlap + (1 - overlap.sum()) * found
        fits = float((together - p).abs().max()) < NOTHING
        rows.append(row(f"{name}: min(p, q) + (1 - Σ min) · residual is p", True, fits))
        rows.append(row("    accepted: Σ min(p, q)", None, overlap.sum()))
    p = tiny_models.random_row(generator)
    same = _probabilities(learner(p.clone(), p.clone()), 5).double()
    if not float((same - p).abs().max()) <= NOTHING:  # NaN, too
        raise CheckFailed(
            f"p = q gives {same.tolist()}: nothing is left over, and 0/0 is no distribution. Return p itself"
        )
    return receipt("what a rejection has to make up for", rows)


def _pairs(generator: torch.Generator) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, p, q): without zeros; after top-k, some tokens 0 in p, in q and in both; and a q of a single 1."""
    for vocab in (3, random.randint(4, 9), random.randint(30, 90)):
        yield f"{vocab} tokens", *(tiny_models.random_row(generator, vocab) for _ in range(2))
    p, q = (model(PROMPT) for model in _differing(generator, random.randint(6, 9), top_k=True))
    yield f"{len(p)} tokens after top-k", p, q
    yield f"{len(p)} tokens, a q of a single 1", p, torch.zeros_like(q).index_fill(0, q.argmax(), 1.0)


def _probabilities(found: Any, vocab: int) -> Tensor:
    expect(isinstance(found, Tensor) and found.shape == (vocab,), found, f"a tensor of {vocab} probabilities")
    return found


def _say_dtype(found: Tensor) -> str:
    return "" if found.dtype == torch.float64 else f" Your answer is {found.dtype}: p and q are float64, stay there."


def _show(row_of: Tensor) -> str:
    shown = ", ".join(f"{x:.3f}" for x in row_of[:5].tolist())
    return f"({shown}{', ...' if len(row_of) > 5 else ''})"


@exercise(
    "verifier",
    minutes=20,
    difficulty=3,
    hints=(
        "Go through the draft tokens in order. Draft token i was sampled from q[i]; what the target would have "
        "sampled from is target[i]. What happens to the draft tokens after a rejected one?",
        "Accept with probability min(1, p/q), so if uniform(draw) < target[i, token] / q[i, token], with a fresh "
        "number each. At the first rejection: the accepted ones, one token from the residual, stop. None rejected: "
        "the target has one row more than there are draft tokens.",
    ),
)
def check_verifier(learner: Callable) -> Receipt:
    generator, rows = tiny_models.seeded(), []
    for k, vocab in ((1, random.randint(5, 12)), (2, 3), (3, 2), (4, 2)):
        rows += check_verifier_exactly(learner, *_differing(generator, vocab), k)
    rows += check_verifier_exactly(learner, *_differing(generator, random.randint(6, 9), top_k=True), 1, " after top-k")
    same = Tiny(generator, 2)
    found = tiny_models.enumerated(lambda draw: len(_verified(learner, same, same, 3, draw)[0]))
    rows.append(row("draft = target, K = 3: tokens of every pass", (4,), tuple(found)))
    return receipt("every outcome of the verifier, enumerated", rows)


def _differing(generator: torch.Generator, vocab: int, *, top_k: bool = False) -> tuple[Tiny, Tiny]:
    """Two models that tell mistakes apart: with 5 tokens, each likes at least two more than the other does. top_k: one
    token is ruled out in both, one in the target only, one in the draft only."""
    both, ours, other = random.sample(range(vocab), 3) if top_k else (None, None, None)
    while True:
        target, draft = Tiny(generator, vocab), Tiny(generator, vocab)
        if top_k:
            target.rule_out(both, ours)
            draft.rule_out(both, other)
        more = int((target(PROMPT) > draft(PROMPT)).sum())
        if vocab < 5 or 2 <= more <= vocab - 2:
            return target, draft


def _verified(learner: Callable, target: Tiny, draft: Callable, k: int, draw: Any) -> tuple[list[int], list[int]]:
    """(what the learner returned, the draft tokens)."""
    drafted, q = tiny_models.drawn_draft(draft, choose, PROMPT, k, draw)
    found = learner(target.rows(PROMPT, drafted), list(drafted), q, draw)
    fits = tiny_models.is_tokens(found, target.vocab) and found
    expect(fits, found, "a list of at least one token", f"K = {k}: you")
    if len(found) > k + 1:
        raise CheckFailed(
            f"K = {k}: you returned {len(found)} tokens: {k} draft tokens and one more are all there can be"
        )
    if list(found[:-1]) != drafted[: len(found) - 1]:
        raise CheckFailed(
            f"draft tokens {drafted}, you returned {list(found)}: only the last token may be new. After a rejected "
            "draft token, the others were drafted for a text that does not exist: stop there"
        )
    return list(found), drafted


def check_verifier_exactly(learner: Callable, target: Tiny, draft: Tiny, k: int, after: str = "") -> list:
    """Rows for K = k; CheckFailed with the likeliest mistake if a distribution or the accepted number is off."""

    def run(draw):
        found, drafted = _verified(learner, target, draft, k, draw)
        whole = list(found)
        while len(whole) < k + 1:
            whole.append(choose(target([*PROMPT, *whole]), draw))
        return tuple(whole), len(found), found[: len(drafted)] == drafted and len(found) == k

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
        row(f"K = {k}, {target.vocab} tokens{after}: distance from the target's is 0", True, max(off) < NOTHING),
        row("    tokens per pass, expected", expected, length, "", NOTHING),
    ]
    if max(off) >= NOTHING:
        raise CheckFailed(_say_verifier(off, k, after), rows, evidence={t: c for t, c in tokens.items() if c > 1e-12})
    if abs(length - expected) > NOTHING:
        raise CheckFailed(_say_length(length, expected, short > NOTHING), rows)
    return rows


def _say_length(length: float, expected: float, no_bonus: bool) -> str:
    head = f"the right distribution, but {length:.3f} tokens per pass where {expected:.3f} are possible: "
    if no_bonus:
        return (
            head
            + "when all draft tokens are accepted, the target's last row gives one token more for nothing: the bonus"
        )
    return head + "exact, yet too strict. Accept with min(1, p/q), not less"


def _say_verifier(off: list[float], k: int, after: str) -> str:
    place = next(i for i, each in enumerate(off) if each >= NOTHING)
    if max(off) < 1e-5:
        return (
            f"K = {k}{after}: right to float32's digits only, off by {max(off):.1e}. The rows are float64, stay there"
        )
    if place == 0:
        return f"K = {k}{after}: the first token's distribution is off by {off[0]:.3f} (total variation)."
    if place == k and k == 1:
        return (
            f"the first token is right, the bonus token is off by {off[place]:.3f}: it is sampled from the target's "
            "row after the last draft token, the row that no draft token needs"
        )
    return (
        f"the first token is right, but the first {place + 1} together are off by {off[place]:.3f}: draft token "
        f"{place + 1} is accepted or not by what happened to the one before. Each draft token needs a number of its "
        "own, fresh, and its own rows of target and q"
    )
