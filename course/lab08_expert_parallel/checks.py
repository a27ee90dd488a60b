"""Lab 08, expert parallelism: routers, permutations, capacity and the balance loss.

checks.py          on one rank: values against enumeration in float64, token by token and expert by expert
checks_ranks.py    on several: tokens to experts and back, and which ranks average which gradient
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.shared.diagnose import expect_tensor, expect_whole


@exercise(
    "top-k-router",
    minutes=10,
    difficulty=2,
    hints=(
        "Two different numbers per expert: what ranks it, and what its answer is multiplied by. Only the first one "
        "sees the bias.",
        "Softmax over all experts in float32. Rank by score + bias, gather the scores of the chosen ones, divide by "
        "their sum. torch.topk promises nothing about ties; a stable sort does.",
    ),
)
def check_router(learner: Callable) -> Receipt:
    worst = tokens = 0
    for what, logits, k, bias in _routings():
        leaf = logits.clone().requires_grad_()
        found = learner(leaf, k, None if bias is None else bias.clone())
        worst = max(worst, _judge_router(what, found, _routed(logits, k, bias)))
        _judge_learning(what, leaf, *found)
        tokens += len(logits)
    return receipt(
        "tokens and their experts",
        [
            row("largest difference of a weight from sorting by hand (below 1e-5)", True, worst < 1e-5),
            row("    tokens, with ties, with a bias and from 16-bit logits", None, tokens),
        ],
    )


def _routings() -> list[tuple[str, Tensor, int, Tensor | None]]:
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    even = torch.randint(0, 2, (6, 40)).double()  # so many ties that an unstable sort mixes them up
    even[0] = 0
    odd = (torch.arange(40) % 2).double() / 4  # with a bias, too
    nearly = torch.zeros(2, 256).double()
    nearly[:, 200] = 3e-5  # 1e-7 of a score: still 500 of float32's steps
    climbing, zeros = torch.arange(64).double().expand(2, 64), torch.zeros(3, 8)
    return [
        ("top 2 of 5", 2 * draw(random.randint(4, 60), 5), 2, None),
        ("top 1 of 3", draw(4, 3), 1, None),
        ("top 2 of 6 with a bias", draw(40, 6), 2, 0.6 * draw(6)),
        ("top 3 of 40, scores that tie", even, 3, None),
        ("top 3 of 40, scores that tie, with a bias", even, 3, odd),
        ("top 1 of 256, one a little higher", nearly, 1, None),
        ("top 2 of 5, logits of hundreds", 800 + (128 * draw(6, 5)).round() / 64, 2, None),  # float32 has them exactly
        ("top 2 of 8, bfloat16 logits", (0.5 * draw(16, 8)).bfloat16(), 2, None),
        ("top 2 of 7, float16 logits", (0.5 * draw(16, 7)).half(), 2, 0.1 * draw(7)),
        # One step of a 16-bit logit, or of this bias, is lost in a 16-bit score.
        ("top 4 of 64, bfloat16 logits in a row", (0.5 + climbing / 256).bfloat16(), 4, None),
        ("top 4 of 64, float16 logits in a row", (0.5 + climbing / 2048).half(), 4, torch.zeros(64)),
        ("top 3 of 8, bfloat16 logits, biases in a row", zeros.bfloat16(), 3, 0.5 + torch.arange(8).double() / 1000),
    ]


def _routed(logits: Tensor, k: int, bias: Tensor | None) -> tuple[list[list[int]], list[list[float]], list[list]]:
    """(experts, weights, what they were ranked by), token by token in Python's own numbers."""
    shift = [0.0] * logits.shape[1] if bias is None else bias.tolist()
    experts, weights, ranked_by = [], [], []
    for token in logits.double().tolist():
        exponentials = [math.exp(each - max(token)) for each in token]
        scores = [each / sum(exponentials) for each in exponentials]
        ranked = [score + more for score, more in zip(scores, shift, strict=True)]
        chosen = sorted(range(len(token)), key=lambda expert: (-ranked[expert], expert))[:k]
        total = sum(scores[expert] for expert in chosen)
        experts.append(chosen)
        weights.append([scores[expert] / total for expert in chosen])
        ranked_by.append(ranked)
    return experts, weights, ranked_by


def _judge_router(what: str, found: Any, right: tuple) -> float:
    experts, weights, ranked = right
    chosen, shares = expect_pair(what, found, ("experts", "weights"), [len(experts), len(experts[0])])
    if chosen.dtype.is_floating_point:
        raise CheckFailed(f"{what}: the experts are {chosen.dtype}; first their numbers, then their weights")
    chosen, evidence = chosen.tolist(), [chosen.tolist(), shares.detach().tolist()]
    for token, (mine, wanted) in enumerate(zip(chosen, experts, strict=True)):
        if mine == wanted:
            continue
        by = [ranked[token][expert] if expert in range(len(ranked[token])) else None for expert in mine]
        if by == [ranked[token][expert] for expert in wanted]:
            raise CheckFailed(
                f"{what}: token {token} goes to experts {mine}, a tie with {wanted}. Ties go to the smaller number, in "
                "every copy of the router alike; torch.topk promises no order"
            )
        raise CheckFailed(f"{what}: token {token} goes to experts {mine} instead of {wanted}", evidence=evidence)
    if shares.dtype not in (torch.float32, torch.float64):
        raise CheckFailed(f"{what}: weights are {shares.dtype}; compute scores in float32 at least")
    wanted = torch.tensor(weights, dtype=torch.float64)
    off = (shares.detach().double() - wanted).abs().max().item()
    if not off < 1e-5:
        raise CheckFailed(f"{what}: the experts are right, and a weight is off by {off:.3g}", evidence=evidence)
    return off


def _judge_learning(what: str, logits: Tensor, experts: Tensor, weights: Tensor) -> None:
    """CheckFailed unless the gradient of the logits is that of a softmax over the chosen ones."""
    if not weights.requires_grad:
        raise CheckFailed(
            f"{what}: right weights, but no gradient flows through them to the logits: the router learns through its "
            "weights alone (no no_grad, detach or tolist on their way)"
        )
    upstream = torch.randn(weights.shape, dtype=torch.float64)
    (mine,) = torch.autograd.grad(weights, logits, upstream.to(weights), retain_graph=True)
    again = logits.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(again.gather(1, experts.long()).softmax(1), again, upstream)
    if not torch.allclose(mine.double(), wanted, rtol=0, atol=1e-5 if logits.dtype == torch.float64 else 2e-2):
        raise CheckFailed(f"{what}: right weights, but the logits' gradient is off: is the sum below them detached?")


def expect_pair(what: str, found: Any, names: Sequence[str], shape: list[int]) -> tuple[Tensor, Tensor]:
    """CheckFailed unless `found` is two tensors of that shape."""
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        raise CheckFailed(f"you returned {type(found).__name__}; the exercise asks for two: {' and '.join(names)}")
    for name, each in zip(names, found, strict=True):
        expect_tensor(f"{what}: {name}", each, shape)
    return found[0], found[1]


# Permutations.


@exercise(
    "sort-by-expert",
    minutes=15,
    difficulty=3,
    hints=(
        "Number the pairs: choice j of token t is pair t·k + j. Sorting the pairs' experts, and keeping where each "
        "came from, is the whole dispatch.",
        "experts.flatten().argsort(stable=True) gives the pair in each row; its token is pair // k. On the way back a "
        "row belongs to its pair: write it there, and the rows of a token lie side by side.",
    ),
)
def check_sorting(learner: tuple[Callable, Callable]) -> Receipt:
    dispatch, combine = learner
    rows = []
    for tokens, num_experts, k in ((7, 5, 2), (30, 40, 3), (9, 4, 1), (random.randint(5, 8), 6, 4)):
        name = f"{tokens} tokens, top {k} of {num_experts}"
        experts = torch.rand(tokens, num_experts).argsort(1)[:, :k]
        computed = _judge_sorting(name, dispatch, combine, experts, num_experts)
        less = f"{name}, float32, the last without rows"
        _judge_sorting(less, dispatch, combine, experts, num_experts + 2, torch.float32)
        rows.append(row(f"{name}: rows that experts compute, tokens · k", tokens * k, computed))
    numbers = torch.tensor([*range(2812, 2820), *range(2940, 2948)])  # bytes wrap among them, floats run out of digits
    many = numbers[torch.rand(2000, 16).argsort(1)[:, :4]]
    _dispatched("2,000 tokens, top 4 of 2,950", dispatch, many, torch.randn(len(many), 1), 2950)
    return receipt("to experts and back", rows)


def _judge_sorting(
    name: str,
    dispatch: Callable,
    combine: Callable,
    experts: Tensor,
    num_experts: int,
    dtype: torch.dtype = torch.float64,
) -> int:
    """experts: [tokens, k], a slice with gaps between its rows, as a router's sort leaves it."""
    tokens, k = experts.shape
    hidden = random.choice((2, 4, 5))
    x, matrices = torch.randn(tokens, hidden).to(dtype), torch.randn(num_experts, hidden, hidden).to(dtype)
    weights, close = torch.rand(tokens, k, dtype=dtype), 1e-9 if dtype == torch.float64 else 1e-4
    leaves = [x.requires_grad_(), weights.requires_grad_()]
    rows, order, counts = _dispatched(name, dispatch, experts, x, num_experts)
    dispatch(torch.zeros_like(x), experts.flip(0), num_experts)  # another microbatch, before this one comes back
    parts = rows.split([int(count) for count in counts])
    answers = torch.cat([torch.tanh(part @ matrix) for part, matrix in zip(parts, matrices, strict=True)])
    out = combine(answers, order, weights)
    right = torch.stack(
        [
            sum(w * torch.tanh(x[token] @ matrices[e]) for w, e in zip(weights[token], own, strict=True))
            for token, own in enumerate(experts.tolist())
        ]
    )
    expect_tensor(f"{name}: what combine returned", out, right.shape)
    _expect_dtype(f"{name}: what combine returned", out, dtype)
    if not torch.allclose(out, right, rtol=close, atol=close):
        raise CheckFailed(f"{name}: combine gives wrong sums", evidence=out.detach())
    upstream = torch.randn_like(right)
    if not out.requires_grad:
        raise CheckFailed(f"{name}: the sums are right, but no gradient can flow back: autograd was left on the way")
    mine_and_right = (torch.autograd.grad(y, leaves, upstream, allow_unused=True) for y in (out, right))
    for label, mine, wanted in zip(("x", "the weights"), *mine_and_right, strict=True):
        if mine is None or not torch.allclose(mine, wanted, rtol=close, atol=close):
            raise CheckFailed(f"{name}: the sums are right, but the gradient of {label} is not: is a part detached?")
    return len(rows)


def _dispatched(name: str, dispatch: Callable, experts: Tensor, x: Tensor, num_experts: int) -> Any:
    """(rows, order, counts) of the learner's dispatch, if they are right."""
    found = dispatch(x, experts, num_experts)
    if not isinstance(found, (tuple, list)) or len(found) != 3:
        raise CheckFailed(
            f"dispatch returned {type(found).__name__}; the exercise asks for three: rows, order and counts"
        )
    _judge_dispatch(name, *found, experts, x, num_experts)
    return found


def _expect_dtype(what: str, found: Tensor, dtype: torch.dtype) -> None:
    if found.dtype != dtype:
        raise CheckFailed(f"{what} is {found.dtype}, where what you were given is {dtype}: keep its dtype")


def _judge_dispatch(
    name: str, rows: Any, order: Any, counts: Any, experts: Tensor, x: Tensor, num_experts: int
) -> None:
    flat, k = experts.flatten().tolist(), experts.shape[1]
    places = expect_whole(f"{name}: order", order, "rows, order, counts")
    loads = expect_whole(f"{name}: counts", counts, "rows, order, counts")
    evidence = [places, loads, rows.detach() if isinstance(rows, Tensor) else rows]
    if sorted(places) != list(range(len(flat))):
        raise CheckFailed(
            f"{name}: order is {places!r:.120}; the exercise asks for the pair in each row, each of 0 to "
            f"{len(flat) - 1} once",
            evidence=evidence,
        )
    if places != sorted(range(len(flat)), key=lambda pair: (flat[pair], pair)):
        by_expert = [flat[pair] for pair in places]
        if by_expert == sorted(by_expert):
            raise CheckFailed(f"{name}: rows of one expert are not in the order of their tokens: sort stably")
        raise CheckFailed(f"{name}: by your order rows go to experts {by_expert!r:.120}: not sorted", evidence=evidence)
    if loads != torch.bincount(experts.flatten(), minlength=num_experts).tolist():
        raise CheckFailed(
            f"{name}: counts are {loads!r:.120}, one per expert, also for those without rows", evidence=evidence
        )
    if not isinstance(rows, Tensor) or rows.shape != (len(flat), x.shape[1]):
        got = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise CheckFailed(
            f"{name}: rows is {got}; the exercise asks for [tokens · k, hidden], {[len(flat), x.shape[1]]}"
        )
    _expect_dtype(f"{name}: rows", rows, x.dtype)
    if not torch.equal(rows, x[torch.tensor(places) // k]):
        raise CheckFailed(f"{name}: order is right, but the rows are not those of its tokens", evidence=evidence)
