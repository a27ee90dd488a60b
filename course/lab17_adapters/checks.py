"""Lab 17, one adapter: the layer, and its sum with the weight.

checks_backward.py   gradients through codes, and which gradients ranks add up
checks_batch.py      many adapters in one batch, and what the keys of their blocks begin with
checks_breaks.py     which program has which bug
"""

import random
from typing import Any

import torch
from torch import Tensor, nn

from course.kit.answers import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.shared.diagnose import expect, expect_tensor
from course.shared.measuring import count_flops

ANSWERS = answers_of("17_adapters")


# The layer.


@exercise(
    "lora-layer",
    minutes=15,
    difficulty=2,
    hints=(
        "Which of A and B may be zero at the start, so that the first output is the base's and something still learns?",
        "Freeze the base (requires_grad_(False)), keep it as self.base. A: uniform within 1 / √in, B: zeros, both "
        "nn.Parameter in the base's dtype. The update is two thin products, (x @ A.T) @ B.T, times alpha / rank.",
    ),
)
def check_layer(learner: Any) -> Receipt:
    if not (isinstance(learner, type) and issubclass(learner, nn.Module)):
        raise CheckFailed("the exercise asks for the class LoRA, a torch.nn.Module")
    cases = [(48, 6, 4, 8.0, False, torch.float32), (5, 9, 3, 3.0, True, torch.float64)]
    cases.append((12, 7, 2, 3.0, True, torch.bfloat16))
    inputs, outputs = random.sample(range(20, 60), 2)
    cases.append((inputs, outputs, random.randint(4, 7), random.uniform(10, 40), True, torch.float32))
    rows = []
    for inputs, outputs, rank, alpha, has_bias, dtype in cases:
        base = nn.Linear(inputs, outputs, bias=has_bias, dtype=dtype)
        name = f"{outputs} x {inputs}, rank {rank}, alpha {alpha:.3g}"
        rows += _judge_layer(learner, base, rank, alpha, name)
    return receipt("one layer and its adapter", rows, open_rows=3)


def _judge_layer(make: type, base: nn.Linear, rank: int, alpha: float, name: str) -> list:
    layer = make(base, rank, alpha)
    make(nn.Linear(2, 2), 1, 2 * alpha)  # another one beside it, which shares nothing
    outputs, inputs = base.weight.shape
    _judge_parameters(layer, base, rank, name)
    x = torch.randn(2, 3, inputs, dtype=base.weight.dtype, requires_grad=True)
    first = layer(x)
    expect_tensor(f"{name}: the output", first, (2, 3, outputs))
    with torch.no_grad():
        plain = base(x)
    if not close(first.detach(), plain):
        off = float((first.detach() - plain).norm() / plain.norm())
        raise CheckFailed(
            f"{name}: before any training the output is {off:.0%} away from the base's. Training has to begin at the "
            "base: with B = 0 the update is 0"
        )
    if not layer.A.abs().max() > 0:
        raise CheckFailed(
            f"{name}: A is zero, and so is B: each one's gradient is multiplied by the other, so neither ever learns"
        )
    if layer.A.dtype.itemsize > 2:  # in 16 bits few numbers are different
        _judge_start(layer.A, name)
    with torch.no_grad():
        layer.B.copy_(torch.randn_like(layer.B))
    dy = torch.randn_like(plain)
    flops = count_flops(lambda: layer(x))
    found = layer(x)
    expect(found.dtype == x.dtype, found.dtype, f"an output in {x.dtype}, as x and the layer are", name)
    found.backward(dy)
    a, b, weight = (each.detach().double() for each in (layer.A, layer.B, base.weight))
    update = (x.detach().double() @ a.T) @ b.T
    right = plain + alpha / rank * update
    if not close(found.detach(), right):
        share = float(((found.detach() - plain) * update).sum() / update.square().sum())
        said = f"{name}: the adapter adds {share:.4g} · (x Aᵀ) Bᵀ, and alpha / rank is {alpha / rank:.4g}"
        if (found.detach() - right).norm() < 1e-4 * right.norm():
            said = f"{name}: the output has fewer digits than {x.dtype}: compute the update in the base's dtype"
        raise CheckFailed(said, evidence=found.detach())
    rows_, gradients = x.detach().double().reshape(-1, inputs), dy.double().reshape(-1, outputs)
    for what, gradient, wanted in (
        ("A", layer.A.grad, alpha / rank * (gradients @ b).T @ rows_),
        ("B", layer.B.grad, alpha / rank * gradients.T @ (rows_ @ a.T)),
        ("x", x.grad, gradients @ (weight + alpha / rank * b @ a)),
    ):
        if gradient is None or not close(gradient.reshape(wanted.shape), wanted):
            raise CheckFailed(f"{name}: the gradient of {what} is not that of the output: is something detached?")
    work = 2 * 6 * (inputs * outputs + rank * (inputs + outputs))
    if flops != work:
        built = 2 * rank * inputs * outputs
        said = f"{name}: forward takes {flops:,} FLOPs; the layer and two thin products take {work:,}"
        more = f". B A alone, [out, in], takes {built:,}: apply A first, then B" if flops > work else ""
        raise CheckFailed(said + more, evidence=flops)
    _judge_shapes(layer, base, alpha / rank * b @ a, name)
    numbers = sum(p.numel() for p in layer.parameters() if p.requires_grad)
    return [
        row(f"{name}: numbers that are trained, r (in + out)", rank * (inputs + outputs), numbers),
        row("    forward, FLOPs", work, flops),
    ]


def _judge_shapes(layer: nn.Module, base: nn.Linear, update: Tensor, name: str) -> None:
    for leading in ((), (4,), (2, 1, 3)):
        x = torch.randn(*leading, base.in_features, dtype=base.weight.dtype)
        who = f"{name}: x of shape {tuple(x.shape)}"
        try:
            with torch.no_grad():
                found, plain = layer(x), base(x)
        except (RuntimeError, ValueError, IndexError) as error:
            said = f"{who} stops it ({error}): x is [..., in], with any number of dimensions before the last"
            raise CheckFailed(said) from error
        expect_tensor(f"{who}: the output", found, plain.shape)
        if not close(found, plain + x.double() @ update.T):
            raise CheckFailed(f"{who}: the output is not base(x) + alpha / rank · (x Aᵀ) Bᵀ, as it is for [2, 3, in]")


def close(found: Tensor, right: Tensor) -> bool:
    """Within what rounding and another order of summation explain in the dtype of `found`, all numbers together."""
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5}.get(found.dtype, 0.03)
    return bool((found - right).norm() <= tolerance * right.norm())


def _judge_parameters(layer: nn.Module, base: nn.Linear, rank: int, name: str) -> None:
    outputs, inputs = base.weight.shape
    for which, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
        matrix = getattr(layer, which, None)
        if not isinstance(matrix, nn.Parameter):
            raise CheckFailed(f"{name}: self.{which} is no nn.Parameter, so no optimizer finds it")
        expect_tensor(f"{name}: {which}", matrix, shape)
        if matrix.dtype != base.weight.dtype:
            raise CheckFailed(f"{name}: {which} is {matrix.dtype}, and the base {base.weight.dtype}: use the base's")
        if not matrix.requires_grad:
            raise CheckFailed(f"{name}: {which} has requires_grad=False: nothing is left to train")
    if not any(parameter is base.weight for parameter in layer.parameters()):
        raise CheckFailed(f"{name}: the layer does not hold the base's own weight: a copy takes its memory twice")
    trained = [key for key, parameter in layer.named_parameters() if parameter.requires_grad and key not in ("A", "B")]
    if trained:
        raise CheckFailed(f"{name}: {', '.join(trained)} would be trained as well: only A and B are, freeze the base")


def _judge_start(a: Tensor, name: str) -> None:
    bound = a.shape[1] ** -0.5
    largest, mean = float(a.detach().abs().max()), float(a.detach().abs().mean())
    is_even = a.numel() < 60 or abs(float(a.detach().mean())) < 0.35 * bound
    least = bound * (0.38 if a.numel() >= 150 else 0.25)  # of few numbers the mean is uncertain
    if largest > bound * 1.0001 or mean < least or len(a.unique()) < a.numel() / 2 or not is_even:
        raise CheckFailed(
            f"{name}: |A| is {mean:.3g} on average and at most {largest:.3g}; uniform within 1 / √in = {bound:.3g} it "
            f"is {bound / 2:.3g} on average, and as often below 0 as above"
        )


# Merging.


@exercise(
    "merge",
    minutes=10,
    difficulty=2,
    hints=(
        "Which matrix gives the same outputs as W x + alpha/r · B (A x)? And in which precision do you add it?",
        "(W.float() + alpha / r · B.float() @ A.float()).to(W.dtype): products and sum in float32, one rounding at the "
        "end. Taking it out again is the same with a minus.",
    ),
)
def check_merge(learner: Any) -> Receipt:
    if not (isinstance(learner, tuple) and len(learner) == 2 and all(map(callable, learner))):
        raise CheckFailed("the exercise asks for two functions: (merged, unmerged)")
    merged, unmerged = learner
    rows = []
    cases = ((6, 6, 2, torch.float32), (24, 40, 4, torch.bfloat16))
    for outputs, inputs, rank, dtype in (*cases, (*random.sample(range(30, 70), 2), 8, torch.float16)):
        weight = torch.randn(outputs, inputs).to(dtype)
        a, b = torch.randn(rank, inputs).to(dtype), torch.randn(outputs, rank).to(dtype)
        alpha = rank * random.choice((0.75, 1.5, 3.0))  # neither alpha nor alpha / rank is 1
        kind = str(dtype).removeprefix("torch.")
        name = f"{outputs} x {inputs}, rank {rank}, {kind}"
        update = alpha / rank * (b.double() @ a.double())
        sums = {1: merged(weight, a, b, alpha), -1: unmerged(weight, a, b, alpha)}
        for sign, found in sums.items():
            who = f"{name}: {'merged' if sign > 0 else 'unmerged'}"
            expect_tensor(f"{who}: the result", found, weight.shape)
            expect(found.dtype == dtype, found.dtype, f"a weight in {kind}, as W is", who)
            exact = weight.double() + sign * update
            _judge_sum(found, exact, weight, sign * update, who)
        back = unmerged(sums[1], a, b, alpha)
        same = float((back == weight).float().mean())
        worst = float(_steps(sums[1], weight.double() + update).max())
        if dtype != torch.float32:  # in float32 the product's own rounding is as large
            rows.append(row(f"{name}: largest error, in steps: at most 1/2", True, worst <= 0.51))
        rows.append(row(f"{name}: unmerged again, weights as they were, bit for bit, %", None, 100 * same))
    return receipt("W + alpha/r · B A, and back", rows, open_rows=4)


def _steps(found: Tensor, exact: Tensor) -> Tensor:
    """Distance in steps of the dtype at each value."""
    size = exact.abs().clamp_min(float(exact.abs().mean()) / 16)  # near 0 digits were lost before the sum was rounded
    step = torch.finfo(found.dtype).eps * 2.0 ** torch.floor(torch.log2(size))
    return (found.double() - exact).abs() / step


def _judge_sum(found: Tensor, exact: Tensor, weight: Tensor, update: Tensor, who: str) -> None:
    slack = 4.0 if found.dtype == torch.float32 else 0.75  # a sum near 0 of large numbers has lost digits already
    off = (found.double() - exact).abs() / exact.abs().clamp_min(float(exact.abs().mean()) / 4)
    worst = float(off.max()) / torch.finfo(found.dtype).eps
    if not worst <= 100 * slack:  # NaN, too
        share = float(((found.double() - weight.double()) * update).sum() / update.square().sum())
        said = (
            f"{who}: it adds {share:.3g} times alpha/r · B A, and ±1 is asked for: unmerged takes out what merged adds"
        )
        raise CheckFailed(said, evidence=found)
    nearest = (found == exact.to(found.dtype)).float().mean()
    if found.dtype != torch.float32 and nearest < 0.98:
        said = f"{who}: {1 - nearest:.0%} of the weights are not the nearest to the exact sum"
        raise CheckFailed(f"{said}: compute product and sum in float32, and round once", evidence=found)
