"""Spoilers of lab 16: verdicts on programs that round a layer."""

import torch

from course.kit.answers import answers_of
from course.kit.exercises import KnownAnswers

right = answers_of("16_quantization")

what_went_wrong = KnownAnswers("what-went-wrong")

what_went_wrong.mistake(
    "looks at the matrix only",
    {
        "max(len(values.unique()) for values in groups.flatten(0, 1)) > 16": (
            "len(rounded.unique()) > 16 * len(rounded)"
        )
    },
    expect="program",
)
what_went_wrong.mistake("all 16 values or nothing", {"<= 16:": "== 16:"}, expect="program A")
what_went_wrong.mistake(
    "a zero point that is too large only",
    {"error.mean(-1).abs() > error.std(-1)": "-error.mean(-1) > error.std(-1)"},
    expect="program E",
)
what_went_wrong.mistake("the whole matrix has more values", {"<= 16:": "<= 1:"}, expect="program A")
what_went_wrong.mistake(
    "a step is the largest error",
    {"shifted = error.mean(-1).abs() > error.std(-1)": "shifted = error.abs().amax(-1) > 1e-3"},
    expect="program [BDF]",
)
what_went_wrong.mistake(
    "one shifted group is enough, however small the shift",
    {"error.mean(-1).abs() > error.std(-1)": "error.mean(-1).abs() > 0.02 * error.std(-1)"},
    expect="it is 'right'",
)


@what_went_wrong.mistake("judges by the size of the error", expect="program [A-F]")
def by_size(weight, rounded, group):
    error = float((rounded - weight).square().mean() / weight.square().mean())
    if error > 0.3:
        return "one scale for the tensor"
    return "right" if error < 0.02 else "zero point off by one"


@what_went_wrong.mistake("groups along the outputs never named", expect="program C")
def two_of_three(weight, rounded, group):
    found = right.verdict(weight, rounded, group)
    return "right" if found == "groups along the outputs" else found


@what_went_wrong.mistake("calls every outlier a bug", expect="program B")
def no_outliers(weight, rounded, group):
    if weight.abs().max() > 20 * weight.abs().median():
        return "one scale for the tensor"
    return right.verdict(weight, rounded, group)


@what_went_wrong.mistake("says nothing when all is well", expect="must be one of")
def silent(weight, rounded, group):
    found = right.verdict(weight, rounded, group)
    return None if found == "right" else found


@what_went_wrong.alternative("rounds again and compares")
def by_rounding_again(weight, rounded, group):
    def most(matrix):
        return max(len(values.unique()) for row in matrix for values in row.split(group))

    if len(rounded.unique()) < 17:
        return "one scale for the tensor"
    if most(rounded) > 16:
        return "groups along the outputs" if most(rounded.T.contiguous()) <= 16 else "right"
    below = ((rounded - weight) < 0).float().unflatten(1, (-1, group)).mean(-1)
    return "zero point off by one" if ((below < 0.15) | (below > 0.85)).float().mean() > 0.5 else "right"


@what_went_wrong.alternative("the medians of errors")
def by_medians(weight, rounded, group):
    if rounded.unique().numel() <= 16:
        return "one scale for the tensor"
    groups, errors = rounded.view(-1, group), (rounded - weight).view(-1, group)
    if any(values.unique().numel() > 16 for values in groups):
        return "groups along the outputs"
    steps = torch.stack([values.unique().diff().min() if len(values.unique()) > 1 else values[0] for values in groups])
    return (
        "zero point off by one" if float((errors.median(1).values.abs() > steps / 2).float().mean()) > 0.6 else "right"
    )
