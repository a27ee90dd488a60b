"""Spoilers of lab 07, forward on one rank: wrong ways to merge and to tile, and right ones that look different."""

import math

import torch
import torch.nn.functional as F

from course.kit.answers import answers_of
from course.kit.exercises import KnownAnswers

right = answers_of("07_long_context")
NONE = float("-inf")

# Merging.

softmax_merge = KnownAnswers("softmax-merge")

softmax_merge.mistake(
    "the mean of both outputs",
    {"out * weight[:, None] + other * other_weight[:, None]": "(out + other) / 2"},
    says="Both halves got the same weight. A half whose scores are larger has the larger share of the sum.",
)
softmax_merge.mistake(
    "adds the outputs",
    {"out * weight[:, None] + other * other_weight[:, None]": "out + other"},
    says="Each output is already divided by its own sum, so adding them counts every query twice. Scale both down "
    "first.",
)


@softmax_merge.mistake("undoes the logarithm", expect="overflows")
def overflows(out, lse, other, other_lse):
    a, b = lse.exp()[:, None], other_lse.exp()[:, None]
    return (out * a + other * b) / (a + b), (a + b).log()[:, 0]


softmax_merge.mistake("a query without keys", {'total.masked_fill(total == float("-inf"), 0)': "total"}, expect="NaN")
softmax_merge.mistake(
    "adds the log-sum-exps",
    {"other_weight[:, None], total": "other_weight[:, None], lse + other_lse"},
    says="Sums add up, their logarithms do not. torch.logaddexp adds two numbers that are given as logarithms.",
)
softmax_merge.mistake(
    "the larger log-sum-exp as the joint one",
    {"other_weight[:, None], total": "other_weight[:, None], torch.maximum(lse, other_lse)"},
    says="The larger of the two is a good number to subtract, but it is not the joint lse: that one is larger than "
    "both.",
)


@softmax_merge.mistake(
    "weights by log-sum-exp",
    says="The weights are shares of sums of exponentials: e^(lse - joint lse), not shares of the logarithms.",
)
def by_logarithms(out, lse, other, other_lse):
    share = (lse / (lse + other_lse)).nan_to_num(0.5)[:, None]
    return out * share + other * (1 - share), torch.logaddexp(lse, other_lse)


@softmax_merge.mistake("by sigmoid and softplus", expect="sees keys of one half only: the lse holds NaN")
def by_sigmoid(out, lse, other, other_lse):
    weight = torch.sigmoid(lse - other_lse).nan_to_num()[:, None]
    return out * weight + other * (1 - weight), other_lse + F.softplus(lse - other_lse)


softmax_merge.mistake(
    "always float64", {"return out * weight": "return out.double() * weight"}, expect="keep the dtype"
)
softmax_merge.mistake(
    "changes its input",
    {"return out * weight[:, None]": "return out.mul_(weight[:, None])"},
    expect="changed its input `out`",
)


@softmax_merge.alternative("softmax of the two log-sum-exps")
def by_softmax(out, lse, other, other_lse):
    weights = torch.stack((lse, other_lse)).softmax(0).nan_to_num()[..., None]
    return (weights * torch.stack((out, other))).sum(0), torch.stack((lse, other_lse)).logsumexp(0)


@softmax_merge.alternative("a running maximum")
def by_maximum(out, lse, other, other_lse):
    top = torch.maximum(lse, other_lse)
    top = torch.where(top == NONE, 0.0, top)
    a, b = (lse - top).exp(), (other_lse - top).exp()
    total = (a + b).clamp(min=1e-300)
    return (out * a[:, None] + other * b[:, None]) / total[:, None], torch.where(a + b > 0, top + total.log(), NONE)


# Forward.

tiled_forward = KnownAnswers("tiled-forward")

tiled_forward.mistake(
    "the scale is missing",
    {" * q.shape[1] ** -0.5": ""},
    says="Scores are multiplied by head_dim ** -0.5, in every tile.",
)
tiled_forward.mistake(
    "no mask on the diagonal",
    {"if start == first:": "if False:"},
    says="In the tiles on the diagonal a query also sees later keys: mask what lies to the right of it.",
)
tiled_forward.mistake(
    "tiles of 16 for ever",
    {
        "    out, lse = torch.zeros_like(q), q.new_full": (
            "    tile = 16\n    out, lse = torch.zeros_like(q), q.new_full"
        )
    },
    expect="`tile` is an argument",
)
tiled_forward.mistake(
    "a mask made of the scores",
    {"torch.ones_like(scores).triu(1).bool()": "scores.triu(1).bool()"},
    says="A score of exactly 0 is no reason to see a later key: make the mask of ones, not of scores.",
)
tiled_forward.mistake(
    "a mask without the tile's offset",
    {"range(0, first + tile, tile)": "range(0, len(k), tile)", "if start == first:": "if True:"},
    says="The mask compares places in the tiles. Positions are what counts: add where the tiles of queries and keys "
    "begin.",
)
tiled_forward.mistake(
    "computes all tiles",
    {
        "range(0, first + tile, tile)": "range(0, len(k), tile)",
        "if start == first:": "if start >= first:",
        "triu(1)": "triu(first - start + 1)",
        "part_lse[:, None]).exp()": "part_lse[:, None].nan_to_num(0, 0, 0)).exp()",
    },
    expect="tiles that no query sees",
)


@tiled_forward.mistake("a row of scores at once", expect="more than one tile are together")
def whole_rows(q, k, v, tile):
    out, lse = torch.zeros_like(q), q.new_zeros(len(q))
    for first in range(0, len(q), tile):
        rows, seen = slice(first, first + tile), slice(0, first + tile)
        scores = q[rows] @ k[seen].T * q.shape[1] ** -0.5
        index, others = torch.arange(first, first + len(scores))[:, None], torch.arange(scores.shape[1])
        scores = scores.masked_fill(index < others, NONE)
        out[rows], lse[rows] = scores.softmax(1) @ v[seen], scores.logsumexp(1)
    return out, lse


tiled_forward.mistake(
    "keeps the scores of all tiles",
    {
        "out, lse = torch.zeros_like(q)": "kept, out, lse = [], torch.zeros_like(q)",
        "part_lse = scores.logsumexp(1)": "kept.append(scores)\n            part_lse = scores.logsumexp(1)",
    },
    expect="tiles are kept",
)
tiled_forward.mistake(
    "the last tile wins",
    {"merge(out[rows], lse[rows], part, part_lse)": "part, part_lse"},
    says="Each tile of keys replaced what the tiles before it gave. Merge them.",
)


@tiled_forward.mistake("no maximum subtracted", expect="is not finite: is exp given a score")
def sums_of_exponentials(q, k, v, tile):
    out, total = torch.zeros_like(q), q.new_zeros(len(q), 1)
    for first in range(0, len(q), tile):
        rows = slice(first, first + tile)
        for start in range(0, first + tile, tile):
            p = (q[rows] @ k[start : start + tile].T * q.shape[1] ** -0.5).exp()
            p = p.tril() if start == first else p
            out[rows] += p @ v[start : start + tile]
            total[rows] += p.sum(1, keepdim=True)
    return out / total, total.log()[:, 0]


@tiled_forward.mistake("the first tile's maximum", expect="is not finite: is exp given a score")
def first_maximum(q, k, v, tile):
    out, total, top = torch.zeros_like(q), q.new_zeros(len(q), 1), q.new_zeros(len(q), 1)
    for first in range(0, len(q), tile):
        rows = slice(first, first + tile)
        for start in range(0, first + tile, tile):
            scores = q[rows] @ k[start : start + tile].T * q.shape[1] ** -0.5
            if start == first:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), NONE)
            if start == 0:
                top[rows] = scores.amax(1, keepdim=True)
            p = (scores - top[rows]).exp()
            out[rows] += p @ v[start : start + tile]
            total[rows] += p.sum(1, keepdim=True)
    return out / total, (top + total.log())[:, 0]


tiled_forward.mistake(
    "scales q in place",
    {
        "for first in range(0, len(q), tile):": "q *= q.shape[1] ** -0.5\n    for first in range(0, len(q), tile):",
        " * q.shape[1] ** -0.5": "",
    },
    expect="changed its input `q`",
)


@tiled_forward.alternative("running maximum and sum, divided at the end")
def online(q, k, v, tile):
    out, lse = torch.zeros_like(q), q.new_zeros(len(q))
    for first in range(0, len(q), tile):
        queries = q[first : first + tile] * q.shape[1] ** -0.5
        top, total = queries.new_full((len(queries), 1), NONE), queries.new_zeros(len(queries), 1)
        values = torch.zeros_like(queries)
        for start in range(0, first + tile, tile):
            scores = queries @ k[start : start + tile].T
            if start == first:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), NONE)
            higher = torch.maximum(top, scores.amax(1, keepdim=True))
            p, shrink = (scores - higher).exp(), (top - higher).exp()
            total, values = total * shrink + p.sum(1, keepdim=True), values * shrink + p @ v[start : start + tile]
            top = higher
        out[first : first + tile], lse[first : first + tile] = values / total, (top + total.log())[:, 0]
    return out, lse


@tiled_forward.alternative("keys in the outer loop")
def tiles_of_keys_outside(q, k, v, tile):
    out, lse = torch.zeros_like(q), q.new_full((len(q),), NONE)
    for start in range(0, len(k), tile):
        keys, values = k[start : start + tile] * k.shape[1] ** -0.5, v[start : start + tile]
        for first in range(start, len(q), tile):
            scores = q[first : first + tile] @ keys.T
            if first == start:
                scores.masked_fill_(torch.ones_like(scores).tril(0) == 0, NONE)
            both = torch.logaddexp(lse[first : first + tile], scores.logsumexp(1))
            out[first : first + tile] *= (lse[first : first + tile] - both).exp()[:, None]
            out[first : first + tile] += (scores - both[:, None]).exp() @ values
            lse[first : first + tile] = both
    return out, lse


@tiled_forward.alternative("the diagonal in halves, which takes fewer FLOPs")
def halves(q, k, v, tile):
    out, lse = torch.zeros_like(q), q.new_full((len(q),), NONE)
    for first in range(0, len(q), tile):
        end = min(first + tile, len(q))
        middle = min(first + tile // 2, end)
        parts = [(first, end, start, start + tile) for start in range(0, first, tile)]
        for a, b, c, d in (
            *parts,
            (first, middle, first, middle),
            (middle, end, first, middle),
            (middle, end, middle, end),
        ):
            if a < b and c < d:
                scores = q[a:b] @ k[c:d].T * q.shape[1] ** -0.5
                if a == c:
                    scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), NONE)
                part_lse = scores.logsumexp(1)
                part = (scores - part_lse[:, None]).exp() @ v[c:d]
                out[a:b], lse[a:b] = right.merge(out[a:b], lse[a:b], part, part_lse)
    return out, lse


@tiled_forward.alternative("powers of two, the last tile first")
def powers_of_two(q, k, v, tile):
    out, lse = torch.empty_like(q), q.new_empty(len(q))
    to_two = 1 / math.log(2)
    for first in range(0, len(q), tile):
        queries = q[first : first + tile] * (to_two / math.sqrt(q.shape[1]))
        top, total, weighted = torch.full_like(queries[:, :1], NONE), 0.0, 0.0
        for start in range(first, -1, -tile):
            scores = queries @ k[start : start + tile].T
            if start == first:
                scores = scores.tril().masked_fill(torch.ones_like(scores).triu(1) == 1, NONE)
            higher = torch.maximum(top, scores.max(1, keepdim=True).values)
            shrink, p = torch.exp2(top - higher), torch.exp2(scores - higher)
            total, weighted, top = total * shrink + p.sum(1, keepdim=True), weighted * shrink, higher
            weighted = weighted + p @ v[start : start + tile]
        out[first : first + tile] = weighted / total
        lse[first : first + tile] = ((top + torch.log2(total)) / to_two)[:, 0]
    return out, lse
