"""Spoilers of lab 17, one adapter: layers that do not begin at the base, sums without their scale."""

import torch
import torch.nn.functional as F
from torch import nn

from course.kit.exercises import alternative, mistake

# The layer.


mistake(
    "lora-layer",
    "B random as well",
    {"base.weight.new_zeros(outputs, rank)": "torch.randn(outputs, rank).to(base.weight)"},
    expect="Training has to begin at the base",
)  # fmt: skip
mistake(
    "lora-layer",
    "A zero as well",
    {"uniform_(-1, 1) / inputs**0.5": "zero_()"},
    expect="so neither ever learns",
)
mistake(
    "lora-layer",
    "A zero, B random",
    {
        "uniform_(-1, 1) / inputs**0.5": "zero_()",
        "base.weight.new_zeros(outputs, rank)": "torch.randn(outputs, rank).to(base.weight)",
    },
    expect="A is zero",
)
mistake(
    "lora-layer",
    "A from the standard normal distribution",
    {"uniform_(-1, 1) / inputs**0.5": "normal_()"},
    expect="uniform within 1 / √in",
)
mistake(
    "lora-layer",
    "no scale",
    {"self.scale * ((x @ self.A.T) @ self.B.T)": "(x @ self.A.T) @ self.B.T"},
    says="The update is not scaled: multiply it by alpha / rank.",
)
mistake(
    "lora-layer",
    "alpha without the rank",
    {"self.scale = alpha / rank": "self.scale = alpha"},
    says="The update is scaled by alpha: divided by the rank, it keeps its size when the rank grows.",
)
mistake(
    "lora-layer",
    "the rank over alpha",
    {"self.scale = alpha / rank": "self.scale = rank / alpha"},
    says="The update is scaled by rank / alpha, the inverse of what is asked for.",
)
mistake(
    "lora-layer",
    "rsLoRA's scale",
    {"self.scale = alpha / rank": "self.scale = alpha / rank**0.5"},
    says="alpha / √rank is rsLoRA's scale; this exercise asks for alpha / rank.",
)
mistake(
    "lora-layer",
    "the base learns, too",
    {"base.requires_grad_(False)": "base"},
    expect="freeze the base",
)
mistake(
    "lora-layer",
    "B A as a whole matrix",
    {"(x @ self.A.T) @ self.B.T": "x @ (self.B @ self.A).T"},
    expect="apply A first, then B",
)
mistake(
    "lora-layer",
    "A is no parameter",
    {"self.A = torch.nn.Parameter(start)": "self.A = start"},
    expect="self.A is no nn.Parameter",
)
mistake(
    "lora-layer",
    "always float32",
    {
        "base.weight.new_empty(rank, inputs)": "base.weight.new_empty(rank, inputs, dtype=torch.float32)",
        "base.weight.new_zeros(outputs, rank)": "base.weight.new_zeros(outputs, rank, dtype=torch.float32)",
    },
    expect="use the base's",
)
mistake(
    "lora-layer",
    "three dimensions and no other",
    {"(x @ self.A.T) @ self.B.T": "torch.einsum('btr,or->bto', torch.einsum('bti,ri->btr', x, self.A), self.B)"},
    expect="any number of dimensions",
)
mistake(
    "lora-layer",
    "always computed in float32",
    {"(x @ self.A.T) @ self.B.T": "(x.float() @ self.A.float().T) @ self.B.float().T"},
    expect="has fewer digits than torch.float64",
)
mistake(
    "lora-layer",
    "an output in float64",
    {"self.scale * ((x @ self.A.T) @ self.B.T)": "self.scale * ((x @ self.A.T) @ self.B.T).double()"},
    expect="as x and the layer are",
)
mistake(
    "lora-layer",
    "the bound of the outputs",
    {"inputs**0.5": "outputs**0.5"},
    expect="uniform within 1 / √in",
)
mistake(
    "lora-layer",
    "A and B in the other orientation",
    {
        "base.weight.new_empty(rank, inputs)": "base.weight.new_empty(inputs, rank)",
        "(x @ self.A.T) @ self.B.T": "(x @ self.A) @ self.B.T",
    },
    expect="A is .*the exercise asks for a tensor",
)
mistake(
    "lora-layer",
    "the update beside the output is detached",
    {"self.scale * ((x @ self.A.T) @ self.B.T)": "self.scale * ((x.detach() @ self.A.T) @ self.B.T)"},
    expect="the gradient of x",
)
mistake(
    "lora-layer",
    "a copy of the base",
    {"self.base = base.requires_grad_(False)":
     "self.base = torch.nn.Linear(base.in_features, base.out_features, base.bias is not None,\n"
     "            dtype=base.weight.dtype)\n"
     "        self.base.load_state_dict(base.state_dict())\n"
     "        self.base.requires_grad_(False)"},
    expect="takes its memory twice",
)  # fmt: skip


@alternative("lora-layer", "peft's initialisation, F.linear")
class ByLinear(nn.Module):
    def __init__(self, base, rank, alpha):
        super().__init__()
        base.weight.requires_grad = False
        if base.bias is not None:
            base.bias.requires_grad = False
        self.base, self.rank, self.alpha = base, rank, alpha
        self.A = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.B = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.A, a=5**0.5)

    def forward(self, x):
        low = F.linear(x * (self.alpha / self.rank), self.A)
        return self.base(x) + F.linear(low, self.B)


alternative(
    "lora-layer",
    "the base's parameters without the base",
    {
        "self.base = base.requires_grad_(False)": "self.W, self.b = base.requires_grad_(False).weight, base.bias",
        "self.base(x)": "torch.nn.functional.linear(x, self.W, self.b)",
    },
)


# Merging.


mistake(
    "merge",
    "alpha / r forgotten",
    {"alpha / len(A) * (B.float() @ A.float())": "B.float() @ A.float()"},
    says="The update is added without alpha / r, with which the layer was trained.",
)
mistake(
    "merge",
    "alpha without the rank",
    {"alpha / len(A) * (B.float() @ A.float())": "alpha * (B.float() @ A.float())"},
    says="The update is multiplied by alpha and not by alpha / r.",
)
mistake(
    "merge",
    "divided by the outputs",
    {"alpha / len(A)": "alpha / len(B)"},
    says="B's first dimension is the outputs; the rank is A's first dimension, or B's second.",
)
mistake(
    "merge",
    "everything in 16 bits",
    {
        "alpha / len(A) * (B.float() @ A.float())": "alpha / len(A) * (B @ A)",
        "(weight + update).to(weight.dtype)  # update is in float32, so the sum is": "weight + update",
    },
    says="Product and sum were rounded to 16 bits each: add in float32, and round once.",
)
mistake(
    "merge",
    "the product in 16 bits",
    {"alpha / len(A) * (B.float() @ A.float())": "alpha / len(A) * (B @ A).float()"},
    expect="not the nearest to the exact sum",
)
mistake(
    "merge",
    "in float32",
    {"(weight + update).to(weight.dtype)": "weight + update"},
    expect="as W is",
)
mistake(
    "merge",
    "bfloat16 for all 16 bits",
    {"to(weight.dtype)": "to(torch.bfloat16 if weight.itemsize == 2 else weight.dtype)"},
    expect="as W is",
)
mistake(
    "merge",
    "in place",
    {"return (weight + update).to(weight.dtype)": "return weight.copy_(weight + update)"},
    expect="changed its input `weight`",
)
mistake(
    "merge",
    "taken out without a minus",
    {"return merged(weight, A, -B, alpha)": "return merged(weight, A, B, alpha)"},
    says="Unmerged adds the update once more: it has to be taken out.",
)


def _add(weight, A, B, alpha):
    rank = B.shape[1]
    return torch.addmm(weight.float(), B.float(), A.float(), alpha=alpha / rank).to(weight.dtype)


def _take(weight, A, B, alpha):
    return torch.addmm(weight.double(), B.double(), A.double(), alpha=-alpha / B.shape[1]).to(weight.dtype)


alternative("merge", "torch.addmm, and float64")((_add, _take))
