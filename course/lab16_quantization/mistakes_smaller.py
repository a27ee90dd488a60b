"""Spoilers of lab 16: scales shared by tokens, the wrong two of four and wrong ranks."""

import torch

from course.kit.exercises import KnownAnswers

# Keys and values.

int8_kv = KnownAnswers("int8-kv")

int8_kv.mistake(
    "one scale for all",
    {"keys.abs().amax(-1) / 255": "keys.abs().max().expand(keys.shape[:2]) / 255"},
    says="One scale serves all tokens: the next token would change the codes of those before it.",
)
int8_kv.mistake(
    "one scale for each head",
    {"keys.abs().amax(-1) / 255": "keys.abs().amax((0, 2)).expand(keys.shape[:2]) / 255"},
    says="A head's scale is shared by all tokens: it would have to be known before the last token comes.",
)
int8_kv.mistake(
    "one scale for each token",
    {"keys.abs().amax(-1) / 255": "keys.abs().amax((1, 2))[:, None].expand(keys.shape[:2]) / 255"},
    says="All heads of a token share a scale: the loudest head coarsens the others.",
)
int8_kv.mistake(
    "half the range",
    {"2 * keys.abs()": "keys.abs()"},
    says="255 steps span from -m to m, which is 2m: with m / 255 the large keys are cut off.",
)
int8_kv.mistake("max / 127", {"2 * keys.abs().amax(-1) / 255": "keys.abs().amax(-1) / 127"},
        says="m / 127 never uses code -128: 255 steps span from -m to m.")  # fmt: skip
int8_kv.mistake(
    "largest, not largest in size",
    {"keys.abs().amax(-1)": "keys.amax(-1)"},
    says="The largest key is not the largest in size: negative ones count, too.",
)
int8_kv.mistake(
    "cut instead of rounded",
    {"torch.round(keys / scale[..., None])": "torch.trunc(keys / scale[..., None])"},
    says="Codes were cut towards zero instead of rounded.",
)
int8_kv.mistake(
    "wraps around",
    {".clamp(-128, 127)": "", "return codes.to(torch.int8), scale": "return (codes.int() % 128).to(torch.int8), scale"},
    says="Codes outside the range came back at its other end: cut them to -128 .. 127 before the cast.",
)
int8_kv.mistake("0 / 0 in a row of zeros", {"scale = torch.where(scale == 0, 1, scale)": ""}, expect="0, and it is 1")
int8_kv.mistake(
    "rows of small keys count as zeros",
    {"scale == 0, 1, scale": "scale < 1e-5, 1, scale"},
    says="A row of small keys was taken for zeros, and is lost.",
)
int8_kv.mistake("codes as floats", {"codes.to(torch.int8)": "codes"}, expect="int8 \\[tokens")
int8_kv.mistake("scale with its dimension kept", {".to(torch.int8), scale": ".to(torch.int8), scale[..., None]"},
        expect="float32 \\[tokens, heads\\]")  # fmt: skip


@int8_kv.alternative("token by token")
def token_by_token(keys):
    rows = keys.reshape(-1, keys.shape[-1])
    scales = torch.tensor([float(row.abs().max()) * 2 / 255 or 1.0 for row in rows])
    codes = torch.stack(
        [(row / scale).round().clamp(-128, 127).char() for row, scale in zip(rows, scales, strict=True)]
    )
    return codes.view(keys.shape), scales.view(keys.shape[:2])


@int8_kv.alternative("largest of both signs")
def of_both_signs(keys):
    size = torch.maximum(keys.amax(2), -keys.amin(2))
    scale = torch.where(size > 0, size / 127.5, torch.ones_like(size))
    return (keys / scale.unsqueeze(2)).round().clamp(-128, 127).to(torch.int8), scale


# ±m is ±127.5 steps: rounding in another order takes -m to -127 or to -128. All of these are right.


def _orders(name, steps, scale_of=lambda size: 2 * size / 255, rounded=torch.round):
    def quantize(keys):
        size = keys.abs().amax(-1)
        scale = torch.where(size > 0, scale_of(size), 1)
        codes = rounded(steps(keys, torch.where(size > 0, size, 127.5)[..., None], scale[..., None]))
        return codes.clamp(-128, 127).to(torch.int8), scale

    int8_kv.alternative(name)(quantize)


_orders("times 127.5 / m", lambda keys, size, scale: keys * (127.5 / size))
_orders("times 1 / scale", lambda keys, size, scale: keys * (1 / scale))
_orders("in float64", lambda keys, size, scale: keys.double() / scale.double())
_orders("scale of m * (2 / 255)", lambda keys, size, scale: keys / scale, lambda size: size * (2 / 255))
_orders("rounded by floor", lambda keys, size, scale: keys / scale, rounded=lambda steps: (steps + 0.5).floor())


# Two of four.

two_of_four = KnownAnswers("two-of-four")

two_of_four.mistake(
    "in order of size",
    {".indices.sort(dim=-1).values": ".indices"},
    says="The two are in order of size; the exercise wants them in the order of their places.",
)
two_of_four.mistake(
    "the largest with their signs",
    {"fours.abs().topk": "fours.topk"},
    says="A large negative weight matters as much as a large positive one: compare sizes.",
)
two_of_four.mistake(
    "the two smallest",
    {"topk(2, dim=-1)": "topk(2, dim=-1, largest=False)"},
    says="These are the two smallest: they are the ones that go.",
)
two_of_four.mistake(
    "always the first two",
    {"fours.abs().topk(2, dim=-1).indices": "torch.arange(2).expand(*fours.shape[:2], 2)"},
    says="The places do not depend on the weights.",
)
two_of_four.mistake(
    "fours along the outputs of a flat matrix",
    {"weight.unflatten(1, (-1, 4))": "weight.flatten().view(4, len(weight), -1).permute(1, 2, 0)"},
    says="A four is four inputs in a row; here its weights are apart from each other.",
)
two_of_four.mistake(
    "sizes instead of weights",
    {"fours.gather(-1, places)": "fours.abs().gather(-1, places)"},
    says="The values lost their signs.",
)
two_of_four.mistake("all four kept", {"topk(2, dim=-1)": "topk(4, dim=-1)"}, expect="in / 2")
two_of_four.mistake("places in the whole row", 
        {"places.flatten(1)": "(places + 4 * torch.arange(fours.shape[1])[:, None]).flatten(1)"},
        expect="more than two bits")  # fmt: skip
two_of_four.mistake("places as long integers", {".to(torch.uint8)": ""}, expect="places, uint8")


@two_of_four.mistake("all that reach the second largest", expect="2 x 8, some")
def threshold(weight):
    fours = weight.unflatten(1, (-1, 4))
    kept = fours.abs() >= fours.abs().topk(2).values[..., 1:]
    return weight[kept.flatten(1)].view(len(weight), -1), kept.nonzero()[:, 2].view(len(weight), -1).to(torch.uint8)


@two_of_four.mistake("what pruning leaves above 0", expect="2 x 8, some")
def of_the_pruned(weight):
    fours = weight.unflatten(1, (-1, 4))
    pruned = fours.scatter(2, fours.abs().topk(2, largest=False).indices, 0)
    places = pruned.nonzero()[:, 2].view(len(weight), -1)
    return pruned[pruned != 0].view(len(weight), -1), places.to(torch.uint8)


@two_of_four.alternative("by a mask")
def by_mask(weight):
    fours = weight.unflatten(1, (-1, 4))
    order = fours.abs().argsort(-1)
    mask = torch.ones_like(fours, dtype=torch.bool).scatter_(-1, order[..., :2], False)
    places = torch.arange(4).expand_as(fours)[mask].view(len(weight), -1)
    return weight[mask.flatten(1)].view(len(weight), -1), places.to(torch.uint8)


@two_of_four.alternative("four by four")
def four_by_four(weight):
    values, places = [], []
    for four in weight.reshape(-1, 4).tolist():
        kept = sorted(sorted(range(4), key=lambda i: abs(four[i]))[2:])
        places += kept
        values += [four[i] for i in kept]
    shape = len(weight), -1
    return torch.tensor(values, dtype=weight.dtype).view(shape), torch.tensor(places, dtype=torch.uint8).view(shape)


# Low rank.

low_rank = KnownAnswers("low-rank")

low_rank.mistake(
    "sum of singular values",
    {"values.square().flip(0)": "values.flip(0)", "error**2 *": "error *"},
    says="The singular values themselves were added up; the error is the root of the sum of their squares.",
)
low_rank.mistake(
    "error not squared",
    {"error**2 * left_out[0]": "error * left_out[0]"},
    says="Squares were compared with error · ‖W‖² instead of error² · ‖W‖².",
)
low_rank.mistake(
    "one rank too many", {"left_out[0]).sum())": "left_out[0]).sum()) + 1"}, says="One rank more than is needed."
)
low_rank.mistake(
    "one rank too few",
    {"left_out[0]).sum())": "left_out[0]).sum()) - 1"},
    says="One rank too few: what is left out of rank r begins with singular value number r, counted from 0.",
)
low_rank.mistake(
    "below the bound only",
    {"left_out > error": "left_out >= error"},
    says="An error equal to the bound is good enough: the comparison is <=.",
)
low_rank.mistake(
    "never the full rank",
    {"left_out[0]).sum())": "left_out[0])[:-1].sum())"},
    says="The full rank is never chosen: where even the least singular value is too large, nothing may be left out.",
)
low_rank.mistake(
    "each value against the largest",
    {"(left_out > error**2 * left_out[0])": "(values > error * values[0])"},
    says="Singular values were compared with the largest one; what counts is the sum of those left out.",
)
low_rank.mistake(
    "share that is kept",
    {"left_out > error**2 * left_out[0]": "left_out > (1 - error**2) * left_out[0]"},
    says="error is what may be lost, not what must be kept.",
)
low_rank.mistake(
    "without the singular values",
    {"u[:, :rank] * values[:rank]": "u[:, :rank]"},
    says="The singular values are missing from the product: A B has only directions.",
)
low_rank.mistake(
    "the smallest ones",
    {"u[:, :rank] * values[:rank], v[:rank]":
     "u[:, u.shape[1] - rank :] * values[len(values) - rank :], v[len(values) - rank :]"},
    says="These are the directions of the smallest singular values.",
)  # fmt: skip
low_rank.mistake("the product", {"u[:, :rank] * values[:rank], v[:rank]": "u[:, :rank] * values[:rank] @ v[:rank]"},
        expect="two matrices")  # fmt: skip
low_rank.mistake("V not transposed", {", v[:rank]": ", v[:rank].T"}, expect="two matrices")


@low_rank.alternative("rank by rank until it is good enough")
def rank_by_rank(weight, error):
    u, values, v = torch.linalg.svd(weight)
    for rank in range(len(values) + 1):
        left, right_ = u[:, :rank] @ torch.diag(values[:rank]), v[:rank]
        if (weight - left @ right_).norm() <= error * weight.norm() or rank == len(values):
            return left, right_


@low_rank.alternative("in float32")
def in_float32(weight, error):
    u, values, v = torch.linalg.svd(weight.float(), full_matrices=False)
    kept = next((r for r in range(len(values)) if values[r:].norm() <= error * values.norm()), len(values))
    return u[:, :kept] * values[:kept], v[:kept]


@low_rank.alternative("eigenvectors of W Wᵀ")
def eigenvectors(weight, error):
    values, vectors = torch.linalg.eigh(weight @ weight.T)
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    kept = torch.cat((torch.zeros(1, dtype=values.dtype), values.cumsum(0)))
    rank = int((kept < (1 - error**2) * kept[-1]).sum())
    return vectors[:, :rank], vectors[:, :rank].T @ weight
