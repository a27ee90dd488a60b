"""Whiteboard tasks on the parts of a transformer layer: a norm with its backward pass, rotary embedding.

Both are compared with 64-bit computations that go another way: autograd for the norm, complex numbers for rotary
embedding. 16-bit inputs must come out rounded once, so that no statistic and no angle was computed in 16 bits: half of
the last digit, and what 32 bits leave.
"""

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Row, row
from course.shared.diagnose import expect_like, expect_list, forbidding


@exercise(
    "rms-norm",
    minutes=15,
    difficulty=3,
    hints=(
        "One number of a token alters the divisor of all its numbers. Which direction of dx does that take away?",
        "With r = 1 / sqrt(mean(x²) + eps), n = x · r and s = dy · weight: dx = r · (s - n · mean(s · n)), and dweight "
        "is the sum of dy · n over all tokens.",
    ),
)
def check_rms_norm(learner: Any) -> list[Row]:
    rows = []
    wide, brain, half = torch.float32, torch.bfloat16, torch.float16
    for shape, scale, eps, dtype, of_weight in (
        ((5, 16), 1.0, 1e-5, wide, wide),
        ((random.randint(2, 4), 3, 24), 1e-3, 1e-5, wide, wide),  # squares as small as eps
        ((2, 3, 2, 8), 3.0, 0.5, wide, wide),
        ((7, 256), 1.0, 1e-6, brain, brain),
        ((7, 256), 1.0, 1e-6, brain, wide),
        ((3, 64), 600.0, 1e-6, half, half),  # squares beyond the largest float16
    ):
        x, dy = ((scale * (torch.randn(shape) + 0.5)).to(dtype), torch.randn(shape).to(dtype))
        weight = torch.randn(shape[-1]).to(of_weight)
        weight[0] = 0
        given = [each.clone() for each in (x, weight, dy)]
        no_autograd = forbidding(_AUTOGRAD, "this task is to be solved without autograd: derive the gradient.")
        with no_autograd, forbidding(_NORMS, "this task is to be solved without a library's norm."):
            found = expect_list(learner(*given, eps), "three tensors, (y, dx, dweight)", count=3)
        name = f"{list(shape)} in {_name(dtype)}, weight in {_name(of_weight)}"
        unchanged(given, (x, weight, dy), ("x", "weight", "dy"))
        for what, right, answered in zip(("y", "dx", "dweight"), _by_autograd(x, weight, dy, eps), found, strict=True):
            of = of_weight if what == "dweight" else dtype
            expect_like("your function", answered, right.to(of), f"{what} of shape {list(right.shape)}")
            _compare(answered, right, f"{name}: your {what}", rows)
        rows.append(row(f"{name}: y, dx and dweight as autograd in 64 bits", True, True))
    return rows


@exercise(
    "rotary",
    minutes=15,
    difficulty=3,
    hints=(
        "Write the two channels of every pair as two tensors of head_dim/2 channels. What does the rotation do to "
        "them, and how do they get back to their places?",
        "angles = positions[:, None, None] · base^(-2i/head_dim) broadcasts over the heads. Interleaved: x[..., 0::2] "
        "and x[..., 1::2], put back by stack and flatten; otherwise the two halves, put back by cat.",
    ),
)
def check_rotary(learner: Any) -> list[Row]:
    rows = []
    for tokens, heads, dim, base, last, dtype in (
        (4, 1, 2, 10_000.0, 4, torch.float32),  # one pair: both layouts are the same
        (6, 3, 16, 10_000.0, 40, torch.float32),
        (random.randint(3, 9), 2, 16, 500_000.0, 3000, torch.float32),
        (5, 2, 16, 10_000.0, 10_007, torch.float32),  # as two before, but beyond every table made so far
        (64, 2, 64, 500_000.0, 301, torch.bfloat16),
        (7, 2, 64, 10_000.0, 301, torch.float16),
    ):
        for interleaved in (False, True):
            positions = torch.tensor(random.sample(range(last), tokens))
            positions[-1] = last
            x = torch.randn(tokens, heads, dim).to(dtype)
            given = [x.clone(), positions.clone()]
            found = learner(*given, base, interleaved)
            unchanged(given, (x, positions), ("x", "positions"))
            right = _by_complex(x, positions, base, interleaved)
            name = f"head_dim {dim}, interleaved={interleaved}, positions up to {last:,}, {_name(dtype)}"
            expect_like("your function", found, x, f"a tensor {list(x.shape)} of {_name(dtype)}")
            least = 2**-21 * last * float(x.abs().max())  # an angle and its frequency have 24 bits each
            _compare(found, right, f"{name}: your result", rows, least)
            rows.append(row(f"{name}: as complex numbers in 64 bits", True, True))
    return rows


def unchanged(given: Sequence[Tensor], before: Sequence[Tensor], names: Sequence[str]) -> None:
    """CheckFailed if an argument is not what it was."""
    for now, then, name in zip(given, before, names, strict=True):
        if not torch.equal(now, then):
            raise CheckFailed(f"your function changed {name}, which belongs to the caller.", evidence=now)


_AUTOGRAD = (
    *((torch.autograd, "grad"), (torch.autograd, "backward"), (Tensor, "backward")),
    *((torch.func, "grad"), (torch.func, "vjp")),
)
_NORMS = ((F, "rms_norm"), (torch, "rms_norm"), (F, "layer_norm"), (torch, "layer_norm"))


def _by_autograd(x: Tensor, weight: Tensor, dy: Tensor, eps: float) -> list[Tensor]:
    """y, dx and dweight in 64 bits; the gradients are autograd's."""
    x, weight = (each.double().requires_grad_() for each in (x, weight))
    y = x / (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt() * weight
    return [y.detach(), *torch.autograd.grad(y, (x, weight), dy.double())]


def _by_complex(x: Tensor, positions: Tensor, base: float, interleaved: bool) -> Tensor:
    """In 64 bits: a pair as one complex number, times exp(i · angle)."""
    half = x.shape[-1] // 2
    angles = torch.stack([positions.double() * base ** (-2 * i / x.shape[-1]) for i in range(half)], -1)[:, None]
    pairs = x.double().unflatten(-1, (half, 2) if interleaved else (2, half))
    first, second = pairs.unbind(-1 if interleaved else -2)
    turned = torch.view_as_real(torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles))
    return (turned if interleaved else turned.mT).flatten(-2)


def _compare(found: Tensor, right: Tensor, whose: str, rows: list[Row], least: float = 0.0) -> None:
    """CheckFailed unless it is right within the digits of its dtype. least: difference that passes in any case."""
    if found.shape != right.shape:
        raise CheckFailed(f"{whose} has shape {list(found.shape)}, it must be {list(right.shape)}.", rows)
    share = max(1e-4, torch.finfo(found.dtype).eps / 2 * 1.05)
    allowed = share * right.abs() + max(least, 1e-5 * float(right.abs().max()))
    off = (found.double() - right).abs()
    if not bool((off <= allowed).all()):  # so that NaN is no match
        largest = float(off.nan_to_num(torch.inf).max())
        said = f"{whose} differs from the one in 64 bits by up to {largest:.2g}, in values up to "
        raise CheckFailed(f"{said}{float(right.abs().max()):.2g}.", rows, evidence=found)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
