"""Lab 07, long context: two softmaxes merged, attention in tiles forward and backward.

    checks.py          on one rank: values against softmax over all keys, tensors no larger than allowed, FLOPs
    checks_ranks.py    on several: order of positions, the ring, Ulysses' exchange

An attention in tiles that stores its scores after all has right values, and fails.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.shared.diagnose import expect_tensor
from course.shared.measuring import count_flops, one_thread
from course.shared.new_tensors import NewTensors
from minillm.model import dense

DIM, TILE = 8, 16
CLOSE, CLOSE_SINGLE = 1e-9, 1e-5  # errors that another order of additions explains in float64 and in float32
NONE = float("-inf")


@exercise(
    "softmax-merge",
    minutes=10,
    difficulty=2,
    hints=(
        "Undo the division of each half: out · e^lse is its sum of exp(score) · value. What do you divide by in the "
        "end, and how do you keep e^lse from overflowing?",
        "The joint log-sum-exp is log(e^lse + e^other_lse), which torch.logaddexp computes safely. Each output is then "
        "weighted with e^(own lse - joint lse), never above 1.",
    ),
)
def check_merge(learner: Callable) -> Receipt:
    worst = 0.0
    for unseen in ("", "first", "second", "both"):
        for spread in (1.0, 1000.0):
            case = _halves(spread, unseen)
            worst = max(worst, _judge_merge(learner, case, spread, unseen))
    single = [(out.float(), lse.float()) for out, lse in _halves(1.0, "")]
    _judge_merge(learner, single, 1.0, "", CLOSE_SINGLE)
    return receipt(
        "two halves of the keys, merged",
        [
            row("largest difference from softmax over all keys (below 1e-9)", True, worst < 1e-9),
            row("    for scores of some thousands, and queries that see one half or none", None, worst),
        ],
    )


def _halves(spread: float, unseen: str) -> list[tuple[Tensor, Tensor]]:
    """(output, lse) over the first keys, over the others and over all. unseen: which half query 0 does not see."""
    queries, dim = random.sample(range(3, 15), 2)
    split, keys = random.randint(3, 6), 9
    hidden = {"first": slice(split), "second": slice(split, None), "both": slice(None)}
    scores, values = spread * torch.randn(queries, keys, dtype=torch.float64), torch.randn(keys, dim).double()
    if unseen:
        scores[0, hidden[unseen]] = NONE
    return [_softmax(scores[:, part], values[part]) for part in (slice(split), slice(split, None), slice(None))]


def _softmax(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return scores.softmax(1).nan_to_num() @ values, scores.logsumexp(1)


def _judge_merge(
    learner: Callable, case: Sequence[tuple[Tensor, Tensor]], spread: float, unseen: str, close: float = CLOSE
) -> float:
    (out, lse), (other, other_lse), right = case
    found = learner(out.clone(), lse.clone(), other.clone(), other_lse.clone())
    expect_tensors(found, right, ("output", "lse"))
    for name, mine, wanted in zip(("output", "lse"), found, right, strict=True):
        if torch.isnan(mine).any() or (name == "output" and not torch.isfinite(mine).all()):
            raise CheckFailed(_say_not_finite(name, spread, unseen))
        if not torch.allclose(mine, wanted, rtol=close, atol=close):
            raise CheckFailed(f"the {name} is wrong{_by(mine, wanted)}", evidence=list(found))
    return max(_off(found[0], right[0]), _off(found[1], right[1]))


def _say_not_finite(name: str, spread: float, unseen: str) -> str:
    if spread > 1 and not unseen:
        return f"scores of ±{3 * spread:.0f}: the {name} is not finite. e^lse overflows: only differences go into exp"
    return (
        f"query 0 sees {'no key at all' if unseen == 'both' else 'keys of one half only'}: the {name} holds NaN, as "
        "-inf minus -inf is no number. Such a query's output is 0 and its lse -inf"
    )


def expect_tensors(found: Any, right: Sequence[Tensor], names: Sequence[str]) -> None:
    """CheckFailed unless `found` is a tuple of tensors of the right shapes and dtype."""
    if not isinstance(found, (tuple, list)) or len(found) != len(right):
        raise CheckFailed(
            f"you returned {type(found).__name__}; the exercise asks for {len(right)}: {', '.join(names)}"
        )
    for name, mine, wanted in zip(names, found, right, strict=True):
        expect_tensor(name, mine, wanted.shape)
        if mine.dtype != wanted.dtype:
            raise CheckFailed(f"{name} is {mine.dtype} where what came in is {wanted.dtype}: keep the dtype")


def _by(mine: Tensor, wanted: Tensor) -> str:
    """How far off, in words."""
    if not torch.equal(mine.isfinite(), wanted.isfinite()):
        return ": finite where it should be -inf, or the other way round"
    return f", by {_off(mine, wanted):.3g} at most"


def _off(mine: Tensor, wanted: Tensor) -> float:
    return (mine - wanted).nan_to_num(0, 0, 0).abs().max().item()


# Tiles.


@exercise(
    "tiled-forward",
    minutes=20,
    difficulty=3,
    hints=(
        "Two loops: over tiles of queries, and for each over the tiles of keys that some of its queries see. Your "
        "merge joins what each tile of keys gives.",
        "A tile's scores [tile, tile] give a log-sum-exp per query and an output exp(scores - lse) @ v[keys]. On the "
        "diagonal, mask with -inf what lies to the right. Tiles above the diagonal are never computed. The last tile "
        "may be shorter; slices take care of that.",
    ),
)
@one_thread()
def check_forward(learner: Callable) -> Receipt:
    worst = 0.0
    # Scores of some thousands: exp overflows unless each query's largest score so far was subtracted.
    for seq, spread, tile in (*_cases(1000.0), (7, 1.0, TILE)):
        q, k, v = _draw(seq, spread)
        k[seq // 2] = 0  # scores of exactly 0, on both sides of the diagonal
        found, right = learner(q.clone(), k.clone(), v.clone(), tile), _attention(q, k, v)
        worst = max(worst, _compare(found, right, ("output", "lse"), f"{seq} positions in tiles of {tile}"))
    rows = [row("largest difference from softmax over all keys (below 1e-9)", True, worst < 1e-9)]
    return receipt("attention in tiles", [*rows, *_frugal(learner, 4, _draw)])


@exercise(
    "tiled-backward",
    minutes=25,
    difficulty=4,
    hints=(
        "P is not stored, but S is quick to compute again, and lse turns it into the right P of every tile at once.",
        "Per tile: p = exp(scores - lse[rows]), zero right of the diagonal; dv[keys] += p.T @ d_out[rows]; ds = p * "
        "(d_out[rows] @ v[keys].T - delta[rows]) * scale; dq[rows] += ds @ k[keys]; dk[keys] += ds.T @ q[rows]. A "
        "tile of keys gets a share from every tile of queries below it.",
        "delta = (d_out * out).sum(1), once, before the loops: out is the output over all keys. In the loops use "
        "delta[rows, None] and lse[rows, None].",
    ),
)
@one_thread()
def check_backward(learner: Callable) -> Receipt:
    worst, names = 0.0, ("dq", "dk", "dv")
    for seq, spread, tile in _cases(20.0):
        *given, right = _backward_case(seq, spread)
        found = learner(*(x.clone() for x in given), tile)
        worst = max(worst, _compare(found, right, names, f"{seq} positions in tiles of {tile}"))
    rows = [row("largest difference from autograd through softmax (below 1e-9)", True, worst < 1e-9)]
    frugal = _frugal(learner, 10, lambda seq: _backward_case(seq, 1.0)[:-1])
    return receipt("gradients in tiles", [*rows, *frugal])


def _cases(large: float) -> list[tuple[int, float, int]]:
    """Positions, spread of the scores and tile: one tile, whole ones, a shorter last one, tiles of a drawn size."""
    tile = random.choice((5, 6, 9, 12))
    return [
        (TILE, 1.0, TILE),
        (5 * TILE, 1.0, TILE),
        (4 * TILE + random.randint(1, TILE - 1), large, TILE),
        (3 * tile + 1, 1.0, tile),
    ]


def _draw(seq: int, spread: float = 1.0) -> list[Tensor]:
    q, k, v = torch.randn(3, seq, DIM, dtype=torch.float64)
    return [spread * q, k, v]


def _attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The independent reference: the package's attention over all keys at once."""
    out = dense(q[None, None], k[None, None], v[None, None])[0, 0]
    scores = q @ k.T * DIM**-0.5
    return out, scores.masked_fill(torch.ones_like(scores).triu(1).bool(), NONE).logsumexp(1)


def _backward_case(seq: int, spread: float) -> list[Any]:
    """q, k, v, output, lse, gradient of the output; and, last, the gradients that autograd finds."""
    inputs = [x.requires_grad_() for x in _draw(seq, spread)]
    out, lse = _attention(*inputs)
    d_out = torch.randn_like(out)
    right = torch.autograd.grad(out, inputs, d_out)
    return [*(x.detach() for x in (*inputs, out, lse)), d_out, right]


def _compare(found: Any, right: Sequence[Tensor], names: Sequence[str], where: str) -> float:
    expect_tensors(found, right, names)
    for name, mine in zip(names, found, strict=True):
        if not torch.isfinite(mine).all():
            raise CheckFailed(f"{where}: {name} is not finite: is exp given a score that nothing was subtracted from?")
    wrong = [n for n, mine, wanted in zip(names, found, right, strict=True) if not _close(mine, wanted)]
    if wrong:
        errors = [f"{n} by {_off(x, y):.3g}" for n, x, y in zip(names, found, right, strict=True) if n in wrong]
        raise CheckFailed(f"{where}: wrong {' and '.join(errors)}", evidence=[x.detach() for x in found])
    return max(_off(mine, wanted) for mine, wanted in zip(found, right, strict=True))


def _close(mine: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(mine, wanted, rtol=CLOSE, atol=CLOSE)


def _frugal(call: Callable, per_pair: int, draw: Callable) -> list:
    """Rows on the largest tensor, on all tensors at once, and on FLOPs; CheckFailed if they show stored scores."""
    # At 2 tiles q is as large as one tile of scores: nothing of more tiles hides behind its size.
    tiles, most, alive = (8, 16), 0, []
    for count in (2, *tiles):
        given = draw(count * TILE)
        with NewTensors(*given) as made:
            call(*given, TILE)
        limit = count * TILE * DIM
        if made.largest > max(limit, TILE * TILE):
            raise CheckFailed(
                f"right, but {count * TILE} positions made a tensor of {made.largest:,} numbers where q has {limit:,}: "
                f"scores of more than one tile are together. Work on {TILE} x {TILE} at a time"
            )
        most, alive = made.largest, [*alive, made.most_alive]
    tile = random.choice((5, 6, 9, 12))
    given = draw(2 * tile)
    with NewTensors(*given) as made:
        call(*given, tile)
    if made.largest > max(2 * tile * DIM, tile * tile):
        raise CheckFailed(
            f"right, but with tile={tile}, {2 * tile} positions made a tensor of {made.largest:,} numbers: scores of "
            f"more than {tile} x {tile}. `tile` is an argument"
        )
    alive = alive[1:]
    if alive[1] > 2.5 * alive[0]:
        raise CheckFailed(
            f"right, but tensors alive at once hold {alive[0]:,} numbers at {tiles[0] * TILE} positions and "
            f"{alive[1]:,} at {tiles[1] * TILE}: tiles are kept. Use each and forget it"
        )
    needed = per_pair * DIM * TILE**2 * tiles[0] * (tiles[0] + 1) // 2
    given = draw(tiles[0] * TILE)
    flops = count_flops(lambda: call(*given, TILE))
    few = 2 * given[0].numel()  # what a sum of products by einsum, of each query once, takes
    if flops > needed + few:
        raise CheckFailed(
            f"right, but {flops:,} FLOPs at {tiles[0] * TILE} positions where tiles on and below the diagonal take "
            f"{needed:,}: tiles that no query sees are computed, or a tile's product twice"
        )
    return [
        row(f"largest tensor at {tiles[1] * TILE} positions: no larger than q", True, most <= tiles[1] * TILE * DIM),
        row(
            f"    FLOPs at {tiles[0] * TILE} positions: visible tiles only", needed if flops == needed else None, flops
        ),
    ]
