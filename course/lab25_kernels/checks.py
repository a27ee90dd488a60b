"""Lab 25, kernels over numbers and rows: bias and ReLU, softmax, RMSNorm.

    checks_products.py   a product in tiles, what lies between products, a paged decode step
    checks_compile.py    one graph compiled once, a recorded step, which bug
    tried.py             a learner's kernel launched on a case and judged

A kernel runs in Triton's interpreter on inputs whose surroundings are NaN. Results are compared with float64, and the
bytes of each tensor with the formula.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from course.kit.answers import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt
from course.lab25_kernels.tried import DTYPES, Case, name_of, only_with_triton, shifted, two_kernels

ANSWERS = answers_of("25_kernels")


def check_bias_relu(learner: Callable) -> Receipt:
    rows = []
    cases = ((1, 1, 16), (64, 64, 16), (50, 7, 16), (random.randint(65, 200), None, random.choice((32, 64))))
    for n, width, block in cases:
        width = width or random.choice((n, random.randint(2, 30)))
        x, bias = 4 * torch.randn(n), torch.randn(width)
        if n == 1:  # of which a wrong sign would not say what went wrong
            x, bias = x.abs(), bias.abs()
        case = Case(f"{n} numbers, {width} biases, BLOCK {block}")
        y, grid = torch.full((n,), float("nan")), (-(-n // block),)
        seen = case.launch(learner, grid, x, bias, y, n, width, BLOCK=block)
        exact = torch.relu(x.double() + bias.double()[torch.arange(n) % width])
        case.compare("y", y, exact, 1e-6)
        case.shared_out(learner, grid, x, bias, y, n, width, tiles={"y": (block,)}, BLOCK=block)
        rows += case.bytes(seen, loaded={"x": 4 * n}, stored={"y": 4 * n}, at_most={"bias": 4 * n})
    return receipt("bias and ReLU in one kernel", rows)


def check_softmax(learner: Callable) -> Receipt:
    rows = []
    wide = 16 * random.randint(8, 18) + random.randint(1, 15)  # with a tail, whatever BLOCK is
    shapes = ((1, 1, 16), (3, 16, 16), (2, 49, 16), (4, wide, random.choice((16, 32))))
    for place, (count, width, block) in enumerate(shapes):
        dtype = (torch.float32, torch.float32, random.choice(DTYPES[::2]), torch.float16)[place]
        x = shifted(4 * torch.randn(count, width), dtype, gap=place and random.randint(1, 5))
        if width > block:
            x[0, :block] = float("-inf")
            x[-1] = 12 * x[-1] + 60  # exp of some would be infinite
        if count > 3:
            x[0] /= 4  # no result is too small for a rounding to show
            x[1] -= 300  # exp of all would be 0
            x[2, :block], x[2, block:] = 0, -7.7  # terms that float16 cannot add to 1, and that add up to much
        case = Case(f"{count} rows of {width}, BLOCK {block}, {name_of(dtype)}")
        y = torch.full((count, width), float("nan"), dtype=dtype)
        seen = case.launch(learner, (count,), x, y, x.stride(0), width, BLOCK=block)
        # In float32 an exponent in the hundreds is rounded in its fifth digit.
        case.compare("y", y, torch.softmax(x.double(), 1), 4e-5 if dtype is torch.float32 else None)
        size = x.element_size() * x.numel()
        if seen.loaded.get("x", 0) > 2 * size:
            times = seen.loaded["x"] / size
            raise CheckFailed(f"{case.name}: x is read {times:.3g} times; twice is enough, if the sum is kept as the "
                              "maximum rises", evidence=times)  # fmt: skip
        rows += case.bytes(seen, stored={"y": size}, at_most={"x": 2 * size})
        case.tile(seen, block)
        if place == 1:
            case.shared_out(learner, (count,), x, y, x.stride(0), width, tiles={"y": (1,)}, BLOCK=block)
    return receipt("softmax of rows in tiles", rows)


def check_rms_norm(learner: Any) -> Receipt:
    forward, backward = two_kernels(learner, "norm_forward, norm_backward")
    rows = []
    shapes = ((1, 1, 1), (4, 16, 2), (7, 41, 2), (random.randint(4, 9), random.randint(17, 60), random.randint(2, 4)))
    for place, (count, width, each) in enumerate(shapes):
        dtype = (torch.float32, torch.float32, torch.float16, random.choice(DTYPES))[place]
        x, dy = (torch.randn(count, width).mul(1 + place).to(dtype) for _ in range(2))
        weight, eps = torch.rand(width).add(0.5).to(dtype), 1e-6 if place == 1 else random.uniform(0.05, 0.2)
        block = 1 << (width - 1).bit_length()
        case = Case(f"{count} rows of {width}, {name_of(dtype)}")
        y, r = torch.full((count, width), float("nan"), dtype=dtype), torch.full((count,), float("nan"))
        seen = case.launch(forward, (count,), x, weight, y, r, width, eps, BLOCK=block)
        exact_x, exact_weight = (each_.double().requires_grad_() for each_ in (x, weight))
        exact_r = 1 / (exact_x.square().mean(1) + eps).sqrt()
        exact = exact_x * exact_r[:, None] * exact_weight
        case.compare("y", y, exact.detach())
        case.compare("r", r, exact_r.detach(), 1e-5)
        size = x.element_size() * x.numel()
        rows += case.bytes(seen, loaded={"x": size}, stored={"y": size, "r": 4 * count},
                           at_most={"weight": weight.element_size() * x.numel()})  # fmt: skip
        if place == 1:
            case.shared_out(forward, (count,), x, weight, y, r, width, eps, tiles={"y": (1,), "r": (1,)}, BLOCK=block)
        case = Case(f"{count} rows of {width}, {each} to a program, backward")
        programs = -(-count // each)
        dx = torch.full((count, width), float("nan"), dtype=dtype)
        partial = torch.full((programs, width), float("nan"))
        exact.backward(dy.double())
        r = exact_r.detach().float()
        given = backward, (programs,), dy, x, weight, r, dx, partial, count, width
        seen = case.launch(*given, ROWS=each, BLOCK=block)
        scale = float(
            (exact_r.detach()[:, None] * dy.double() * weight.double()).abs().max()
        )  # of the two terms that cancel
        case.compare("dx", dx, exact_x.grad, scale=scale)
        case.compare("partial", partial, _by_program(dy, x, r, each), 1e-4, scale=float(partial.abs().max()))
        rows += case.bytes(seen, loaded={"x": size, "dy": size}, stored={"dx": size, "partial": 4 * partial.numel()},
                           at_most={"weight": weight.element_size() * x.numel()})  # fmt: skip
        if place == 1:
            case.shared_out(*given, tiles={"dx": (each,), "partial": (1,)}, ROWS=each, BLOCK=block)
    return receipt("RMSNorm, forward and backward", rows)


def _by_program(dy: Tensor, x: Tensor, r: Tensor, each: int) -> Tensor:
    """[programs, width]: the sums of dy · x̂ over the rows of each program."""
    products = dy.double() * x.double() * r.double()[:, None]
    return torch.stack([part.sum(0) for part in products.split(each)])


only_with_triton(
    exercise(
        "bias-relu",
        minutes=15,
        difficulty=1,
        hints=(
            "Which numbers does program p compute, and what must the last program leave out?",
            "place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), inside = place < n: mask both loads and the "
            "store. The bias of number i is at i % width.",
        ),
    ),
    check_bias_relu,
)
only_with_triton(
    exercise(
        "softmax-rows",
        minutes=20,
        difficulty=3,
        hints=(
            "What does a sum of exp(value - old maximum) have to be multiplied by when the maximum becomes higher? And "
            "what is -inf - (-inf)?",
            "Keep a maximum and a sum, of the row or for each lane. Per tile: higher = maximum(old, tile), sum = sum "
            "· exp(old - higher) + exp(tile - higher), with 0 in place of a maximum that is still -inf. Then a second "
            "loop.",
        ),
    ),
    check_softmax,
)
only_with_triton(
    exercise(
        "norm-kernels",
        minutes=30,
        difficulty=3,
        hints=(
            "A row fits into one tile here. Which numbers of a masked lane enter a sum, and which row does the last "
            "program have too many?",
            "Forward: r = 1 / sqrt(sum(x²) / width + eps). Backward: loop over ROWS, mask rows from `rows` on, add dy "
            "· x · r to a tile [BLOCK] and store that once, to row p of partial.",
        ),
    ),
    check_rms_norm,
)
