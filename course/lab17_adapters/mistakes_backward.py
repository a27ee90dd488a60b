"""Spoilers of lab 17, backward: weights that are kept, gradients that are added up where they are whole."""

import torch

from course.kit.exercises import alternative, mistake

# Through codes.


mistake(
    "nf4-backward",
    "the decoded weight is kept",
    {
        "ctx.codes = codes": "ctx.weight = codes.weight()",
        "return x @ codes.weight().T": "return x @ ctx.weight.T",
        "return dy @ ctx.codes.weight(), None": "return dy @ ctx.weight, None",
    },
    expect="a decoded weight",
)
mistake(
    "nf4-backward",
    "saved for backward",
    {
        "ctx.codes = codes": "weight = codes.weight()\n        ctx.save_for_backward(weight)",
        "return x @ codes.weight().T": "return x @ weight.T",
        "return dy @ ctx.codes.weight(), None": "return dy @ ctx.saved_tensors[0], None",
    },
    expect="a decoded weight",
)
mistake(
    "nf4-backward",
    "a copy in 16 bits is kept",
    {
        "ctx.codes = codes": "ctx.codes, ctx.half = codes, codes.weight().bfloat16()",
        "return dy @ ctx.codes.weight(), None": "return dy @ ctx.half.float(), None",
    },
    expect="floats are kept",
)
mistake(
    "nf4-backward",
    "the input is kept",
    {"ctx.codes = codes": "ctx.codes = codes\n        ctx.save_for_backward(x)"},
    expect="and this one is frozen",
)
mistake(
    "nf4-backward",
    "the input is kept by a function",
    {"ctx.codes = codes": "ctx.codes = codes\n        ctx.input = lambda: x"},
    expect="and this one is frozen",
)
mistake(
    "nf4-backward",
    "a transposed weight is kept in a dict",
    {
        "ctx.codes = codes": "ctx.kept = {'w': codes.weight().T.contiguous()}",
        "return x @ codes.weight().T": "return x @ ctx.kept['w']",
        "return dy @ ctx.codes.weight(), None": "return dy @ ctx.kept['w'].T, None",
    },
    expect="a decoded weight",
)
mistake(
    "nf4-backward",
    "the weight the other way round in backward",
    {"return dy @ ctx.codes.weight(), None": "return dy @ ctx.codes.weight().flip(0), None"},
    says="The gradient met the weight's rows in another order.",
)
mistake(
    "nf4-backward",
    "no gradient for x",
    {"return dy @ ctx.codes.weight(), None": "return None, None"},
    expect="x has no gradient",
)
mistake(
    "nf4-backward",
    "decoded twice in backward",
    {"return dy @ ctx.codes.weight(), None":
     "weight = ctx.codes.weight()\n        return dy @ (weight + ctx.codes.weight()) / 2, None"},
    expect="once each is enough",
)  # fmt: skip


@alternative("nf4-backward", "the transposed weight, out of a closure")
class Decoding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, codes):
        ctx.decode = lambda: codes.weight().t()
        return torch.mm(x, ctx.decode())

    @staticmethod
    def backward(ctx, dy):
        return torch.mm(dy, ctx.decode().t()), None


# On ranks.

COLUMN, ROW = "return group.all_reduce(grad_A.clone()), grad_B", "return grad_A, group.all_reduce(grad_B.clone())"
BOTH = "return group.all_reduce(grad_A.clone()), group.all_reduce(grad_B.clone())"

mistake(
    "adapter-gradients",
    "both added up",
    {
        COLUMN: BOTH,
        ROW: BOTH,
    },
    expect="mixed with other ranks' gradients",
)
mistake(
    "adapter-gradients",
    "nothing added up",
    {
        COLUMN: "return grad_A, grad_B",
        ROW: "return grad_A, grad_B",
    },
    expect="this rank's share alone",
)
mistake(
    "adapter-gradients",
    "the two kinds exchanged",
    {'if kind == "column":': 'if kind == "row":'},
    expect="gradient of A is wrong",
)
mistake(
    "adapter-gradients",
    "always A",
    {ROW: "return group.all_reduce(grad_A.clone()), grad_B"},
    expect="row layer, rank . of .: the gradient of A is wrong",
)
mistake(
    "adapter-gradients",
    "the mean",
    {
        COLUMN: "return group.all_reduce(grad_A.clone()) / group.world_size, grad_B",
        ROW: "return grad_A, group.all_reduce(grad_B.clone()) / group.world_size",
    },
    expect="it is the mean over ranks",
)
mistake(
    "adapter-gradients",
    "in place",
    {"group.all_reduce(grad_A.clone())": "group.all_reduce(grad_A)"},
    expect="changed its input `grad_A`",
)
mistake(
    "adapter-gradients",
    "added up twice",
    {COLUMN: "return group.all_reduce(group.all_reduce(grad_A.clone())), grad_B"},
    expect="gradient of A is wrong",
)
mistake(
    "adapter-gradients",
    "all gathered, then summed",
    {COLUMN:
     "shares = group.all_gather(grad_A.clone()).unflatten(0, (group.world_size, -1))\n"
     "        return shares.sum(0), grad_B"},
    expect="one all-reduce of A's gradient",
)  # fmt: skip


@alternative("adapter-gradients", "reduce-scatter and all-gather")
def by_halves(kind, grad_A, grad_B, group):
    shared, own = (grad_A, grad_B) if kind == "column" else (grad_B, grad_A)
    if group.world_size == 1:
        return grad_A, grad_B
    summed = group.all_reduce(shared.contiguous().clone())
    return (summed, own) if kind == "column" else (own, summed)
