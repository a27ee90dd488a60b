"""Spoilers of lab 15: residuals, verifiers and loops that lose the target's distribution or a token of each pass."""

import torch

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake
from minillm.serve.speculate.verify import choose, uniform

right = answers_of("15_speculative_decoding")

# The residual.


@mistake(
    "residual",
    "samples from p again",
    says="This is p: tokens that the draft likes were already accepted and now come twice.",
)
def from_p(p, q):
    return p


@mistake("residual", "samples from q", says="This is q: the draft's favourites get what was just taken from them.")
def from_q(p, q):
    return q


@mistake("residual", "not normalised", says="It sums to the share of rejections: divide by its sum.")
def not_normalised(p, q):
    return (p - q).clamp(min=0)


@mistake(
    "residual",
    "the wrong way round",
    says="This is max(q - p, 0): what the draft says too often, not what it says too rarely.",
)
def wrong_way(p, q):
    left = (q - p).clamp(min=0)
    return left / left.sum() if left.sum() > 0 else p


@mistake(
    "residual",
    "absolute difference",
    says="This is |p - q|: where the draft says a token too often, nothing is missing.",
)
def absolute(p, q):
    left = (p - q).abs()
    return left / left.sum() if left.sum() > 0 else p


@mistake("residual", "0 / 0 where p = q", expect="no distribution")
def no_corner(p, q):
    left = (p - q).clamp(min=0)
    return left / left.sum()


@mistake(
    "residual",
    "a small number against 0 / 0",
    says="A small number in the denominator makes every residual sum to less than 1, and where p = q to 0. Test for a "
    "sum of 0 instead.",
)
def epsilon(p, q):
    left = (p - q).clamp(min=0)
    return left / (left.sum() + 1e-8)


@mistake(
    "residual", "softmax of the difference", says="A softmax gives every token some probability. Divide by the sum."
)
def softmaxed(p, q):
    return torch.softmax((p - q).clamp(min=0), dim=-1)


@mistake("residual", "divides by the overlap", says="Divide by what is left, 1 - Σ min(p, q), not by Σ min(p, q).")
def by_overlap(p, q):
    return (p - q).clamp(min=0) / torch.minimum(p, q).sum()


@mistake("residual", "uniform where p = q", expect="Return p itself")
def uniform_corner(p, q):
    left = (p - q).clamp(min=0)
    return left / left.sum() if left.sum() > 0 else torch.full_like(p, 1 / len(p))


@mistake(
    "residual",
    "the token that lacks most",
    says="The token that lacks most is not the only one: sample from all that is missing.",
)
def lacks_most(p, q):
    return torch.zeros_like(p).index_fill_(0, (p - q).argmax(), 1.0)


@alternative("residual", "p minus the overlap")
def without_overlap(p, q):
    left = p - torch.minimum(p, q)
    return torch.where(left.sum() > 0, left / left.sum().clamp(min=1e-300), p)


# The verifier.


def verifier(accept=lambda p, q: p / q, after=right.residual, bonus=-1):
    def verify(target, guesses, q, draw):
        for i, guess in enumerate(guesses):
            if not uniform(draw) < accept(float(target[i, guess]), float(q[i, guess])):
                return [*guesses[:i], choose(after(target[i], q[i]), draw)]
        return [*guesses, choose(target[bonus], draw)]

    return verify


VERIFIERS = {
    "q on top": (verifier(lambda p, q: q / p), "You accept with q/p: the target's probability belongs on top."),
    "samples from p after a rejection": (
        verifier(after=lambda p, q: p),
        "After a rejection you sample from p: sample from the residual.",
    ),
    "samples from q after a rejection": (
        verifier(after=lambda p, q: q),
        "After a rejection you sample from q: sample from the residual.",
    ),
    "accepts with p": (
        verifier(lambda p, q: p),
        "You accept with p alone: divide by q, from which the token was sampled.",
    ),
    "accepts if p is at least q": (
        verifier(lambda p, q: float(p >= q)),
        "You accept exactly if p >= q. Below that accept with probability p/q.",
    ),
}
for label, (function, says) in VERIFIERS.items():
    mistake("verifier", label, says=says)(function)
mistake("verifier", "bonus from the row of the last draft token", expect="bonus token is off")(verifier(bonus=-2))


@mistake(
    "verifier",
    "likeliest token after a rejection",
    says="After a rejection you take the likeliest token: sample from the residual.",
)
def likeliest_after(target, guesses, q, draw):
    best = lambda p, q: torch.zeros_like(p).index_fill_(0, p.argmax(), 1.0)  # noqa: E731
    return verifier(after=best)(target, guesses, q, draw)


@mistake(
    "verifier",
    "the target's rows off by one",
    says="The rows are off by one: target[i] judges draft token i, target[i + 1] the next one.",
)
def next_rows(target, guesses, q, draw):
    for i, guess in enumerate(guesses):
        if not uniform(draw) < target[i + 1, guess] / q[i, guess]:
            return [*guesses[:i], choose(right.residual(target[i + 1], q[i]), draw)]
    return [*guesses, choose(target[-1], draw)]


@mistake("verifier", "accepted tokens only", expect="at least one token")
def accepted_only(target, guesses, q, draw):
    found = right.verify_draft(target, guesses, q, draw)
    return found if found[: len(guesses)] == guesses else found[:-1]


@mistake("verifier", "bonus forgotten", expect="one token more for nothing")
def no_bonus(target, guesses, q, draw):
    return right.verify_draft(target, guesses, q, draw)[: len(guesses)]


@mistake(
    "verifier",
    "first draft token never verified",
    says="Its distribution is the draft's: either the first draft token is never verified, or the residual is taken "
    "the wrong way round.",
)
def first_for_free(target, guesses, q, draw):
    return [guesses[0], *right.verify_draft(target[1:], guesses[1:], q[1:], draw)]


@mistake("verifier", "one number for all draft tokens", expect="a number of its own")
def one_number(target, guesses, q, draw):
    number = uniform(draw)
    for i, guess in enumerate(guesses):
        if not number < target[i, guess] / q[i, guess]:
            return [*guesses[:i], choose(right.residual(target[i], q[i]), draw)]
    return [*guesses, choose(target[-1], draw)]


@mistake("verifier", "goes on after a rejection", expect="only the last token may be new")
def goes_on(target, guesses, q, draw):
    tokens = []
    for i, guess in enumerate(guesses):
        keeps = uniform(draw) < target[i, guess] / q[i, guess]
        tokens.append(guess if keeps else choose(right.residual(target[i], q[i]), draw))
    return [*tokens, choose(target[-1], draw)]


@mistake("verifier", "sampled draft tokens verified as if they were certain", expect="exact, yet too strict")
def as_if_certain(target, guesses, q, draw):
    for i, guess in enumerate(guesses):
        if not uniform(draw) < target[i, guess]:
            left = target[i].clone()
            left[guess] = 0
            return [*guesses[:i], choose(left / left.sum(), draw)]
    return [*guesses, choose(target[-1], draw)]


@mistake("verifier", "numbers of its own", expect="draw with uniform")
def torch_numbers(target, guesses, q, draw):
    return guesses[:1] if torch.rand((), generator=draw) < target[0, guesses[0]] else [0]


@alternative("verifier", "all numbers first, then the length")
def numbers_first(target, guesses, q, draw):
    numbers = [uniform(draw) for _ in guesses]
    ratios = [float(target[i, guess] / q[i, guess]) for i, guess in enumerate(guesses)]
    length = 0
    while length < len(guesses) and numbers[length] < ratios[length]:
        length += 1
    last = target[length] if length == len(guesses) else right.residual(target[length], q[length])
    return [*guesses[:length], choose(last, draw)]


@alternative("verifier", "multiplies by q instead of dividing")
def multiplies(target, guesses, q, draw):
    for i, guess in enumerate(guesses):
        if uniform(draw) * q[i, guess] >= target[i, guess]:
            return [*guesses[:i], choose(right.residual(target[i], q[i]), draw)]
    return [*guesses, choose(target[-1], draw)]


@alternative("verifier", "rejects where the number is at least the ratio")
def by_rejection(target, guesses, q, draw):
    kept = []
    for p_row, q_row, guess in zip(target, q, guesses, strict=False):
        if uniform(draw) >= min(1.0, float(p_row[guess]) / float(q_row[guess])):
            left = torch.relu(p_row - q_row)
            return [*kept, choose(left / left.sum(), draw)]
        kept.append(guess)
    return [*kept, choose(target[len(kept)], draw)]


# The loop.


def loop(target, draft, prompt, count, k, draw, *, context=None, pick=choose, checked=right.verify_draft, spare=True):
    tokens = list(prompt)
    while (left := len(prompt) + count - len(tokens)) > 0:
        guesses, rows = [], []
        for _ in range(min(k, left - 1) if spare else k):
            rows.append(draft([*tokens, *guesses] if context is None else context(tokens, guesses)))
            guesses.append(pick(rows[-1], draw))
        q = torch.stack(rows) if rows else None
        tokens += checked(target.rows(tokens, guesses), guesses, q, draw)
    return tokens[len(prompt) :] if spare else tokens[len(prompt) : len(prompt) + count]


@mistake("speculative-loop", "keeps every draft token", expect="distribution is off")
def keeps_all(target, draft, prompt, count, k, draw):
    return loop(target, draft, prompt, count, k, draw, checked=lambda p, g, q, d: [*g, choose(p[-1], d)])


@mistake("speculative-loop", "draft tokens the likeliest, declares it as sampled", expect="distribution is off")
def likeliest_declared(target, draft, prompt, count, k, draw):
    return loop(target, draft, prompt, count, k, draw, pick=lambda row, draw: int(row.argmax()))


@mistake("speculative-loop", "drops the bonus", expect="bonus token of each pass is lost")
def drops_bonus(target, draft, prompt, count, k, draw):
    def without(p, guesses, q, draw):
        found = right.verify_draft(p, guesses, q, draw)
        return found[: max(1, len(guesses))]

    tokens = list(prompt)
    while (left := len(prompt) + count - len(tokens)) > 0:
        guesses, q = [], []
        for _ in range(min(k, left)):
            q.append(draft([*tokens, *guesses]))
            guesses.append(choose(q[-1], draw))
        tokens += without(target.rows(tokens, guesses), guesses, torch.stack(q), draw)
    return tokens[len(prompt) :]


@mistake("speculative-loop", "a pass for each draft token", expect="each draft token has a pass of its own")
def pass_per_guess(target, draft, prompt, count, k, draw):
    tokens = list(prompt)
    while (left := len(prompt) + count - len(tokens)) > 0:
        guesses, q = [], []
        for _ in range(min(k, left - 1)):
            q.append(draft([*tokens, *guesses]))
            guesses.append(choose(q[-1], draw))
        rows = torch.cat([target.rows([*tokens, *guesses[:i]]) for i in range(len(guesses) + 1)])
        tokens += right.verify_draft(rows, guesses, torch.stack(q) if q else None, draw)
    return tokens[len(prompt) :]


@mistake(
    "speculative-loop",
    "draft tokens all from the verified tokens",
    expect="draft each token after those drafted before it",
)
def stale(target, draft, prompt, count, k, draw):
    return loop(target, draft, prompt, count, k, draw, context=lambda tokens, guesses: tokens)


@mistake("speculative-loop", "writes beyond the end", expect="you returned .* tokens where")
def too_many(target, draft, prompt, count, k, draw):
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens += loop(target, draft, tokens, k + 1, k, draw)
    return tokens[len(prompt) :]


@alternative("speculative-loop", "draft tokens k to the end and cuts the answer")
def cuts(target, draft, prompt, count, k, draw):
    return loop(target, draft, prompt, count, k, draw, spare=False)


@alternative("speculative-loop", "a round as a function, called until there is enough")
def rounds(target, draft, prompt, count, k, draw):
    answer = []
    while len(answer) < count:
        known, guesses, q = [*prompt, *answer], [], []
        while len(guesses) < min(k, count - len(answer) - 1):
            row = draft(known + guesses)
            q, guesses = [*q, row], [*guesses, choose(row, draw)]
        p = target.rows(known, guesses)
        answer += numbers_first(p, guesses, q and torch.stack(q), draw)
    return answer
