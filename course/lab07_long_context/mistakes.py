"""Spoilers of lab 07, on one rank: wrong ways to merge and to tile, and right ones that look different."""

import torch

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake

right = answers_of("07_long_context")
NONE = float("-inf")

# Merging.


@mistake(
    "softmax-merge",
    "the mean of both outputs",
    says="Both halves got the same weight. A half whose scores are larger has the larger share of the sum.",
)
def mean(out, lse, other, other_lse):
    return (out + other) / 2, torch.logaddexp(lse, other_lse)


@mistake(
    "softmax-merge",
    "adds the outputs",
    says="Each output is already divided by its own sum, so adding them counts every query twice. Scale both down "
    "first.",
)
def adds(out, lse, other, other_lse):
    return out + other, torch.logaddexp(lse, other_lse)


@mistake("softmax-merge", "undoes the logarithm", expect="overflows")
def overflows(out, lse, other, other_lse):
    a, b = lse.exp()[:, None], other_lse.exp()[:, None]
    return (out * a + other * b) / (a + b), (a + b).log()[:, 0]


@mistake("softmax-merge", "a query without keys", expect="NaN")
def nobody_seen(out, lse, other, other_lse):
    total = torch.logaddexp(lse, other_lse)
    return out * (lse - total).exp()[:, None] + other * (other_lse - total).exp()[:, None], total


@mistake(
    "softmax-merge",
    "adds the log-sum-exps",
    says="Sums add up, their logarithms do not. torch.logaddexp adds two numbers that are given as logarithms.",
)
def adds_lse(out, lse, other, other_lse):
    return right.merge(out, lse, other, other_lse)[0], lse + other_lse


@mistake(
    "softmax-merge",
    "the larger log-sum-exp as the joint one",
    says="The larger of the two is a good number to subtract, but it is not the joint lse: that one is larger than "
    "both.",
)
def larger(out, lse, other, other_lse):
    return right.merge(out, lse, other, other_lse)[0], torch.maximum(lse, other_lse)


@mistake(
    "softmax-merge",
    "weights by log-sum-exp",
    says="The weights are shares of sums of exponentials: e^(lse - joint lse), not shares of the logarithms.",
)
def by_logarithms(out, lse, other, other_lse):
    share = (lse / (lse + other_lse)).nan_to_num(0.5)[:, None]
    return out * share + other * (1 - share), torch.logaddexp(lse, other_lse)


@alternative("softmax-merge", "softmax of the two log-sum-exps")
def by_softmax(out, lse, other, other_lse):
    weights = torch.stack((lse, other_lse)).softmax(0).nan_to_num()[..., None]
    return (weights * torch.stack((out, other))).sum(0), torch.stack((lse, other_lse)).logsumexp(0)


@alternative("softmax-merge", "a running maximum")
def by_maximum(out, lse, other, other_lse):
    top = torch.maximum(lse, other_lse)
    top = torch.where(top == NONE, 0.0, top)
    a, b = (lse - top).exp(), (other_lse - top).exp()
    total = (a + b).clamp(min=1e-300)
    return (out * a[:, None] + other * b[:, None]) / total[:, None], torch.where(a + b > 0, top + total.log(), NONE)


# Forward.


def _forward(q, k, v, tile, *, scale=True, causal=True, until="diagonal", join=None, local=False):
    """The reference with one thing to leave out."""
    join = join or right.merge
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:1], NONE)
    for first in range(0, len(q), tile):
        rows = slice(first, first + tile)
        for start in range(0, len(k) if until == "end" else first + tile, tile):
            keys = slice(start, start + tile)
            scores = q[rows] @ k[keys].T * (q.shape[1] ** -0.5 if scale else 1)
            if causal and (until == "end" or start == first):
                index = torch.arange(first, first + scores.shape[0])[:, None]
                others = torch.arange(start, start + scores.shape[1])
                if local:
                    index, others = index - first, others - start
                scores = scores.masked_fill(index < others, NONE)
            part_lse = scores.logsumexp(1)
            part = (scores - part_lse[:, None].nan_to_num(0, 0, 0)).exp() @ v[keys]
            out[rows], lse[rows] = join(out[rows], lse[rows], part, part_lse)
    return out, lse


@mistake(
    "tiled-forward",
    "the scale is missing",
    says="Scores are multiplied by head_dim ** -0.5, in every tile.",
)
def unscaled(q, k, v, tile):
    return _forward(q, k, v, tile, scale=False)


@mistake(
    "tiled-forward",
    "no mask on the diagonal",
    says="In the tiles on the diagonal a query also sees later keys: mask what lies to the right of it.",
)
def unmasked(q, k, v, tile):
    return _forward(q, k, v, tile, causal=False)


@mistake(
    "tiled-forward",
    "a mask without the tile's offset",
    says="The mask compares places in the tiles. Positions are what counts: add where the tiles of queries and keys "
    "begin.",
)
def without_offset(q, k, v, tile):
    return _forward(q, k, v, tile, until="end", local=True)


@mistake("tiled-forward", "computes all tiles", expect="tiles that no query sees")
def all_tiles(q, k, v, tile):
    return _forward(q, k, v, tile, until="end")


@mistake("tiled-forward", "a row of scores at once", expect="more than one tile are together")
def whole_rows(q, k, v, tile):
    out, lse = torch.zeros_like(q), q.new_zeros(len(q))
    for first in range(0, len(q), tile):
        rows, seen = slice(first, first + tile), slice(0, first + tile)
        scores = q[rows] @ k[seen].T * q.shape[1] ** -0.5
        index, others = torch.arange(first, first + len(scores))[:, None], torch.arange(scores.shape[1])
        scores = scores.masked_fill(index < others, NONE)
        out[rows], lse[rows] = scores.softmax(1) @ v[seen], scores.logsumexp(1)
    return out, lse


def all_scores(q, k, v, tile):
    scores = (q @ k.T * q.shape[1] ** -0.5).masked_fill(torch.ones(len(q), len(k)).triu(1).bool(), NONE)
    return scores.softmax(1) @ v, scores.logsumexp(1)


@mistake("tiled-forward", "keeps the scores of all tiles", expect="tiles are kept")
def keeps_tiles(q, k, v, tile):
    kept = []

    def join(out, lse, part, part_lse):
        kept.append(torch.ones(tile, tile, dtype=q.dtype))
        return right.merge(out, lse, part, part_lse)

    return _forward(q, k, v, tile, join=join)


@mistake(
    "tiled-forward",
    "the last tile wins",
    says="Each tile of keys replaced what the tiles before it gave. Merge them.",
)
def last_tile(q, k, v, tile):
    return _forward(q, k, v, tile, join=lambda out, lse, part, part_lse: (part, part_lse))


@alternative("tiled-forward", "running maximum and sum, divided at the end")
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


# Backward.


def _backward(q, k, v, out, lse, d_out, tile, *, delta=None, p_of=None, scale=True, masked=True, v_of=None, until=None):
    """The reference with its parts exchangeable."""
    factor = q.shape[1] ** -0.5
    delta = (d_out * out).sum(1) if delta is None else delta
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for first in range(0, len(q), tile):
        rows = slice(first, first + tile)
        for start in range(0, until or first + tile, tile):
            keys = slice(start, start + tile)
            scores = q[rows] @ k[keys].T * factor
            p = p_of(scores) if p_of else (scores - lse[rows, None]).exp()
            if masked and start >= first:
                p = p.tril() if start == first else torch.zeros_like(p)
            if v_of == "last":
                dv[keys] = p.T @ d_out[rows]
            else:
                dv[keys] += p.T @ d_out[rows]
            ds = p * (d_out[rows] @ v[keys].T - delta[rows, None]) * (factor if scale else 1)
            dq[rows] += ds @ k[keys]
            dk[keys] += ds.T @ q[rows]
    return dq, dk, dv


@mistake(
    "tiled-backward",
    "without delta",
    says="dv is right, dq and dk are not: softmax's gradient subtracts delta, since raising one score lowers all other "
    "probabilities of the query.",
)
def no_delta(q, k, v, out, lse, d_out, tile):
    return _backward(q, k, v, out, lse, d_out, tile, delta=torch.zeros_like(lse))


@mistake(
    "tiled-backward",
    "softmax of each tile alone",
    says="P was normalised over one tile. The sum goes over all keys, and it is in lse: P = exp(S - lse).",
)
def softmax_of_tile(q, k, v, out, lse, d_out, tile):
    return _backward(q, k, v, out, lse, d_out, tile, p_of=lambda scores: scores.softmax(1))


@mistake(
    "tiled-backward",
    "the scale is missing",
    says="dv is right, and dq and dk are too large by √head_dim: scores were scaled in forward, so their gradients "
    "are, too.",
)
def no_scale(q, k, v, out, lse, d_out, tile):
    return _backward(q, k, v, out, lse, d_out, tile, scale=False)


@mistake(
    "tiled-backward",
    "no mask on the diagonal",
    says="In the tiles on the diagonal P is not zero to the right of it: keys get gradients from queries that never "
    "saw them.",
)
def no_mask(q, k, v, out, lse, d_out, tile):
    return _backward(q, k, v, out, lse, d_out, tile, masked=False)


@mistake(
    "tiled-backward",
    "the last tile of queries wins",
    says="dv[keys] was set anew by each tile of queries. Every one of them has a share in it: add the shares up.",
)
def last_wins(q, k, v, out, lse, d_out, tile):
    return _backward(q, k, v, out, lse, d_out, tile, v_of="last")


@mistake(
    "tiled-backward",
    "delta of the values' own gradient",
    says="delta is dO · O per query, over head_dim. Yours is another sum: of d_out alone.",
)
def wrong_delta(q, k, v, out, lse, d_out, tile):
    return _backward(q, k, v, out, lse, d_out, tile, delta=d_out.sum(1))


@mistake("tiled-backward", "computes all tiles", expect="tiles that no query sees")
def all_tiles_backward(q, k, v, out, lse, d_out, tile):
    return _backward(q, k, v, out, lse, d_out, tile, until=len(q))


@mistake("tiled-backward", "autograd through all scores", expect="more than one tile are together")
def by_autograd(q, k, v, out, lse, d_out, tile):
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        return torch.autograd.grad(all_scores(*inputs, tile)[0], inputs, d_out)


@alternative("tiled-backward", "tiles of keys outside")
def keys_outside(q, k, v, out, lse, d_out, tile):
    """As FlashAttention-2 goes: dk and dv of a tile stay, dq is added to."""
    scale, delta = q.shape[1] ** -0.5, (d_out * out).sum(1, keepdim=True)
    dq, dks, dvs = torch.zeros_like(q), [], []
    for start in range(0, len(k), tile):
        keys, values = k[start : start + tile], v[start : start + tile]
        dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
        for first in range(start, len(q), tile):
            rows = slice(first, first + tile)
            p = (q[rows] @ keys.T * scale - lse[rows, None]).exp()
            p = p.tril() if first == start else p
            dv += p.T @ d_out[rows]
            ds = p * (d_out[rows] @ values.T - delta[rows]) * scale
            dq[rows] += ds @ keys
            dk += ds.T @ q[rows]
        dks.append(dk)
        dvs.append(dv)
    return dq, torch.cat(dks), torch.cat(dvs)
