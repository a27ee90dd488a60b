"""Spoilers of lab 15: residuals, verifiers and loops that lose the target's distribution or a token of each pass."""

import torch

from course.kit.answers import answers_of
from course.kit.exercises import KnownAnswers
from minillm.serve.speculate.verify import choose, uniform

right = answers_of("15_speculative_decoding")

# The residual.

residual = KnownAnswers("residual")

residual.mistake(
    "samples from p again",
    {"left / total if total > 0 else p": "p"},
    says="This is p: tokens that the draft likes were already accepted and now come twice.",
)
residual.mistake(
    "samples from q",
    {"left / total if total > 0 else p": "q"},
    says="This is q: the draft's favourites get what was just taken from them.",
)
residual.mistake(
    "not normalised",
    {"left / total if total > 0 else p": "left"},
    says="It sums to the share of rejections: divide by its sum.",
)
residual.mistake(
    "the wrong way round",
    {"p - q": "q - p"},
    says="This is max(q - p, 0): what the draft says too often, not what it says too rarely.",
)
residual.mistake(
    "all of p where it is larger",
    {"(p - q).clamp(min=0)": "p.masked_fill(p <= q, 0.0)"},
    says="Where p is larger, all of p stays. The accepted draft tokens have brought q of it already: p - q is missing.",
)
residual.mistake(
    "absolute difference",
    {".clamp(min=0)": ".abs()"},
    says="This is |p - q|: where the draft says a token too often, nothing is missing.",
)
residual.mistake("0 / 0 where p = q", {" if total > 0 else p": ""}, expect="no distribution")
residual.mistake(
    "a small number against 0 / 0",
    {"total if total > 0 else p": "(total + 1e-8)"},
    says="A small number in the denominator makes every residual sum to less than 1, and where p = q to 0. Test for a "
    "sum of 0 instead.",
)
residual.mistake(
    "softmax of the difference",
    {"left / total if total > 0 else p": "left.softmax(-1)"},
    says="A softmax gives every token some probability. Divide by the sum.",
)
residual.mistake(
    "divides by the overlap",
    {"left / total if total > 0 else p": "left / torch.minimum(p, q).sum()"},
    says="Divide by what is left, 1 - Σ min(p, q), not by Σ min(p, q).",
)
residual.mistake("uniform where p = q", {"else p": "else torch.full_like(p, 1 / len(p))"}, expect="Return p itself")
residual.mistake(
    "the token that lacks most",
    {"left / total if total > 0 else p": "torch.zeros_like(p).index_fill(0, left.argmax(), 1.0)"},
    says="The token that lacks most is not the only one: sample from all that is missing.",
)


residual.mistake(
    "p times 1 - q/p, 0 / 0 where both are 0",
    {"(p - q).clamp(min=0)": "p * (1 - q / p).clamp(min=0)"},
    says="Where p and q are both 0, as after top-k, q / p is NaN, and NaN > 0 is False: you return p.",
)


@residual.alternative("p minus the overlap")
def without_overlap(p, q):
    left = p - torch.minimum(p, q)
    return torch.where(left.sum() > 0, left / left.sum().clamp(min=1e-300), p)


# The verifier.

verifier = KnownAnswers("verifier")

verifier.mistake(
    "q on top",
    {"target[i, token] / q[i, token]": "q[i, token] / target[i, token]"},
    says="You accept with q/p: the target's probability belongs on top.",
)
verifier.mistake(
    "samples from p after a rejection",
    {"residual(target[i], q[i])": "target[i]"},
    says="After a rejection you sample from p: sample from the residual.",
)
verifier.mistake(
    "samples from q after a rejection",
    {"residual(target[i], q[i])": "q[i]"},
    says="After a rejection you sample from q: sample from the residual.",
)
verifier.mistake(
    "accepts with p",
    {" / q[i, token]": ""},
    says="You accept with p alone: divide by q, from which the token was sampled.",
)
verifier.mistake(
    "accepts if p is at least q",
    {"target[i, token] / q[i, token]": "(target[i, token] >= q[i, token]).float()"},
    says="You accept exactly if p >= q. Below that accept with probability p/q.",
)
verifier.mistake(
    "bonus from the row of the last draft token", {"target[len(drafted)]": "target[-2]"}, expect="bonus token is off"
)
verifier.mistake(
    "likeliest token after a rejection",
    {"choose(residual(target[i], q[i]), draw)": "int(target[i].argmax())"},
    says="After a rejection you take the likeliest token: sample from the residual.",
)
verifier.mistake(
    "the target's rows off by one",
    {"target[i, token]": "target[i + 1, token]", "residual(target[i]": "residual(target[i + 1]"},
    says="The rows are off by one: target[i] judges draft token i, target[i + 1] the next one.",
)
verifier.mistake(
    "accepted tokens only",
    {"[*drafted[:i], choose(residual(target[i], q[i]), draw)]": "drafted[:i]"},
    expect="at least one token",
)
verifier.mistake(
    "bonus forgotten",
    {"[*drafted, choose(target[len(drafted)], draw)]": "drafted"},
    expect="one token more for nothing",
)
verifier.mistake(
    "first draft token never verified",
    {"enumerate(drafted)": "list(enumerate(drafted))[1:]"},
    says="Its distribution is the draft's: either the first draft token is never verified, or the residual is taken "
    "the wrong way round.",
)
verifier.mistake(
    "one number for all draft tokens",
    {"    for i": "    number = uniform(draw)\n    for i", "not uniform(draw)": "not number"},
    expect="a number of its own",
)
verifier.mistake(
    "goes on after a rejection",
    {
        "    for i": "    tokens = list(drafted)\n    for i",
        "return [*drafted[:i], ": "tokens[i] = ",
        "q[i]), draw)]": "q[i]), draw)",
        "[*drafted, choose": "[*tokens, choose",
    },
    expect="only the last token may be new",
)
verifier.mistake(
    "sampled draft tokens verified as if they were certain",
    {" / q[i, token]": "", "residual(target[i], q[i])": "residual(target[i], torch.eye(len(q[i]))[token])"},
    expect="exact, yet too strict",
)
verifier.mistake(
    "a residual that is p where p and q are both 0",
    {
        "    for i": "    left = (target[:-1] * (1 - q / target[:-1]).clamp(min=0)).sum(-1)\n    for i",
        "residual(target[i], q[i])": "residual(target[i], q[i]) if left[i] > 0 else target[i]",
    },
    expect="after top-k: the first token's distribution is off",
)
verifier.mistake("makes a float of the number", {"uniform(draw) <": "float(uniform(draw)) <"}, expect="only compare it")
verifier.mistake(
    "a residual in float32",
    {"residual(target[i], q[i])": "residual(target[i], q[i]).float()"},
    expect="float32's digits only",
)
verifier.mistake("numbers of its own", {"uniform(draw)": "torch.rand((), generator=draw)"}, expect="draw with uniform")


@verifier.alternative("all numbers first, then the length")
def numbers_first(target, drafted, q, draw):
    numbers = [uniform(draw) for _ in drafted]
    ratios = [float(target[i, token] / q[i, token]) for i, token in enumerate(drafted)]
    length = 0
    while length < len(drafted) and numbers[length] < ratios[length]:
        length += 1
    last = target[length] if length == len(drafted) else right.residual(target[length], q[length])
    return [*drafted[:length], choose(last, draw)]


verifier.alternative(
    "multiplies by q instead of dividing",
    {"not uniform(draw) < target[i, token] / q[i, token]": "uniform(draw) * q[i, token] >= target[i, token]"},
)


@verifier.alternative("rejects where the number is at least the ratio")
def by_rejection(target, drafted, q, draw):
    kept = []
    for p_row, q_row, token in zip(target, q, drafted, strict=False):
        if uniform(draw) >= min(1.0, float(p_row[token]) / float(q_row[token])):
            left = torch.relu(p_row - q_row)
            return [*kept, choose(left / left.sum(), draw)]
        kept.append(token)
    return [*kept, choose(target[len(kept)], draw)]


# The loop.

speculative_loop = KnownAnswers("speculative-loop")

speculative_loop.mistake(
    "keeps every draft token",
    {"verify_draft(target": "[*drafted, choose(target", ", drafted, q, draw)": "[-1], draw)]"},
    expect="distribution is off",
)
speculative_loop.mistake(
    "draft tokens the likeliest, declares it as sampled",
    {"choose(rows[-1], draw)": "int(rows[-1].argmax())"},
    expect="distribution is off",
)
speculative_loop.mistake(
    "drops the bonus",
    {"min(k, left - 1)": "min(k, left)", "drafted, q, draw)": "drafted, q, draw)[: max(1, len(drafted))]"},
    expect="the bonus token is lost",
)
speculative_loop.mistake(
    "a pass for each draft token",
    {"target.rows(tokens, drafted)": "torch.cat([target.rows(tokens + drafted[:i]) for i in range(len(rows) + 1)])"},
    expect="checks 0 draft tokens where K and the end allow",
)
speculative_loop.mistake(
    "draft tokens all from the verified tokens",
    {"draft([*tokens, *drafted])": "draft(tokens)"},
    expect="asked about other tokens",
)
speculative_loop.mistake(
    "one draft token a pass, whatever k",
    {"min(k, left - 1)": "min(1, left - 1)"},
    expect="checks 1 draft token where K and the end allow",
)
speculative_loop.mistake(
    "three draft tokens a pass, whatever k",
    {"min(k, left - 1)": "min(3, left - 1)"},
    expect="a pass checks 3 draft tokens, and K is|where K and the end allow",
)
speculative_loop.mistake(
    "one draft token too few at the end",
    {"min(k, left - 1)": "max(0, min(k, left - 2))"},
    expect="where K and the end allow",
)
speculative_loop.mistake(
    "a pass of the target before the first draft token",
    {"tokens = list(prompt)\n": "tokens = [*prompt, choose(target.rows(prompt)[0], draw)]\n"},
    expect="pass 1 checks 0 draft tokens",
)
speculative_loop.mistake(
    "a second pass for the last token",
    {"draw)\n    return": "draw)[:-1]\n        tokens.append(choose(target(tokens), draw))\n    return"},
    expect="distribution is off|a pass of its own",
)
speculative_loop.mistake(
    "the draft never sees the answer",
    {"draft([*tokens, *drafted])": "draft([*prompt, *drafted])"},
    expect="asked about other tokens|distribution is off",
)
speculative_loop.mistake("writes beyond the end", {"min(k, left - 1)": "k"}, expect="you returned .* tokens where")
speculative_loop.alternative(
    "draft tokens k to the end and cuts the answer",
    {"min(k, left - 1)": "k", "tokens[len(prompt) :]": "tokens[len(prompt) : len(prompt) + count]"},
)


@speculative_loop.alternative("a round as a function, called until there is enough")
def rounds(target, draft, prompt, count, k, draw):
    answer = []
    while len(answer) < count:
        known, drafted, q = [*prompt, *answer], [], []
        while len(drafted) < min(k, count - len(answer) - 1):
            row = draft(known + drafted)
            q, drafted = [*q, row], [*drafted, choose(row, draw)]
        p = target.rows(known, drafted)
        answer += numbers_first(p, drafted, q and torch.stack(q), draw)
    return answer
