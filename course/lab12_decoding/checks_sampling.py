"""Lab 12, from logits to a token: the nucleus, and the distribution that is sampled from.

Both are compared with plain Python that enumerates, on random distributions and on some whose sums are exact in binary,
where a token lies right on the edge.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Row, row
from course.shared.diagnose import expect

# The nucleus.


@exercise(
    "nucleus",
    minutes=15,
    difficulty=2,
    hints=(
        "Put the tokens in order, the likeliest first, and add up. Is the token with which the sum reaches top_p in "
        "or out?",
        "It is in: without it the sum would be below top_p. So a token stays if those *before* it sum to less than "
        "top_p. Afterwards, back to the order of the vocabulary.",
    ),
)
def check_nucleus(learner: Any) -> list[Row]:
    rows: list[Row] = []
    exact = [0.5, 0.25, 0.125, 0.0625, 0.0625]
    random.shuffle(exact)
    cases = [("on the edge", exact, 0.75), ("within", exact, 0.8), ("a tiny top_p", exact, 0.01), ("all", exact, 1.0)]
    cases.append(("equals at the border", [0.4, 0.2, 0.2, 0.2], 0.5))
    for size in (random.randint(5, 7), random.randint(8, 11), random.randint(150, 200)):
        cases.append((f"{size} random tokens", _random_shares(size), random.uniform(0.3, 0.9)))
    sums = list(itertools.accumulate(sorted(cases[-1][1], reverse=True)))
    few, many = random.sample(range(5, 50), 4), random.sample(range(60, 140), 2)
    for number in (*few, *many, len(sums) - random.randint(3, 6)):  # a sum that is rounded to 8 bits misses these
        cases.append((f"a hair beside {number} tokens", cases[-1][1], sums[number - 1] + (-1) ** number * 1e-5))
    found = [learner(torch.tensor(shares, dtype=torch.float64), top_p) for _, shares, top_p in cases]
    for (_, shares, _), kept in zip(cases, found, strict=True):
        fits = isinstance(kept, Tensor) and kept.shape == (len(shares),) and kept.dtype == torch.bool
        expect(fits, kept, "a tensor of bool, one for each token of the vocabulary")
    evidence = [kept.tolist() for kept in found]
    for (name, shares, top_p), kept in zip(cases, evidence, strict=True):
        right, mine = ([shares[i] for i in each] for each in (fewest(shares, top_p), compress(range(len(kept)), kept)))
        rows.append(row(f"{name}, top_p {top_p:.6g}: tokens kept", len(right), len(mine)))
        if sorted(mine) != sorted(right):  # of equals any may stay
            raise CheckFailed(
                f"{name}, top_p {top_p:.6g}: of {_show(shares)} you keep {_show(mine)}, which sum to {sum(mine):.4g}; "
                f"the nucleus is {_show(right)}, which sum to {sum(right):.4g}.",
                rows,
                evidence=evidence,
            )
        rows.append(row("    their probabilities sum to", sum(right), sum(mine), "", 1e-9))
    certain = torch.tensor([0.0, 20.0, 0.5]).softmax(0)  # the likeliest is 1.0 in float32, and the others are not 0
    if not (kept := learner(certain, 1.0)).all():
        raise CheckFailed(
            f"top_p 1 keeps all, but of {certain.tolist()}, in float32, you keep {int(kept.sum())}: the running sum is "
            "rounded and reaches 1 before its end. Treat 1 apart",
            rows,
        )
    return rows


def _show(shares: Sequence[float]) -> str:
    return f"{len(shares)} tokens" if len(shares) > 12 else ", ".join(f"{share:.3g}" for share in shares) or "nothing"


def _random_shares(size: int) -> list[float]:
    draw = [random.expovariate(1.0) + 0.01 for _ in range(size)]
    return [each / sum(draw) for each in draw]


def fewest(shares: Sequence[float], top_p: float) -> set[int]:
    """By enumeration: of the smallest sets that sum to top_p, the likeliest. A large vocabulary is sorted instead."""
    if len(shares) > 12:
        ordered = sorted(shares, reverse=True)
        return _first_of_equals(shares, next(k for k in range(1, len(shares)) if math.fsum(ordered[:k]) >= top_p))
    for size in range(1, len(shares) + 1):
        best = max(itertools.combinations(range(len(shares)), size), key=lambda chosen: sum(shares[i] for i in chosen))
        if sum(shares[i] for i in best) >= top_p - 1e-12:
            return _first_of_equals(shares, size)
    return set(range(len(shares)))


def _first_of_equals(shares: Sequence[float], size: int) -> set[int]:
    return set(sorted(range(len(shares)), key=lambda i: (-shares[i], i))[:size])


# The distribution.


@exercise(
    "sampling-distribution",
    minutes=15,
    difficulty=2,
    hints=(
        "In which order? The nucleus is one of the distribution that is sampled from, so what comes before it?",
        "Temperature first (logits / T), then the k likeliest, then the nucleus of what these have left, and what "
        "stays has to sum to 1 again. T = 0 is the limit: the likeliest token for certain.",
    ),
)
def check_distribution(learner: Callable) -> list[Row]:
    rows: list[Row] = []
    cases = [(1.0, None, 1.0), (0.6, None, 1.0), (1.7, 6, 1.0), (1.0, 3, 1.0), (1.0, None, 0.7)]
    cases += [(2.0, None, 0.7), (0.5, 5, 0.8), (1.3, 4, 0.6), (1.0, 1, 1.0), (0.0, None, 1.0), (0.0, 2, 0.5)]
    drawn = [(case, _wide_logits(*case)) for case in cases]
    drawn.append(((1.0, 3, 0.7), [math.log(share) for share in (0.3, 0.25, 0.2, 0.15, 0.1)]))  # .55, .45 and no third
    drawn.append(((1.0, None, 0.95), [math.log(share) for share in (0.5, 0.3, 0.16, 0.03, 0.01)]))
    drawn += [((1.0, 2, 1.0), [1.0, 3.0, 1.0, 1.0]), ((1.3, 9, 1.0), _wide_logits(1.3, None, 1.0)[:5])]  # ties; k of 5
    drawn += [((0.0, None, 1.0), [1.0, 3.0, 0.5, 3.0]), ((0.1, None, 1.0), [110.0, 109.0, 109.5])]  # a tie; e^1100
    evidence = []
    for case, logits in drawn:
        found = learner(torch.tensor(logits, dtype=torch.float64), *case)
        fits = isinstance(found, Tensor) and found.shape == (len(logits),)
        expect(fits, found, f"a tensor of {len(logits)} probabilities, one per token", f"{_name(case)}: you")
        evidence.append(found.double().tolist())
    for (case, logits), shares in zip(drawn, evidence, strict=True):
        right = by_hand(logits, *case)
        ranked = (sorted(zip(logits, each, strict=True)) for each in (shares, right))  # of equals any may stay
        apart = sum(abs(a - b) for (_, a), (_, b) in zip(*ranked, strict=True)) / 2
        rows.append(row(f"{_name(case)}: possible tokens", _possible(right), _possible(shares)))
        overflows = case[0] and math.isnan(apart)
        cause = " exp(logits / T) overflows: subtract the largest first, as torch.softmax does." if overflows else ""
        if not apart < 1e-6:  # NaN, too
            raise CheckFailed(
                f"{_name(case)}: {_possible(shares)} tokens are possible and their probabilities sum to "
                f"{sum(shares):.4f}. Right are {_possible(right)} that sum to 1, and {apart:.3g} of the probability "
                f"lies elsewhere.{cause}",
                rows,
                evidence=evidence,
            )
    if not (found := learner(torch.tensor([0.0, 20.0, 0.5]), 1.0, None, 1.0) > 0).all():
        raise CheckFailed(
            f"top_p 1 keeps all, but of the logits 0, 20 and 0.5, in float32, {int(found.sum())} stay possible: the "
            "running sum is rounded and reaches 1 before its end. Treat 1 apart, as in exercise 4",
            rows,
        )
    return rows


def _name(case: tuple) -> str:
    return "temperature {}, top_k {}, top_p {}".format(*case)


def _possible(shares: Sequence[float]) -> int:
    return sum(share > 0 for share in shares)


def _wide_logits(temperature: float, top_k: int | None, top_p: float) -> list[float]:
    """Random logits whose nucleus is not on an edge and has another size at temperature 1: the order matters."""
    while True:
        logits = [random.gauss(0, 2.0) + 3.0 for _ in range(random.randint(7, 10))]
        shares = by_hand(logits, temperature or 1.0, top_k, 1.0)
        sums = itertools.accumulate(sorted(shares, reverse=True))
        if top_p == 1 or not temperature:
            return logits
        if any(abs(total - top_p) < 0.02 for total in sums):
            continue
        warm = fewest(by_hand(logits, 1.0, top_k, 1.0), top_p)
        if temperature == 1 or len(warm) != len(fewest(shares, top_p)):
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
