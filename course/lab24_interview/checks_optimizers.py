"""Whiteboard tasks on optimizers: a step of AdamW, Muon's orthogonalization.

AdamW is compared with torch's after every step; half-way param and state are copied, as by a checkpoint. Muon's
iteration is compared with what it does to singular values, computed from a decomposition, which the answer may not use.
"""

import copy
import random
import sys
from typing import Any

import torch
from torch import Tensor

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Row, row
from course.lab24_interview.checks_layers import unchanged
from course.shared.diagnose import expect_like, forbidding
from course.shared.new_tensors import NewTensors

STEPS = 6


@exercise(
    "adamw",
    changes=("param", "state"),
    minutes=15,
    difficulty=2,
    hints=(
        "Which three things must a tensor remember from step to step? The means begin at zero: what is the mean of t "
        "gradients that are all alike, and by what must it be divided to be that gradient?",
        "Keep step, m and v in state. m̂ = m / (1 - beta1^t), v̂ = v / (1 - beta2^t); multiply param by "
        "1 - lr · weight_decay first, then subtract lr · m̂ / (sqrt(v̂) + eps). All of it in place.",
    ),
)
def check_adamw(learner: Any) -> list[Row]:
    rows = []
    drawn = random.randint(2, 6), random.randint(3, 9)
    for shape, eps, decay, silent in (((3,), 1e-8, 0.1, False), (drawn, 0.1, 0.5, False), ((4,), 1e-8, 0.2, True)):
        betas = random.choice((0.8, 0.9)), random.choice((0.95, 0.99))
        # Two of one shape, each with its own state; a matrix is not contiguous.
        tensors = [torch.randn(shape[::-1], dtype=torch.float64).movedim(0, -1) for _ in range(2)]
        states: list[dict] = [{}, {}]
        theirs = [each.clone().requires_grad_() for each in tensors]
        torchs = [torch.optim.AdamW([each], lr=1.0, betas=betas, eps=eps, weight_decay=decay) for each in theirs]
        name = f"eps {eps:g}, weight decay {decay:g}" + (", gradients of zero" if silent else "")
        for number in range(STEPS):
            lr = 0.1 / (1 + number)  # a schedule: it also scales the decay
            if number == STEPS // 2:
                tensors, states = [each.clone() for each in tensors], copy.deepcopy(states)
                name += ", begun again with copies of param and state"
            for place, (param, state, reference, optimizer) in enumerate(
                zip(tensors, states, theirs, torchs, strict=True)
            ):
                grad = torch.randn(shape, dtype=torch.float64) * (not silent)
                reference.grad = grad.clone()
                optimizer.param_groups[0]["lr"] = lr
                optimizer.step()
                before, given, memory = param.clone(), grad.clone(), param.detach()
                with forbidding(_LIBRARY, "write the step yourself: this task is to be solved without torch.optim."):
                    learner(param, given, state, lr, betas, eps, decay)
                unchanged([given], [grad], ["grad"])
                which = f"{name}: tensor {place} after step {number + 1}"
                _same_step(memory, before, param, reference.detach(), which, rows)
        rows.append(row(f"{name}: {STEPS} steps of two tensors as torch.optim.AdamW", True, True))
    return rows


@exercise(
    "newton-schulz",
    minutes=15,
    difficulty=3,
    hints=(
        "With g = U S Vᵀ, what are A = X·Xᵀ and A·X in terms of U, S and V? Which of the two Gram matrices is small?",
        "Transpose g if it has more rows than columns, divide by the root of the sum of its squares, repeat the "
        "polynomial `steps` times, transpose back. Keep A: A·A is a product of it with itself.",
    ),
)
def check_newton_schulz(learner: Any) -> list[Row]:
    rows = []
    fewer, more = random.randint(5, 9), random.randint(10, 20)
    for shape, steps, scale in (
        ((4, 4), 1, 20),
        ((3, 7), 5, 20),
        ((48, 4), 5, 20),
        ((fewer, 3), 2, 20),
        ((3, 2), 4, 20),
        ((fewer, more), 3, 0.02),  # as small as gradients are
        ((more, fewer), 3, 0.02),
        ((1, 6), 3, 20),
    ):
        g = scale * torch.randn(shape, dtype=torch.float64)
        given = g.clone()
        said = "a decomposition is what this iteration avoids: use matrix products only."
        with forbidding(_DECOMPOSITIONS, said), NewTensors(given) as made:
            found = learner(given, steps)
        unchanged([given], [g], ["g"])
        name = f"{list(shape)}, norm {float(g.norm()):.2g}, {steps} iterations"
        expect_like("your function", found, g, f"a tensor {list(shape)}")
        if found.shape != g.shape:
            raise CheckFailed(f"{name}: your result has shape {list(found.shape)}; it must be {list(shape)}.", rows)
        if made.largest > g.numel():
            said = f"{name}: you made a matrix of {made.largest:,} numbers, larger than g with {g.numel():,}."
            raise CheckFailed(said, rows, evidence=made.largest)
        right = _by_singular_values(g, steps)
        if not torch.allclose(found, right, rtol=1e-4, atol=1e-4):
            values = torch.linalg.svdvals(found) if bool(found.isfinite().all()) else found.flatten()
            said = f"{name}: singular values of your result are {_shown(values)}; they must be "
            raise CheckFailed(f"{said}{_shown(torch.linalg.svdvals(right))}.", rows, evidence=found)
        rows.append(row(f"{name}: as the polynomial of each singular value", True, True))
    return rows


_LIBRARY = ((torch.optim.Optimizer, "__init__"), (sys.modules["torch.optim.adamw"], "adamw"))
_DECOMPOSITIONS = (
    *((torch.linalg, name) for name in ("svd", "svdvals", "eigh", "eig", "qr", "pinv")),
    *((torch, "svd"), (Tensor, "svd"), (Tensor, "numpy")),
)


def _same_step(memory: Tensor, before: Tensor, param: Tensor, right: Tensor, which: str, rows: list[Row]) -> None:
    """memory: what param's memory holds after the step; param may have other memory by then."""
    if torch.allclose(memory, right, rtol=1e-6, atol=1e-6):
        return
    if torch.equal(memory, before):
        raise CheckFailed(
            f"{which}: param holds what it held before: change it in place, with param.sub_(...). "
            "Setting param.data, or changing a reshaped copy, leaves its memory as it was.",
            rows,
            evidence=[which, torch.equal(param, memory)],
        )
    off = float((memory - right).abs().nan_to_num(torch.inf).max())
    raise CheckFailed(f"{which}: param differs from torch.optim.AdamW's by up to {off:.2g}.", rows, evidence=memory)


def _by_singular_values(g: Tensor, steps: int) -> Tensor:
    left, values, right = torch.linalg.svd(g, full_matrices=False)
    values = values / values.square().sum().sqrt()
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left * values @ right


def _shown(values: Tensor) -> str:
    return ", ".join(f"{float(value):.3g}" for value in values[:4]) + (", ..." if len(values) > 4 else "")
