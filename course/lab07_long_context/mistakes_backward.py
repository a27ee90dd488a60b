"""Spoilers of lab 07, backward in tiles: gradients that people get wrong, and right ones that look different."""

import torch

from course.kit.exercises import KnownAnswers

tiled_backward = KnownAnswers("tiled-backward")

tiled_backward.mistake(
    "without delta",
    {"(d_out * out).sum(1)": "torch.zeros_like(lse)"},
    says="dv is right, dq and dk are not: softmax's gradient subtracts delta, since raising one score lowers all other "
    "probabilities of the query.",
)
tiled_backward.mistake(
    "softmax of each tile alone",
    {" - lse[rows, None]).exp()": ").softmax(1)"},
    says="P was normalised over one tile. The sum goes over all keys, and it is in lse: P = exp(S - lse).",
)
tiled_backward.mistake(
    "the scale is missing",
    {"delta[rows, None]) * scale": "delta[rows, None])"},
    says="dv is right, and dq and dk are too large by √head_dim: scores were scaled in forward, so their gradients "
    "are, too.",
)
tiled_backward.mistake(
    "no mask on the diagonal",
    {"if start == first:": "if False:"},
    says="In the tiles on the diagonal P is not zero to the right of it: keys get gradients from queries that never "
    "saw them.",
)
tiled_backward.mistake(
    "the last tile of queries wins",
    {"dv[keys] +=": "dv[keys] ="},
    says="dv[keys] was set anew by each tile of queries. Every one of them has a share in it: add the shares up.",
)
tiled_backward.mistake(
    "delta of the values' own gradient",
    {"(d_out * out).sum(1)": "d_out.sum(1)"},
    says="delta is dO · O per query, over head_dim. Yours is another sum: of d_out alone.",
)
tiled_backward.mistake(
    "computes all tiles",
    {
        "range(0, first + tile, tile)": "range(0, len(q), tile)",
        "if start == first:\n                p = p.tril()": "p = p.tril(first - start)",
    },
    expect="tiles that no query sees",
)


def all_scores(q, k, v, tile):
    scores = (q @ k.T * q.shape[1] ** -0.5).masked_fill(torch.ones(len(q), len(k)).triu(1).bool(), float("-inf"))
    return scores.softmax(1) @ v, scores.logsumexp(1)


@tiled_backward.mistake("autograd through all scores", expect="more than one tile are together")
def by_autograd(q, k, v, out, lse, d_out, tile):
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        return torch.autograd.grad(all_scores(*inputs, tile)[0], inputs, d_out)


tiled_backward.alternative(
    "addmm_, which torch's counter does not see",
    {
        "dv[keys] += p.T @ d_out[rows]": "dv[keys].addmm_(p.T, d_out[rows])",
        "dq[rows] += ds @ k[keys]": "dq[rows].addmm_(ds, k[keys])",
        "dk[keys] += ds.T @ q[rows]": "dk[keys].addmm_(ds.T, q[rows])",
    },
)
tiled_backward.alternative("delta by einsum", {"(d_out * out).sum(1)": 'torch.einsum("id,id->i", d_out, out)'})


@tiled_backward.alternative("tiles of keys outside")
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
