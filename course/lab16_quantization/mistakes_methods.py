"""Spoilers of lab 16: factors searched for another layer, columns that do not make good for each other."""

import torch

from course.kit.answers import answers_of
from course.kit.exercises import KnownAnswers

right = answers_of("16_quantization")

# AWQ.

awq_search = KnownAnswers("awq-search")

awq_search.mistake(
    "inputs not divided",
    {"(x / factors) @ rounded.T": "x @ rounded.T"},
    says="The inputs were not divided by the factors, so the outputs compared are those of another layer.",
)
awq_search.mistake(
    "error of the weights",
    {"((x / factors) @ rounded.T - x @ weight.T)": "(rounded / factors - weight)"},
    says="This minimises the error of the weights; what counts is that of the outputs.",
)
awq_search.mistake(
    "error of the scaled weights",
    {"((x / factors) @ rounded.T - x @ weight.T)": "(rounded - weight * factors)"},
    says="This minimises the error of the scaled weights, whatever inputs they meet.",
)
awq_search.mistake(
    "sum of sizes",
    {".square().sum()": ".abs().sum()"},
    says="The sizes of the errors were added up; in the sum of their squares large errors weigh more.",
)
awq_search.mistake(
    "largest input instead of the mean",
    {"x.abs().mean(0)": "x.abs().amax(0)"},
    says="Candidates are powers of the largest |x|, as SmoothQuant takes it; AWQ takes mean|x|.",
)
awq_search.mistake(
    "the worst candidate",
    {'float("inf")': 'float("-inf")', "error < least": "error > least"},
    says="This keeps the candidate with the largest error.",
)
awq_search.mistake(
    "the last candidate",
    {"best, least = factors, error": "best = factors"},
    says="`least` is never lowered, so the last candidate always wins.",
)
awq_search.mistake(
    "weights' size instead of inputs'",
    {"size = x.abs().mean(0)": "size = weight.abs().mean(0)"},
    says="The size of weights says nothing about the inputs they meet: candidates are powers of mean|x|.",
)
awq_search.mistake(
    "mean instead of mean of sizes",
    {"x.abs().mean(0)": "x.mean(0).abs()"},
    says="This is |mean x|: an input that swings around 0 looks small. It is mean|x|.",
)
awq_search.mistake(
    "divides where it should multiply",
    {"size ** (step / steps)": "size ** (-step / steps)"},
    says="These factors are the inverse: a column that meets large inputs needs a factor above 1.",
)
awq_search.mistake(
    "α of 1/2 without a search",
    {"range(steps + 1)": "range(steps // 2, steps // 2 + 1)"},
    says="α = 1/2 is SmoothQuant's habit; AWQ searches.",
)
awq_search.mistake("only the ends", {"range(steps + 1)": "(0, steps)"}, says="Only α = 0 and α = 1 were tried.")
awq_search.mistake(
    "without α = 1", {"range(steps + 1)": "range(steps)"}, says="α = 1 was not tried: range(steps) ends before it."
)
awq_search.mistake(
    "without α = 0",
    {"range(steps + 1)": "range(1, steps + 1)"},
    says="α = 0, no factors at all, was not tried: sometimes nothing beats it.",
)
awq_search.mistake(
    "a channel of zeros divides by zero",
    {".clamp_min(1e-4)": ""},
    says="A channel that is always 0 has mean|x| = 0: x / s is NaN there for every α but 0, and so is the error.",
)
awq_search.mistake("one factor for all", {"x.abs().mean(0)": "x.abs().mean().expand(x.shape[1])"},
        says="All inputs got the same factor, which changes nothing about rounding.")  # fmt: skip
awq_search.mistake("rounded weights returned", {"best, least = factors, error": "best, least = rounded, error"},
        expect="one factor for each")  # fmt: skip
awq_search.mistake("multiplies its input in place", {"rounded = round_int4(weight * factors, group)":
        "weight *= factors\n        rounded = round_int4(weight, group)"}, expect="changed its input")  # fmt: skip


@awq_search.alternative("by the Gram matrix, every error first")
def by_gram(weight, x, group, steps=20):
    gram, size = x.double().T @ x.double(), (x.abs().sum(0) / len(x)).clamp_min(1e-4)

    def error(alpha):
        off = (right.round_int4(weight * size**alpha, group) / size**alpha - weight).double()
        return float(((off @ gram) * off).sum())

    return size ** min((step / steps for step in range(steps + 1)), key=error)


@awq_search.alternative("factors centred on 1, from the largest α down")
def centred(weight, x, group, steps=20):
    found = []
    for step in reversed(range(steps + 1)):
        factors = x.abs().mean(0).clamp_min(1e-4) ** (step / steps)
        factors = factors * 2.0 ** -torch.log2((factors.max() * factors.min()).sqrt()).round()
        off = (x / factors) @ right.round_int4(weight * factors, group).T - x @ weight.T
        found.append((float(off.square().sum()), factors))
    return min(found, key=lambda each: each[0])[1]


@awq_search.alternative("a channel of zeros keeps its weights")
def dead_channels_kept(weight, x, group, steps=20):
    size = x.abs().mean(0)
    size, wanted, found = torch.where(size == 0, torch.ones_like(size), size), x @ weight.T, []
    for step in range(steps + 1):
        factors = size ** (step / steps)
        error = (x / factors) @ right.round_int4(weight * factors, group).T - wanted
        found.append((float(error.square().sum()), step, factors))
    return min(found)[2]


# GPTQ.


AT_THE_START = (
    "Every column is rounded as it was at the start, so none makes good for another: round `left`, and move the "
    "columns to come by row j of U (below its diagonal U is 0)."
)


gptq_columns = KnownAnswers("gptq-columns")

gptq_columns.mistake(
    "rounding to nearest", {"left[:, j + 1 :] -= error[:, None] * upper[j, j + 1 :]": "pass"}, says=AT_THE_START
)
gptq_columns.mistake(
    "rounded as it was at the start", {"nearest(left[:, j], j)": "nearest(weight[:, j], j)"}, says=AT_THE_START
)
gptq_columns.mistake("U transposed", {"upper[j, j + 1 :]": "upper[j + 1 :, j]"}, says=AT_THE_START)
gptq_columns.mistake(
    "a wrong column says its row",
    {"return rounded": "rounded[-1, -1] += 1\n    return rounded"},
    expect="in column [0-9]+ your weights.*row [1-9]",
)
gptq_columns.mistake(
    "error of the column as it was",
    {"(left[:, j] - rounded[:, j])": "(weight[:, j] - rounded[:, j])"},
    says="The error is the distance from the original weight: what earlier columns moved is counted a second time.",
)
gptq_columns.mistake(
    "not divided by the diagonal", {" / upper[j, j]": ""}, says="The error was not divided by U[j, j]."
)
gptq_columns.mistake(
    "divided by its square",
    {"/ upper[j, j]": "/ upper[j, j] ** 2"},
    says="U is the factor of the inverse: divide by U[j, j], not by its square.",
)
gptq_columns.mistake(
    "wrong sign",
    {"-= error": "+= error"},
    says="The sign is wrong: later columns repeat the error instead of making good for it.",
)
gptq_columns.mistake(
    "only the next column",
    {"left[:, j + 1 :] -=": "left[:, j + 1 : j + 2] -=", "upper[j, j + 1 :]": "upper[j, j + 1 : j + 2]"},
    says="Only the next column moves; all columns to come do.",
)  # fmt: skip
gptq_columns.mistake(
    "errors stay inside a block of 128 columns",
    {"left[:, j + 1 :] -=": "left[:, j + 1 : j // 128 * 128 + 128] -=",
     "upper[j, j + 1 :]": "upper[j, j + 1 : j // 128 * 128 + 128]"},
    says="Errors stop at the end of a block of 128 columns, and the later blocks have to make good for them, too.",
)  # fmt: skip
gptq_columns.mistake(
    "returns what is left",
    {"return rounded": "return left"},
    says="This returns the weights as they were before each was rounded.",
)
gptq_columns.mistake("in place", {"weight.clone()": "weight"}, expect="changed its input")
gptq_columns.mistake("from the last column", {"range(weight.shape[1])": "reversed(range(weight.shape[1]))"},
        expect="in order")  # fmt: skip
gptq_columns.mistake(
    "last column forgotten", {"range(weight.shape[1])": "range(weight.shape[1] - 1)"}, expect="all columns are rounded"
)


@gptq_columns.alternative("the column itself among those that move")
def in_one(weight, upper, nearest):
    found = weight.clone()
    for j in range(found.shape[1]):
        error = (found[:, j] - nearest(found[:, j].clone(), j)) / upper[j, j]
        found[:, j:] = found[:, j:] - torch.outer(error, upper[j, j:])
    return found


@gptq_columns.alternative("each column rounded twice: for the result and for the error")
def rounded_twice(weight, upper, nearest):
    left, rounded = weight.clone(), []
    for j, row in enumerate(upper):
        rounded.append(nearest(left[:, j], j))
        left -= torch.outer(left[:, j] - nearest(left[:, j], j), row / row[j])
    return torch.stack(rounded, dim=1)


@gptq_columns.alternative("errors kept, columns computed when they are due")
def lazily(weight, upper, nearest):
    errors, rounded = [], []
    for j in range(weight.shape[1]):
        moved = sum((error * upper[i, j] for i, error in enumerate(errors)), torch.zeros_like(weight[:, j]))
        column = weight[:, j] - moved
        rounded.append(nearest(column, j))
        errors.append((column - rounded[-1]) / upper[j, j])
    return torch.stack(rounded, dim=1)
