"""Lab 08, on one rank: which pairs a full expert drops, and the loss that keeps experts from filling up."""

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.shared.diagnose import expect_number, expect_tensor
from minillm.predict.training import moe

# Capacity.


@exercise(
    "capacity-drops",
    minutes=10,
    difficulty=3,
    hints=(
        "For each pair: how many pairs before it, in the order in which places are given away, chose the same expert?",
        "One-hot of the flattened pairs, a running sum along them, and at each pair the column of its own expert: its "
        "place in that expert's queue, counted from 1.",
    ),
)
def check_capacity(learner: Callable) -> Receipt:
    rows = []
    for tokens, num_experts, k, factor in (
        (16, 4, 1, 1.0),
        (random.randint(9, 60), 4, 2, 1.0),
        (30, 5, 3, 0.75),
        (6, 3, 2, 4.0),
        (5, 4, 2, 0.0),
        (4200, 2, 1, 1.4012),  # 2,943 places, which 16-bit floats round up and bytes cannot count
    ):
        experts = (torch.rand(tokens, num_experts) * torch.linspace(1, 2, num_experts)).argsort(1)[:, -k:]
        capacity = moe.capacity(tokens, k, num_experts, factor) if factor else 0
        found = learner(experts, num_experts, capacity)
        name = f"{tokens} tokens, top {k} of {num_experts}, {capacity} places each"
        expect_tensor(f"{name}: what you returned", found, experts.shape)
        if found.dtype.is_floating_point or found.dtype == torch.bool:
            raise CheckFailed(
                f"you returned {found.dtype}; the exercise asks for numbers of experts, and -1 where one is full"
            )
        if found.dtype != experts.dtype:
            raise CheckFailed(f"{name}: you returned {found.dtype} for experts of {experts.dtype}: keep their dtype")
        right = _dropped(experts.tolist(), num_experts, capacity)
        if found.tolist() != right:
            raise CheckFailed(_say_drops(name, experts, found.tolist(), right), evidence=found.tolist())
        loads = torch.bincount(experts.flatten(), minlength=num_experts).tolist()
        due = round(moe.dropped_share(loads, capacity) * tokens * k)
        rows.append(row(f"{name}: pairs dropped", due, int((found < 0).sum())))
    return receipt("what does not fit is dropped", rows)


def _dropped(experts: list[list[int]], num_experts: int, capacity: int) -> list[list[int]]:
    room = [capacity] * num_experts
    kept = []
    for token in experts:
        kept.append([])
        for expert in token:
            kept[-1].append(expert if room[expert] > 0 else -1)
            room[expert] -= 1
    return kept


def _say_drops(name: str, experts: Tensor, found: list, right: list) -> str:
    for token, (mine, wanted) in enumerate(zip(found, right, strict=True)):
        if mine != wanted:
            chosen = experts[token].tolist()
            return f"{name}: token {token} chose experts {chosen}; {mine} are left of them, but {wanted} should be"
    return f"{name}: wrong"


# The balance loss.


@exercise(
    "balance-loss",
    minutes=15,
    difficulty=4,
    hints=(
        "f comes from counting and has no gradient. So the loss is linear in the probabilities: what is its "
        "derivative with respect to p of token t and expert e?",
        "It is E · f_e / tokens, the same for all tokens. Through each token's softmax: p_e · (g_e - Σ_j p_j g_j).",
    ),
)
def check_balance(learner: Callable) -> Receipt:
    worst, rows = 0.0, []
    for tokens, num_experts, k, routing in (
        (random.randint(5, 30), 5, 2, "random"),
        (6, 3, 1, "random"),
        (4, 4, 2, "first experts"),
    ):
        logits = torch.randn(tokens, num_experts, dtype=torch.float64)
        if routing == "random":
            logits += torch.randn(num_experts, dtype=torch.float64)
            experts = (logits + 0.5 * torch.randn_like(logits)).argsort(1, descending=True)[:, :k]
        else:
            experts = torch.arange(k).expand(tokens, k).clone()
        name = f"{tokens} tokens, top {k} of {num_experts}"
        found = learner(logits.softmax(1), experts.clone())
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            raise CheckFailed(f"you returned {type(found).__name__}; the exercise asks for the loss and its gradient")
        loss, gradient = expect_number(found[0], "the loss, one number"), found[1]
        right = _enumerated(logits.tolist(), experts.tolist())
        if abs(loss - right) > 1e-6:
            raise CheckFailed(f"{name}: the loss is {right:.6f}, you found {loss:.6f}", evidence=loss)
        wanted = _differences(logits, experts)
        expect_tensor(f"{name}: the gradient", gradient, logits.shape)
        off = (gradient.detach() - wanted).abs().max().item()
        if not off < 1e-6:
            raise CheckFailed(
                f"{name}: the loss is right, its gradient is off by {off:.3g}", evidence=gradient.detach()
            )
        worst = max(worst, off)
        rows.append(row(f"{name}, {routing}: loss by enumeration", right, loss, tolerance=1e-6))
    rows.append(row("gradient: differs from finite differences by less than 1e-6", True, worst < 1e-6))
    return receipt("the balance loss and its gradient", rows)


def _enumerated(logits: list[list[float]], experts: list[list[int]]) -> float:
    """The loss by loops over tokens and experts."""
    tokens, num_experts = len(logits), len(logits[0])
    pairs = [expert for token in experts for expert in token]
    loss = 0.0
    for expert in range(num_experts):
        share = pairs.count(expert) / len(pairs)
        mean = sum(math.exp(t[expert]) / sum(map(math.exp, t)) for t in logits) / tokens
        loss += num_experts * share * mean
    return loss


def _differences(logits: Tensor, experts: Tensor, step: float = 1e-4) -> Tensor:
    """Central differences of the enumerated loss, one logit at a time, in float64; the choice stays as it is."""
    right = torch.zeros_like(logits)
    for token in range(len(logits)):
        for expert in range(logits.shape[1]):
            sides = []
            for move in (step, -step, 2 * step, -2 * step):
                moved = logits.clone()
                moved[token, expert] += move
                sides.append(_enumerated(moved.tolist(), experts.tolist()))
            near, far = sides[0] - sides[1], sides[2] - sides[3]
            right[token, expert] = (8 * near - far) / (12 * step)
    return right
