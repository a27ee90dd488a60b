"""Lab 12, from logits to a token: the nucleus, and the distribution that is drawn from.

Both are compared with plain Python that enumerates, on random distributions and on some whose sums are exact in binary,
where a token lies right on the edge.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.labkit.answers import answers_of
from minillm.labkit.exercises import CheckFailed, exercise
from minillm.labkit.receipts import Row, row

ANSWERS = answers_of("12_decoding")


# The nucleus.


@exercise(
    "nucleus",
    minutes=10,
    difficulty=2,
    hints=(
        "Put the tokens in order, the likeliest first, and add up. "
        "Is the token with which the sum reaches top_p in or out?",
        "It is in: without it the sum would be below top_p. So a token stays if those *before* it sum to less than "
        "top_p. Afterwards, back to the order of the vocabulary.",
        "ordered, order = probabilities.sort(descending=True); before = ordered.cumsum(-1) - ordered; "
        "kept = torch.zeros_like(probabilities, dtype=torch.bool); kept[order[before < top_p]] = True",
    ),
)
def check_nucleus(learner: Any) -> list[Row]:
    rows: list[Row] = []
    exact = [0.5, 0.25, 0.125, 0.0625, 0.0625]
    random.shuffle(exact)
    cases = [("on the edge", exact, 0.75), ("within", exact, 0.8), ("a tiny top_p", exact, 0.01), ("all", exact, 1.0)]
    cases.append(("equals at the border", [0.4, 0.2, 0.2, 0.2], 0.5))
    for size in (5, 8):
        cases.append((f"{size} random tokens", _random_shares(size), random.uniform(0.3, 0.9)))
    for name, shares, top_p in cases:
        given = torch.tensor(shares, dtype=torch.float64)
        found = learner(given.clone(), top_p)
        if not isinstance(found, Tensor) or found.shape != given.shape or found.dtype != torch.bool:
            raise CheckFailed("asked for is a tensor of bool, one for each token of the vocabulary")
        right, kept = fewest(shares, top_p), set(found.nonzero().flatten().tolist())
        rows.append(row(f"{name}, top_p {top_p:.3g}: tokens kept", len(right), len(kept)))
        if sorted(shares[i] for i in kept) != sorted(shares[i] for i in right):  # of equals any may stay
            raise CheckFailed(f"{name}, top_p {top_p:.3g}: {_say_nucleus(shares, top_p, kept, right)}", rows)
        rows.append(
            row("    their probabilities sum to", sum(shares[i] for i in right), float(given[found].sum()), "", 1e-9)
        )
    return rows


def _random_shares(size: int) -> list[float]:
    draw = [random.expovariate(1.0) + 0.01 for _ in range(size)]
    return [each / sum(draw) for each in draw]


def fewest(shares: Sequence[float], top_p: float) -> set[int]:
    """By enumeration: of the smallest sets that sum to top_p, the likeliest."""
    for size in range(1, len(shares) + 1):
        best = max(itertools.combinations(range(len(shares)), size), key=lambda chosen: sum(shares[i] for i in chosen))
        if sum(shares[i] for i in best) >= top_p - 1e-12:
            return _first_of_equals(shares, size)
    return set(range(len(shares)))


def _first_of_equals(shares: Sequence[float], size: int) -> set[int]:
    return set(sorted(range(len(shares)), key=lambda i: (-shares[i], i))[:size])


def _say_nucleus(shares: Sequence[float], top_p: float, kept: set[int], right: set[int]) -> str:
    total = sum(shares[i] for i in kept)
    if not kept:
        return "nothing is kept; the likeliest token always stays, or there is nothing to draw from"
    if kept < right:
        return f"you keep a sum of {total:.4g}, below top_p: the token with which the sum reaches top_p belongs to it"
    if len(kept) > len(right):
        return f"you keep {len(kept)} tokens, but {len(right)} sum to {sum(shares[i] for i in right):.4g} already"
    places = sorted(range(len(shares)), key=lambda i: (-shares[i], i))
    if {places.index(i) for i in right} == kept:
        return "right number, but these are places in the sorted order: bring them back to the vocabulary's order"
    return "the likeliest come first: have you sorted before adding up?"


# The distribution.


@exercise(
    "sampling-distribution",
    minutes=10,
    difficulty=2,
    hints=(
        "In which order? The nucleus is one of the distribution that is drawn from, so what comes before it?",
        "Temperature first (logits / T), then the k likeliest, then the nucleus of what these have left, and what "
        "stays has to sum to 1 again. T = 0 is the limit: the likeliest token for certain.",
        "logits / temperature; those below logits.topk(top_k).values[-1] to -inf; p = softmax, 0 outside its nucleus; "
        "p / p.sum(). Before all that: if temperature == 0, a 1 at argmax and zeros elsewhere.",
    ),
)
def check_distribution(learner: Callable) -> list[Row]:
    rows: list[Row] = []
    cases = [(1.0, None, 1.0), (0.6, None, 1.0), (1.7, None, 1.0), (1.0, 3, 1.0), (1.0, None, 0.7)]
    cases += [(2.0, None, 0.7), (0.5, 5, 0.8), (1.3, 4, 0.6), (0.0, None, 1.0), (0.0, 2, 0.5)]
    drawn = [(case, _wide_logits(*case)) for case in cases]
    drawn.append(((1.0, 3, 0.7), [math.log(share) for share in (0.3, 0.25, 0.2, 0.15, 0.1)]))  # .55, .45 and no third
    for (temperature, top_k, top_p), logits in drawn:
        right = by_hand(logits, temperature, top_k, top_p)
        found = learner(torch.tensor(logits, dtype=torch.float64), temperature, top_k, top_p)
        who = f"temperature {temperature}, top_k {top_k}, top_p {top_p}"
        if not isinstance(found, Tensor) or found.shape != (len(logits),):
            raise CheckFailed(f"{who}: asked for is a tensor of {len(logits)} probabilities, one per token")
        shares = found.double().tolist()
        apart = sum(abs(a - b) for a, b in zip(shares, right, strict=True)) / 2
        rows.append(row(f"{who}: tokens that can be drawn", _possible(right), _possible(shares)))
        if not apart < 1e-9:
            raise CheckFailed(f"{who}: {_say_shares(shares, right, logits, (temperature, top_k, top_p))}", rows)
    return rows


def _possible(shares: Sequence[float]) -> int:
    return sum(share > 0 for share in shares)


def _wide_logits(temperature: float, top_k: int | None, top_p: float) -> list[float]:
    """Random logits for which the order of the steps matters (a nucleus of another temperature is another set)."""
    while True:
        logits = [random.gauss(0, 2.0) + 3.0 for _ in range(9)]
        right = by_hand(logits, temperature, top_k, top_p)
        others = [way(logits, temperature, top_k, top_p) for _, way in _WAYS]
        sums = itertools.accumulate(sorted(by_hand(logits, temperature or 1.0, top_k, 1.0), reverse=True))
        if any(abs(total - top_p) < 0.02 for total in sums) and top_p < 1:
            continue
        if (
            top_p == 1.0
            or temperature in (0.0, 1.0)
            or all(_possible(other) != _possible(right) for other in others[:1])
        ):
            return logits


def by_hand(logits: Sequence[float], temperature: float, top_k: int | None, top_p: float) -> list[float]:
    """The distribution in plain Python."""
    if temperature == 0:
        best = max(range(len(logits)), key=lambda i: logits[i])
        return [float(i == best) for i in range(len(logits))]
    kept = sorted(range(len(logits)), key=lambda i: -logits[i])[: top_k or len(logits)]
    shares = _softmax([logits[i] / temperature if i in kept else -math.inf for i in range(len(logits))])
    chosen = fewest(shares, top_p)
    total = sum(shares[i] for i in chosen)
    return [shares[i] / total if i in chosen else 0.0 for i in range(len(shares))]


def _softmax(logits: Sequence[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(each - top) for each in logits]
    return [weight / sum(weights) for weight in weights]


def _nucleus_first(logits, temperature, top_k, top_p):
    chosen = fewest(by_hand(logits, 1.0, top_k, 1.0), top_p) if temperature else set()
    shares = by_hand(logits, temperature, top_k, 1.0)
    total = sum(shares[i] for i in chosen) or 1.0
    return [shares[i] / total if i in chosen else 0.0 for i in range(len(shares))]


_WAYS = (
    ("the nucleus is cut from the distribution before the temperature: temperature comes first", _nucleus_first),
    ("logits are divided by the temperature, not multiplied", lambda x, t, k, p: by_hand(x, 1 / t if t else 0, k, p)),
    ("the temperature has no effect", lambda x, t, k, p: by_hand(x, 1.0, k, p)),
    (
        "top_k has no effect, or only after the nucleus: cut to the k likeliest first, then take the nucleus of these",
        lambda x, t, k, p: by_hand(x, t, None, p),
    ),
    ("one token too many: top_k keeps k", lambda x, t, k, p: by_hand(x, t, k + 1 if k else k, p)),
    ("top_p has no effect", lambda x, t, k, p: by_hand(x, t, k, 1.0)),
)


def _say_shares(shares: Sequence[float], right: Sequence[float], logits: Sequence[float], asked: tuple) -> str:
    if any(math.isnan(share) for share in shares):
        return "not a number. Temperature 0 is no division: the likeliest token gets probability 1"
    for said, way in _WAYS:
        if all(abs(a - b) < 1e-9 for a, b in zip(shares, way(logits, *asked), strict=True)):
            return said
    if abs(sum(shares) - 1) > 1e-9:
        return f"they sum to {sum(shares):.4f}: what stays has to be divided by its sum"
    return f"{_possible(shares)} tokens can be drawn, {_possible(right)} should be, or their shares are off"
