"""Spoilers of lab 15: residuals, verifiers and loops that lose the target's distribution or a token of each pass."""

import torch

from course.lab15_speculative_decoding import checks as right
from minillm.labkit.exercises import alternative, mistake
from minillm.serve.speculate.verify import choose, uniform

# The residual.


@mistake("residual", "draws from p again", expect="that is p")
def from_p(p, q):
    return p


@mistake("residual", "draws from q", expect="that is q")
def from_q(p, q):
    return q


@mistake("residual", "not normalised", expect="divide by its sum")
def not_normalised(p, q):
    return (p - q).clamp(min=0)


@mistake("residual", "the wrong way round", expect="too often, not what it says too rarely")
def wrong_way(p, q):
    left = (q - p).clamp(min=0)
    return left / left.sum() if left.sum() > 0 else p


@mistake("residual", "absolute difference", expect=r"\|p - q\|")
def absolute(p, q):
    left = (p - q).abs()
    return left / left.sum() if left.sum() > 0 else p


@mistake("residual", "0 / 0 where p = q", expect="no distribution")
def no_corner(p, q):
    left = (p - q).clamp(min=0)
    return left / left.sum()


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


mistake("verifier", "q on top", expect="you accept with q/p")(verifier(lambda p, q: q / p))
mistake("verifier", "draws from p after a rejection", expect="you draw from p")(verifier(after=lambda p, q: p))
mistake("verifier", "draws from q after a rejection", expect="you draw from q")(verifier(after=lambda p, q: q))
mistake("verifier", "bonus from the row of the last guess", expect="bonus token is off")(verifier(bonus=-2))


@mistake("verifier", "likeliest token after a rejection", expect="you take the likeliest token")
def likeliest_after(target, guesses, q, draw):
    best = lambda p, q: torch.zeros_like(p).index_fill_(0, p.argmax(), 1.0)  # noqa: E731
    return verifier(after=best)(target, guesses, q, draw)


@mistake("verifier", "bonus forgotten", expect="one token more for nothing")
def no_bonus(target, guesses, q, draw):
    return right.verify_guesses(target, guesses, q, draw)[: len(guesses)]


@mistake("verifier", "first guess never verified", expect="first guess is never verified")
def first_for_free(target, guesses, q, draw):
    return [guesses[0], *right.verify_guesses(target[1:], guesses[1:], q[1:], draw)]


@mistake("verifier", "one number for all guesses", expect="a number of its own")
def one_number(target, guesses, q, draw):
    number = uniform(draw)
    for i, guess in enumerate(guesses):
        if not number < target[i, guess] / q[i, guess]:
            return [*guesses[:i], choose(right.residual(target[i], q[i]), draw)]
    return [*guesses, choose(target[-1], draw)]


@mistake("verifier", "seeds the generator for each guess", expect="a number of its own")
def seeds_again(target, guesses, q, draw):
    for i, guess in enumerate(guesses):
        draw.manual_seed(0)
        if not uniform(draw) < target[i, guess] / q[i, guess]:
            return [*guesses[:i], choose(right.residual(target[i], q[i]), draw)]
    return [*guesses, choose(target[-1], draw)]


@mistake("verifier", "goes on after a rejection", expect="only the last token may be new")
def goes_on(target, guesses, q, draw):
    tokens = []
    for i, guess in enumerate(guesses):
        keeps = uniform(draw) < target[i, guess] / q[i, guess]
        tokens.append(guess if keeps else choose(right.residual(target[i], q[i]), draw))
    return [*tokens, choose(target[-1], draw)]


@mistake("verifier", "drawn guesses verified as if they were certain", expect="exact, yet too strict")
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


def loop(target, draft, prompt, count, k, draw, *, context=None, pick=choose, checked=right.verify_guesses, spare=True):
    tokens = list(prompt)
    while (left := len(prompt) + count - len(tokens)) > 0:
        guesses, rows = [], []
        for _ in range(min(k, left - 1) if spare else k):
            rows.append(draft([*tokens, *guesses] if context is None else context(tokens, guesses)))
            guesses.append(pick(rows[-1], draw))
        q = torch.stack(rows) if rows else None
        tokens += checked(target.rows(tokens, guesses), guesses, q, draw)
    return tokens[len(prompt) :] if spare else tokens[len(prompt) : len(prompt) + count]


@mistake("speculative-loop", "keeps every guess", expect="distribution is off")
def keeps_all(target, draft, prompt, count, k, draw):
    return loop(target, draft, prompt, count, k, draw, checked=lambda p, g, q, d: [*g, choose(p[-1], d)])


@mistake("speculative-loop", "guesses the likeliest, declares it as drawn", expect="distribution is off")
def likeliest_declared(target, draft, prompt, count, k, draw):
    return loop(target, draft, prompt, count, k, draw, pick=lambda row, draw: int(row.argmax()))


@mistake("speculative-loop", "drops the bonus", expect="bonus token of each pass is lost")
def drops_bonus(target, draft, prompt, count, k, draw):
    def without(p, guesses, q, draw):
        found = right.verify_guesses(p, guesses, q, draw)
        return found[: max(1, len(guesses))]

    tokens = list(prompt)
    while (left := len(prompt) + count - len(tokens)) > 0:
        guesses, q = [], []
        for _ in range(min(k, left)):
            q.append(draft([*tokens, *guesses]))
            guesses.append(choose(q[-1], draw))
        tokens += without(target.rows(tokens, guesses), guesses, torch.stack(q), draw)
    return tokens[len(prompt) :]


@mistake("speculative-loop", "a pass for each guess", expect="each guess has a pass of its own")
def pass_per_guess(target, draft, prompt, count, k, draw):
    tokens = list(prompt)
    while (left := len(prompt) + count - len(tokens)) > 0:
        guesses, q = [], []
        for _ in range(min(k, left - 1)):
            q.append(draft([*tokens, *guesses]))
            guesses.append(choose(q[-1], draw))
        rows = torch.cat([target.rows([*tokens, *guesses[:i]]) for i in range(len(guesses) + 1)])
        tokens += right.verify_guesses(rows, guesses, torch.stack(q) if q else None, draw)
    return tokens[len(prompt) :]


@mistake("speculative-loop", "guesses all from the verified tokens", expect="guess after the guesses before")
def stale(target, draft, prompt, count, k, draw):
    return loop(target, draft, prompt, count, k, draw, context=lambda tokens, guesses: tokens)


@mistake("speculative-loop", "writes beyond the end", expect="you returned .* tokens where")
def too_many(target, draft, prompt, count, k, draw):
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens += loop(target, draft, tokens, k + 1, k, draw)
    return tokens[len(prompt) :]


@alternative("speculative-loop", "guesses k to the end and cuts the answer")
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
