"""Spoilers of lab 17, backward: weights that are kept, gradients that are added up where they are whole."""

import torch

from course.kit.exercises import KnownAnswers

# Through codes.

nf4_backward = KnownAnswers("nf4-backward")

nf4_backward.mistake(
    "the decoded weight is kept",
    {
        "ctx.codes = codes": "ctx.weight = codes.weight()",
        "return x @ codes.weight().T": "return x @ ctx.weight.T",
        "return dy @ ctx.codes.weight(), None": "return dy @ ctx.weight, None",
    },
    expect="a decoded weight",
)
nf4_backward.mistake(
    "saved for backward",
    {
        "ctx.codes = codes": "weight = codes.weight()\n        ctx.save_for_backward(weight)",
        "return x @ codes.weight().T": "return x @ weight.T",
        "return dy @ ctx.codes.weight(), None": "return dy @ ctx.saved_tensors[0], None",
    },
    expect="a decoded weight",
)
nf4_backward.mistake(
    "a copy in 16 bits is kept",
    {
        "ctx.codes = codes": "ctx.codes, ctx.half = codes, codes.weight().bfloat16()",
        "return dy @ ctx.codes.weight(), None": "return dy @ ctx.half.float(), None",
    },
    expect="floats are kept",
)
nf4_backward.mistake(
    "the input is kept",
    {"ctx.codes = codes": "ctx.codes = codes\n        ctx.save_for_backward(x)"},
    expect="and this one is frozen",
)
nf4_backward.mistake(
    "the input is kept by a function",
    {"ctx.codes = codes": "ctx.codes = codes\n        ctx.input = lambda: x"},
    expect="and this one is frozen",
)
nf4_backward.mistake(
    "a transposed weight is kept in a dict",
    {
        "ctx.codes = codes": "ctx.kept = {'w': codes.weight().T.contiguous()}",
        "return x @ codes.weight().T": "return x @ ctx.kept['w']",
        "return dy @ ctx.codes.weight(), None": "return dy @ ctx.kept['w'].T, None",
    },
    expect="a decoded weight",
)
nf4_backward.mistake(
    "the weight the other way round in backward",
    {"return dy @ ctx.codes.weight(), None": "return dy @ ctx.codes.weight().flip(0), None"},
    says="The gradient met the weight's rows in another order.",
)
nf4_backward.mistake(
    "no gradient for x", {"return dy @ ctx.codes.weight(), None": "return None, None"}, expect="x has no gradient"
)
nf4_backward.mistake(
    "decoded twice in backward",
    {"return dy @ ctx.codes.weight(), None":
     "weight = ctx.codes.weight()\n        return dy @ (weight + ctx.codes.weight()) / 2, None"},
    expect="once each is enough",
)  # fmt: skip


@nf4_backward.alternative("the transposed weight, out of a closure")
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


adapter_gradients = KnownAnswers("adapter-gradients")

adapter_gradients.mistake("both added up", {COLUMN: BOTH, ROW: BOTH}, expect="mixed with other ranks' gradients")
adapter_gradients.mistake(
    "nothing added up",
    {COLUMN: "return grad_A, grad_B", ROW: "return grad_A, grad_B"},
    expect="this rank's share alone",
)
adapter_gradients.mistake(
    "the two kinds exchanged", {'if kind == "column":': 'if kind == "row":'}, expect="gradient of A is wrong"
)
adapter_gradients.mistake(
    "always A",
    {ROW: "return group.all_reduce(grad_A.clone()), grad_B"},
    expect="row layer, rank . of .: the gradient of A is wrong",
)
adapter_gradients.mistake(
    "the mean",
    {
        COLUMN: "return group.all_reduce(grad_A.clone()) / group.world_size, grad_B",
        ROW: "return grad_A, group.all_reduce(grad_B.clone()) / group.world_size",
    },
    expect="it is the mean over ranks",
)
adapter_gradients.mistake(
    "in place", {"group.all_reduce(grad_A.clone())": "group.all_reduce(grad_A)"}, expect="changed its input `grad_A`"
)
adapter_gradients.mistake(
    "added up twice",
    {COLUMN: "return group.all_reduce(group.all_reduce(grad_A.clone())), grad_B"},
    expect="gradient of A is wrong",
)
adapter_gradients.mistake(
    "all gathered, then summed",
    {COLUMN:
     "shares = group.all_gather(grad_A.clone()).unflatten(0, (group.world_size, -1))\n"
     "        return shares.sum(0), grad_B"},
    expect="one all-reduce of A's gradient",
)  # fmt: skip


@adapter_gradients.alternative("reduce-scatter and all-gather")
def by_halves(kind, grad_A, grad_B, group):
    shared, own = (grad_A, grad_B) if kind == "column" else (grad_B, grad_A)
    if group.world_size == 1:
        return grad_A, grad_B
    summed = group.all_reduce(shared.contiguous().clone())
    return (summed, own) if kind == "column" else (own, summed)
