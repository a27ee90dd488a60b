"""Lab 24's own whiteboard tasks; the others belong to the labs that teach them."""

import itertools
import random
from collections import Counter
from typing import Any

import torch

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Row, row
from course.shared.diagnose import expect, expect_like, expect_list


@exercise(
    "token-bucket",
    minutes=10,
    difficulty=2,
    hints=(
        "What is in the bucket at a request's time, if it was that full at the last one?",
        "Refill first: min(capacity, level + elapsed · rate). Then admit if the cost fits, and only then take it out.",
    ),
)
def check_token_bucket(learner: Any) -> list[Row]:
    rows = []
    drawn = random.randint(20, 50)
    for rate, count in ((2, 60), (random.choice((4, 8, 16)), drawn), (random.choice((2, 4, 8)), 60), (4, 1)):
        capacity = random.randint(20, 80)  # with such a rate cost / rate is exact, too
        costs = [random.randint(1, capacity + 5) if random.random() < 0.3 else random.randint(1, 12) for _ in range(60)]
        waits = [random.choice((0.0, 0.25, 0.5, 4.0)) for _ in costs]
        # All of it, one more at once, half a token twice; then a full bucket, for too much and for all of it.
        costs[:6], waits[1:6] = (capacity, 1, 1, 1, capacity + 1, capacity), (0.0, 0.25, 0.25, 60.0, 0.0)
        costs, times = costs[:count], list(itertools.accumulate(waits[:count]))
        expected, spent = [], []  # what was admitted, as (time, cost): the level is rebuilt from it each time
        for time, cost in zip(times, costs, strict=True):
            level, last = float(capacity), times[0]
            for at, taken in spent:
                level, last = min(capacity, level + (at - last) * rate) - taken, at
            expected.append(cost <= min(capacity, level + (time - last) * rate))
            spent += [(time, cost)] if expected[-1] else []
        answered = learner(list(zip(times, costs, strict=True)), rate, capacity)
        asked = f"a list of {len(times)} answers, True or False"
        answers = expect_list(answered, asked, count=len(times))
        expect(all(each in (0, 1) for each in answers), answered, asked)
        admitted = list(map(bool, answers))
        off = next((i for i, (a, b) in enumerate(zip(admitted, expected, strict=True)) if a != b), None)
        if off is not None:
            which = f"request {off} (at {times[off]:g} s, cost {costs[off]})"
            said = f"{which}: you say {admitted[off]}, it must be {expected[off]}."
            raise CheckFailed(said, rows, evidence=admitted)
        name = f"{rate} tokens/s, {capacity} at most, {len(times)} requests: admitted"
        rows.append(row(name, sum(expected), sum(admitted)))
    return rows


@exercise(
    "merge-softmax",
    minutes=10,
    difficulty=3,
    hints=(
        "Each part is normalised by its own sum of exponentials. What is that sum, if its logarithm is known?",
        "The joint sum is exp(lse_a) + exp(lse_b). Each output counts with its own sum over the joint one; subtract "
        "the larger before you take exponentials.",
    ),
)
def check_merge(learner: Any) -> list[Row]:
    rows = []
    for scale, queries in ((1.0, 1), (60.0, random.randint(2, 6)), (400.0, random.randint(2, 6))):
        heads, d, cut = random.randint(1, 4), random.choice((2, 8)), random.randint(1, 8)
        q, k, v = (torch.randn(heads, n, d, dtype=torch.float64) for n in (queries, 9, 9))
        scores = scale * q @ k.mT
        if queries > 1:  # of one head: a query whose second part counts for nothing, one whose first does
            scores[:, 0, :cut] += 2000
            scores[:, 1, :cut] -= 2000
        parts = []
        for part in (slice(None, cut), slice(cut, None)):
            its = scores[..., part]
            parts.append((torch.softmax(its, -1) @ v[:, part], torch.logsumexp(its, -1)))
        whole, lse = torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)
        merged = expect_list(learner(*parts[0], *parts[1]), "two tensors, (output, lse)", count=2)
        largest = f"scores up to {scores.abs().max():.0f}"
        for what, right, given in zip(("output", "lse"), (whole, lse), merged, strict=True):
            expect_like("your function", given, right, f"a tensor {list(right.shape)} as {what}")
            if given.shape != right.shape or not torch.allclose(given, right, rtol=1e-9, atol=1e-9):
                said = f"with {largest} your {what} is not that of one softmax over all keys."
                raise CheckFailed(said, rows, evidence=given)
        rows.append(row(f"{largest}: equal to one softmax", True, True))
    return rows


@exercise(
    "dispatch-order",
    minutes=15,
    difficulty=3,
    hints=(
        "An all-to-all sends contiguous parts. In which order must the copies of the tokens stand?",
        "Flatten the (token, choice) pairs, sort them by expert without changing the order within one, and count "
        "per rank.",
    ),
)
def check_dispatch(learner: Any) -> list[Row]:
    rows = []
    small = (2, 2, 5, 1), (4, 2, random.randint(8, 60), 2), (3, 4, 1, 3), (4, 1, 0, 2)
    large = (30, 10, 1000, 8)  # too many experts for 8 bits, too many pairs for expert · 1000 + place
    for ranks, each, tokens, k in (*small, large):
        experts = torch.rand(tokens, ranks * each).argsort(1)[:, :k]  # part of a table, so not contiguous
        pairs = sorted((expert, place) for place, expert in enumerate(experts.reshape(-1).tolist()))
        expected = [place for _, place in pairs]
        per_rank = Counter(expert // each for expert, _ in pairs)
        counts = [per_rank[rank] for rank in range(ranks)]
        answered = expect_list(learner(experts, ranks, each), "a pair, (order, counts)", count=2)
        name = f"{tokens} tokens, top {k} of {ranks * each} experts on {ranks} ranks"
        order = torch.as_tensor(answered[0]).tolist()
        sent = expect_list(answered[1], f"counts as a list of numbers, here {ranks}", of=int)
        if sent != counts:
            raise CheckFailed(f"{name}: you send {sent} rows to the ranks; it must be {counts}.", rows, evidence=sent)
        if order != expected:
            place = next((i for i, (a, b) in enumerate(zip(order, expected, strict=False)) if a != b), 0)
            yours, right = (each[place : place + 8] for each in (order, expected))
            said = f"{name}: from place {place} on your order is {yours}, it must be {right}."
            raise CheckFailed(said, rows, evidence=order)
        rows.append(row(f"{name}: rows sent", sum(counts), sum(sent)))
    return rows
