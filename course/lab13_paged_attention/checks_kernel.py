"""Lab 13's optional kernel: exercise 3 in Triton, run in Triton's interpreter. Without Triton there is no exercise."""

import inspect
import random
from collections.abc import Callable

import torch

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab13_paged_attention import formulas as predict
from course.shared.kernels import INSTALLED, launch

ARGUMENTS = ["q", "k_pool", "v_pool", "table", "y", "context", "scale", "GROUP", "KV_HEADS", "SIZE", "DIM"]


def check_kernel(learner: Callable) -> Receipt:
    if (names := list(inspect.signature(learner).parameters)) != ARGUMENTS:
        raise CheckFailed(f"the arguments are {names}; the check hands in {ARGUMENTS}")
    source = inspect.getsource(learner)
    if "raise NotImplementedError" in source:
        raise NotImplementedError
    shapes = ((1, 2, 1, 4, 4), (4, 8, 4, 4, 8), (13, 4, 2, 4, 8), (35, 6, 1, 8, 4))
    found, rows = [], []
    for (context, heads, kv_heads, size, dim), scores in [
        *((shape, None) for shape in shapes),
        *((shapes[2], ends) for ends in ((0, 300), (300, 0), (-420, -400))),
    ]:
        name = f"{context} keys in blocks of {size}, {heads} query heads on {kv_heads} kv heads"
        name += f", scores of about {scores[0]} to {scores[1]}" if scores else ""
        case = _case(context, heads, kv_heads, size, dim, scores)
        *inputs, y = (case[each] for each in ARGUMENTS[:5])
        kept = [each.clone() for each in inputs]
        try:
            seen = launch(learner, (heads,), *inputs, y, context, case["scale"], **case["sizes"])
        except ValueError as error:
            raise CheckFailed(f"the kernel stopped in the interpreter: {error}") from None
        if seen.outside or seen.races:
            what = (*seen.outside, *seen.races)[0]
            said = f"{name}: {what}: mask the loads, and let program h alone store y[h]"
            raise CheckFailed(said, rows, evidence=what)
        if any(not torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(inputs, kept, strict=True)):
            raise CheckFailed(f"{name}: the kernel stores to one of its inputs", rows)
        found.append(y)
        if not torch.isfinite(y).all():
            cause = (
                "All slots that are not the sequence's hold NaN, and so does what a mask leaves out: mask the loads "
                "behind `context`, with other=0.0, and give masked places a score of -inf"
                if scores is None
                else "exp overflows at large scores and vanishes far below 0: subtract the largest score so far, which "
                "begins at -inf"
            )
            raise CheckFailed(f"{name}: the result is not finite. {cause}", rows)
        off = float((y - _over_all(case)).abs().max())
        if off > 1e-3:
            raise CheckFailed(f"{name}: off by {off:.3g} at most", rows, evidence=[each.tolist() for each in found])
        rows.append(row(f"{name}: as softmax over all keys", True, off <= 1e-3))
    return receipt("your kernel in Triton's interpreter, one program per query head", rows)


def _case(context: int, heads: int, kv_heads: int, size: int, dim: int, scores: tuple[int, int] | None) -> dict:
    """A sequence in a pool where every other number is NaN. scores: of the first and of the last key, about."""
    blocks = predict.blocks_for(context, size)
    table = torch.tensor(random.sample(range(blocks + 3), blocks))
    pools = torch.full((2, (blocks + 3) * size, kv_heads, dim), float("nan"))
    slots = [int(table[p // size]) * size + p % size for p in range(context)]
    pools[:, slots] = 3 * torch.randn(2, context, kv_heads, dim)
    q, scale = 3 * torch.randn(heads, dim), random.choice((0.5, 1.5)) * dim**-0.5
    if scores:
        q = 1 + 0.1 * torch.rand(heads, dim)
        pools[0, slots] = torch.linspace(*scores, context)[:, None, None] / scale / dim + 0.3 * torch.randn(
            kv_heads, dim
        )
    k_pool, v_pool = (pool.view(-1, size, kv_heads, dim).contiguous() for pool in pools)
    case = {"q": q, "k_pool": k_pool, "v_pool": v_pool, "table": table, "scale": scale}
    sizes = {"GROUP": heads // kv_heads, "KV_HEADS": kv_heads, "SIZE": size, "DIM": dim}
    return case | {"y": torch.full((heads, dim), float("nan")), "context": context, "sizes": sizes}


def _over_all(case: dict) -> torch.Tensor:
    """Attention over all keys at once: the independent reference."""
    group = case["sizes"]["GROUP"]
    pools = (case[name][case["table"]].flatten(0, 1)[: case["context"]] for name in ("k_pool", "v_pool"))
    keys, values = (pool.double().repeat_interleave(group, 1) for pool in pools)
    weights = torch.softmax(torch.einsum("hd,khd->hk", case["q"].double() * case["scale"], keys), -1)
    return torch.einsum("hk,khd->hd", weights, values)


if INSTALLED:
    exercise(
        "triton-kernel",
        minutes=30,
        difficulty=4,
        hints=(
            "It is exercise 3 for one query head. Which of its numbers are addresses now?",
            "The key at place p of block b of kv head h begins at ((b * SIZE + p) * KV_HEADS + h) * DIM. Load a "
            "block's keys as a tile [SIZE, DIM], masked behind `context` with other=0.0; masked scores are -inf.",
        ),
    )(check_kernel)
