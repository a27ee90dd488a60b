"""Spoilers of lab 17, one adapter: layers that do not begin at the base, sums without their scale."""

import torch
import torch.nn.functional as F
from torch import nn

from course.kit.exercises import KnownAnswers

# The layer.

lora_layer = KnownAnswers("lora-layer")

lora_layer.mistake(
    "B random as well",
    {"base.weight.new_zeros(outputs, rank)": "torch.randn(outputs, rank).to(base.weight)"},
    expect="Training has to begin at the base",
)  # fmt: skip
lora_layer.mistake("A zero as well", {"uniform_(-1, 1) / inputs**0.5": "zero_()"}, expect="so neither ever learns")
lora_layer.mistake(
    "A zero, B random",
    {
        "uniform_(-1, 1) / inputs**0.5": "zero_()",
        "base.weight.new_zeros(outputs, rank)": "torch.randn(outputs, rank).to(base.weight)",
    },
    expect="A is zero",
)
lora_layer.mistake(
    "A from the standard normal distribution",
    {"uniform_(-1, 1) / inputs**0.5": "normal_()"},
    expect="uniform within 1 / √in",
)
lora_layer.mistake(
    "no scale",
    {"self.scale * ((x @ self.A.T) @ self.B.T)": "(x @ self.A.T) @ self.B.T"},
    says="The update is not scaled: multiply it by alpha / rank.",
)
lora_layer.mistake(
    "alpha without the rank",
    {"self.scale = alpha / rank": "self.scale = alpha"},
    says="The update is scaled by alpha: divided by the rank, it keeps its size when the rank grows.",
)
lora_layer.mistake(
    "the rank over alpha",
    {"self.scale = alpha / rank": "self.scale = rank / alpha"},
    says="The update is scaled by rank / alpha, the inverse of what is asked for.",
)
lora_layer.mistake(
    "rsLoRA's scale",
    {"self.scale = alpha / rank": "self.scale = alpha / rank**0.5"},
    says="alpha / √rank is rsLoRA's scale; this exercise asks for alpha / rank.",
)
lora_layer.mistake("the base learns, too", {"base.requires_grad_(False)": "base"}, expect="freeze the base")
lora_layer.mistake(
    "B A as a whole matrix", {"(x @ self.A.T) @ self.B.T": "x @ (self.B @ self.A).T"}, expect="apply A first, then B"
)
lora_layer.mistake(
    "A is no parameter", {"self.A = torch.nn.Parameter(start)": "self.A = start"}, expect="self.A is no nn.Parameter"
)
lora_layer.mistake(
    "always float32",
    {
        "base.weight.new_empty(rank, inputs)": "base.weight.new_empty(rank, inputs, dtype=torch.float32)",
        "base.weight.new_zeros(outputs, rank)": "base.weight.new_zeros(outputs, rank, dtype=torch.float32)",
    },
    expect="use the base's",
)
lora_layer.mistake(
    "three dimensions and no other",
    {"(x @ self.A.T) @ self.B.T": "torch.einsum('btr,or->bto', torch.einsum('bti,ri->btr', x, self.A), self.B)"},
    expect="any number of dimensions",
)
lora_layer.mistake(
    "always computed in float32",
    {"(x @ self.A.T) @ self.B.T": "(x.float() @ self.A.float().T) @ self.B.float().T"},
    expect="has fewer digits than torch.float64",
)
lora_layer.mistake(
    "an output in float64",
    {"self.scale * ((x @ self.A.T) @ self.B.T)": "self.scale * ((x @ self.A.T) @ self.B.T).double()"},
    expect="as x and the layer are",
)
lora_layer.mistake("the bound of the outputs", {"inputs**0.5": "outputs**0.5"}, expect="uniform within 1 / √in")
lora_layer.mistake(
    "A and B in the other orientation",
    {
        "base.weight.new_empty(rank, inputs)": "base.weight.new_empty(inputs, rank)",
        "(x @ self.A.T) @ self.B.T": "(x @ self.A) @ self.B.T",
    },
    expect="A is .*the exercise asks for a tensor",
)
lora_layer.mistake(
    "the update beside the output is detached",
    {"self.scale * ((x @ self.A.T) @ self.B.T)": "self.scale * ((x.detach() @ self.A.T) @ self.B.T)"},
    expect="the gradient of x",
)
lora_layer.mistake(
    "a copy of the base",
    {"self.base = base.requires_grad_(False)":
     "self.base = torch.nn.Linear(base.in_features, base.out_features, base.bias is not None,\n"
     "            dtype=base.weight.dtype)\n"
     "        self.base.load_state_dict(base.state_dict())\n"
     "        self.base.requires_grad_(False)"},
    expect="takes its memory twice",
)  # fmt: skip


@lora_layer.alternative("peft's initialisation, F.linear")
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


lora_layer.alternative(
    "the base's parameters without the base",
    {
        "self.base = base.requires_grad_(False)": "self.W, self.b = base.requires_grad_(False).weight, base.bias",
        "self.base(x)": "torch.nn.functional.linear(x, self.W, self.b)",
    },
)


# Merging.

merge = KnownAnswers("merge")

merge.mistake(
    "alpha / r forgotten",
    {"alpha / len(A) * (B.float() @ A.float())": "B.float() @ A.float()"},
    says="The update is added without alpha / r, with which the layer was trained.",
)
merge.mistake(
    "alpha without the rank",
    {"alpha / len(A) * (B.float() @ A.float())": "alpha * (B.float() @ A.float())"},
    says="The update is multiplied by alpha and not by alpha / r.",
)
merge.mistake(
    "divided by the outputs",
    {"alpha / len(A)": "alpha / len(B)"},
    says="B's first dimension is the outputs; the rank is A's first dimension, or B's second.",
)
merge.mistake(
    "everything in 16 bits",
    {
        "alpha / len(A) * (B.float() @ A.float())": "alpha / len(A) * (B @ A)",
        "(weight + update).to(weight.dtype)  # update is in float32, so the sum is": "weight + update",
    },
    says="Product and sum were rounded to 16 bits each: add in float32, and round once.",
)
merge.mistake(
    "the product in 16 bits",
    {"alpha / len(A) * (B.float() @ A.float())": "alpha / len(A) * (B @ A).float()"},
    expect="not the nearest to the exact sum",
)
merge.mistake("in float32", {"(weight + update).to(weight.dtype)": "weight + update"}, expect="as W is")
merge.mistake(
    "bfloat16 for all 16 bits",
    {"to(weight.dtype)": "to(torch.bfloat16 if weight.itemsize == 2 else weight.dtype)"},
    expect="as W is",
)
merge.mistake(
    "in place",
    {"return (weight + update).to(weight.dtype)": "return weight.copy_(weight + update)"},
    expect="changed its input `weight`",
)
merge.mistake(
    "taken out without a minus",
    {"return merged(weight, A, -B, alpha)": "return merged(weight, A, B, alpha)"},
    says="Unmerged adds the update once more: it has to be taken out.",
)


def _add(weight, A, B, alpha):
    rank = B.shape[1]
    return torch.addmm(weight.float(), B.float(), A.float(), alpha=alpha / rank).to(weight.dtype)


def _take(weight, A, B, alpha):
    return torch.addmm(weight.double(), B.double(), A.double(), alpha=-alpha / B.shape[1]).to(weight.dtype)


merge.alternative("torch.addmm, and float64")((_add, _take))
