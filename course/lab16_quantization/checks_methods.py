"""Lab 16, methods: factors that AWQ searches, and columns that GPTQ lets make good for each other."""

import random
from collections.abc import Callable
from itertools import groupby

import torch
from torch import Tensor

from course.kit.answers import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.shared.diagnose import expect
from minillm.quantize import Int

ANSWERS = answers_of("16_quantization")


@exercise(
    "awq-search",
    minutes=20,
    difficulty=3,
    hints=(
        "Try the candidates one after the other. For each: what would the layer return with rounded weights, and how "
        "far is that from x @ weight.T?",
        "s = x.abs().mean(0).clamp_min(1e-4).pow(i / steps); rounded = round_int4(weight * s, group); output = (x / s) "
        "@ rounded.T. Inputs must be divided by what the weights were multiplied with, or the outputs are those of "
        "another layer.",
    ),
)
def check_awq(learner: Callable) -> Receipt:
    rows, chosen, wrong = [], [], ""
    sizes = [(16, 8, 4, -0.6, False), (32, 16, 20, 0.0, False), (24, 8, 10, 0.6, False), (32, 8, 12, -0.3, True)]
    sizes += [(16, 8, 5, -1.5, False), (8 * random.randint(5, 9), 8, random.randint(6, 12), -1.0, False)]
    for inputs, group, steps, lean, uneven in sizes:
        weight, x, errors = _case_of_awq(inputs, group, steps, lean, uneven)
        best = min(range(steps + 1), key=errors.__getitem__)
        factors = learner(weight, x, group, steps)
        fits = isinstance(factors, Tensor) and factors.shape == (inputs,)
        expect(fits, factors, f"one factor for each of the {inputs} inputs")
        chosen.append(factors)
        error = _error(weight, x, factors, group) if bool((factors > 0).all()) else float("nan")
        name = f"{len(weight)} x {inputs}, groups of {group}, {steps + 1} candidates"
        if not error <= errors[best] * (1 + 1e-4):  # NaN, too
            said = f"{name}: with your factors the output error is {error:.4g}; with those of α = {best}/{steps} it is "
            wrong = wrong or f"{said}{errors[best]:.4g}, and without factors {errors[0]:.4g}."
        if error < 0.98 * errors[best]:
            said = f"{name}: your factors leave an output error of {error:.4g}, and no candidate less than "
            said += f"{errors[best]:.4g}: candidates are mean|x|^α, α from 0 to 1, both included, in {steps} steps."
            wrong = wrong or said
        rows.append(
            row(f"{name}: output error / without factors", errors[best] / errors[0], error / errors[0], "", 1e-3)
        )
    if wrong:
        raise CheckFailed(wrong, evidence=tuple(chosen))
    return receipt("AWQ's factors", rows)


# Other sums than that of squares over all rows, each of which may choose another candidate.
OTHER_SUMS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda off: off.abs().sum(),
    lambda off: off[: len(off) // 2].square().sum(),
    lambda off: off.norm(dim=0).sum(),
)


def _case_of_awq(inputs: int, group: int, steps: int, lean: float, uneven: bool) -> tuple[Tensor, Tensor, list[float]]:
    """Weights, inputs with some large channels, and the error of each candidate.

    lean: how weights go with inputs, in powers of these. With lean > 0 the best α is 0, below -1 it is 1, by 5 % or
    more. Otherwise it is an inner one and clearly better than the ends and the middle: then mistakes make a difference.
    uneven: inputs are small, but for three rows, and one output large: every other sum of errors chooses another α.
    One channel of 32 is always 0, and its weights are too small to be the largest of their group.
    """
    while True:
        loud = torch.exp(1.5 * torch.randn(inputs))
        x = torch.randn(60, inputs) * loud + torch.randn(inputs)
        weight = torch.randn(random.randint(5, 12), inputs) * loud**lean
        if uneven:
            x[30:33] *= 8 * torch.rand(inputs)
            x, weight[0] = 0.01 * x, 5 * weight[0]
        if inputs == 32:
            x[:, 3], weight[:, 3] = 0, 1e-4 * weight[:, 3]
        mean = x.abs().mean(0).clamp_min(1e-4)
        off = [_off(weight, x, mean ** (step / steps), group) for step in range(steps + 1)]
        errors = [float(each.square().sum()) for each in off]
        if lean > 0 or lean < -1:
            best = 0 if lean > 0 else steps
            clear = 1.05 * errors[best] < min(errors[:best] + errors[best + 1 :])
            if lean < -1:  # and an α above 1 would be better still, but is no candidate
                clear = clear and 1.05 * _error(weight, x, mean ** (1 + 1 / steps), group) < errors[best]
        else:
            clear = min(errors[0], errors[-1], errors[steps // 2]) > 1.02 * min(errors)
        if uneven:
            others = [min(range(steps + 1), key=lambda step, total=total: total(off[step])) for total in OTHER_SUMS]
            clear = clear and all(errors[other] > 1.002 * min(errors) for other in others)
        if clear:
            return weight, x, errors


def _error(weight: Tensor, x: Tensor, factors: Tensor, group: int) -> float:
    """Σ ‖x̂ Ŵᵀ - x Wᵀ‖²."""
    return float(_off(weight, x, factors, group).square().sum())


def _off(weight: Tensor, x: Tensor, factors: Tensor, group: int) -> Tensor:
    """x̂ Ŵᵀ - x Wᵀ, written with minillm's own format and in float64."""
    format, scaled = Int(bits=4, group=group), weight * factors
    rounded = format.nearest(scaled, format.grid(scaled)).double() / factors.double()
    return x.double() @ (rounded - weight.double()).T


@exercise(
    "gptq-columns",
    minutes=20,
    difficulty=3,
    hints=(
        "A column is rounded as it has become by then, not as it was at the start. Which columns may still change "
        "after column j?",
        "Keep a copy `left`. For j in order: rounded = nearest(left[:, j], j), error = (left[:, j] - rounded) / U[j, "
        "j], and left[:, j + 1 :] -= error[:, None] * U[j, j + 1 :].",
    ),
)
def check_gptq(learner: Callable) -> Receipt:
    rows = []
    for outputs, inputs in ((4, 12), (2, 3), (random.randint(5, 9), random.randint(13, 30)), (3, 150)):
        rows += _judge_gptq(learner, outputs, inputs)
    return receipt("GPTQ, column by column", rows, open_rows=2)


def _judge_gptq(learner: Callable, outputs: int, inputs: int) -> list:
    weight = torch.randn(outputs, inputs, dtype=torch.float64)
    mix = torch.eye(inputs, dtype=torch.float64) + 0.5 * torch.randn(inputs, inputs, dtype=torch.float64)
    x = torch.randn(4 * inputs, inputs, dtype=torch.float64) @ mix
    gram = x.T @ x / len(x) + 0.02 * torch.eye(inputs, dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(gram), upper=True)
    step = 0.25 + torch.rand(inputs, dtype=torch.float64)
    asked: list[int] = []

    def nearest(column: Tensor, j: int) -> Tensor:
        asked.append(int(j))
        return torch.round(column / step[int(j)]) * step[int(j)]

    name = f"{outputs} x {inputs}"
    found = learner(weight, upper, nearest)
    fits = isinstance(found, Tensor) and found.shape == weight.shape and found.dtype == weight.dtype
    expect(fits, found, f"the rounded weights, {list(weight.shape)}, in the weights' dtype, {weight.dtype}", name)
    asked_for, told = [j for j, _ in groupby(asked)], list(range(inputs))  # the same column twice in a row is no harm
    if asked_for != told:
        said = f"{name}: you asked for the nearest values of columns {_short(asked_for)}, and all columns are rounded, "
        raise CheckFailed(f"{said}in order: {_short(told)}.")
    right = by_inverting(weight, gram, lambda column, j: torch.round(column / step[j]) * step[j])
    plain = torch.round(weight / step) * step
    if not float((found - right).abs().max()) <= 1e-6:
        wrong = ~((found - right).abs() <= 1e-6)  # NaN is wrong, too
        columns = wrong.any(0).nonzero().flatten().tolist()
        j, i = columns[0], int(wrong[:, columns[0]].int().argmax())
        said = f"{name}: in {_columns(columns)} your weights are not what the method gives: row {i} of column {j} is "
        said += f"{found[i, j]:.4f}, and it is {right[i, j]:.4f}."
        raise CheckFailed(said, evidence=found)
    on_grid = (found / step - torch.round(found / step)).abs().max() < 1e-6
    errors = [float(((rounded - weight) @ gram * (rounded - weight)).sum()) for rounded in (found, plain)]
    return [
        row(f"{name}: every weight is a value of its grid", True, bool(on_grid)),
        row("    equal to the method with H inverted anew for each column", True, True),
        row("    output error / that of rounding to nearest", None, errors[0] / errors[1]),
    ]


def by_inverting(weight: Tensor, gram: Tensor, nearest: Callable) -> Tensor:
    """GPTQ as its paper derives it (Frantar et al. 2022, equations 2 and 3), without Cholesky: the inverse of what is
    left of H, anew for every column."""
    left, rounded = weight.clone(), torch.empty_like(weight)
    for j in range(weight.shape[1]):
        inverse = torch.linalg.inv(gram[j:, j:])
        rounded[:, j] = nearest(left[:, j], j)
        left[:, j:] -= ((left[:, j] - rounded[:, j]) / inverse[0, 0])[:, None] * inverse[0]
    return rounded


def _columns(numbers: list[int]) -> str:
    return f"column{'s' if len(numbers) > 1 else ''} {_short(numbers)}"


def _short(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:6])) + (", ..." if len(numbers) > 6 else "")
