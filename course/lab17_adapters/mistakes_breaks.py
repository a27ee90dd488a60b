"""Spoilers of lab 17, the judge: rounding taken for a bug, hits that belong to another adapter."""

import torch

from course.kit.exercises import KnownAnswers

which_bug = KnownAnswers("which-bug")

which_bug.mistake(
    "equal outputs only",
    {"(one - other).norm() > 20 * torch.finfo(seen.dtype).eps * other.norm()": "not torch.equal(one, other)"},
    expect="you say 'alpha / r forgotten after merge'",
)
which_bug.mistake(
    "any hit of an adapter is wrong",
    {"if hit and (adapter, tokens[:hit]) not in known:": "if hit and adapter is not None:"},
    expect="you say 'adapter missing in the hash'",
)
which_bug.mistake(
    "hits of anybody are right",
    {"(adapter, tokens[:hit]) not in known": "tokens[:hit] not in {beginning for _, beginning in known}"},
    expect="it is 'adapter missing in the hash'",
)
which_bug.mistake(
    "hits of the base are right",
    {"if hit and (adapter": "if hit and adapter and (adapter"},
    expect="it is 'adapter missing in the hash'",
)
which_bug.mistake(
    "later requests as well",
    {"known = set()": "known = {(a, t[:end]) for a, t, hit in seen.requests for end in range(hit + 1, len(t) + 1)}"},
    expect="it is 'adapter missing in the hash'",
)
which_bug.mistake(
    "all but the last token of a hit",
    {"tokens[:hit]) not in": "tokens[:hit - 1]) not in"},
    expect="it is 'adapter missing in the hash'",
)
which_bug.mistake(
    "norms are not looked at",
    {"if any(abs(ranks / alone - 1) > 0.01 for alone, ranks in seen.norms.values()):": "if False:"},
    expect="it is 'gradients reduced twice'",
)
which_bug.mistake(
    "merged against the base",
    {"if far(seen.merged, seen.adapted):": "if far(seen.merged, seen.base):"},
    expect="you say 'alpha / r forgotten after merge'",
)
which_bug.mistake(
    "first against trained",
    {"if far(seen.first, seen.base):": "if far(seen.first, seen.adapted):"},
    expect="you say 'B not zero at the start'",
)


@which_bug.alternative("largest differences, and all earlier requests")
def by_largest(seen):
    eps = float(torch.finfo(seen.dtype).eps)

    def differs(one, other):
        return float((one.double() - other.double()).abs().max()) > 40 * eps * float(other.double().abs().max())

    for index, (adapter, tokens, hit) in enumerate(seen.requests):
        earlier = [t[:hit] for a, t, _ in seen.requests[:index] if a == adapter]
        if hit and tokens[:hit] not in earlier:
            return "adapter missing in the hash"
    alone, ranks = seen.norms["A"]
    if ranks > 1.2 * alone:
        return "gradients reduced twice"
    if differs(seen.merged, seen.adapted):
        return "alpha / r forgotten after merge"
    return "B not zero at the start" if differs(seen.first, seen.base) else "right"
