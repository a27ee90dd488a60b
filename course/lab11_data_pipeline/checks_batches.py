"""Lab 11, batches: windows packed, samples dealt to ranks, batches made ahead.

Windows are compared with closed forms. Dealing runs on real ranks, so that nothing hides in one process. Prefetching is
judged by events (what was begun before what was asked for), never by a stopwatch: `feeding.py`.
"""

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab11_data_pipeline import feeding
from course.lab11_data_pipeline import formulas as predict
from course.shared.diagnose import expect_list, expect_whole
from minillm.comm import launch
from minillm.data.sampler import permutation

# Windows.


@exercise(
    "pack-windows",
    minutes=10,
    difficulty=2,
    hints=(
        "Window i starts at token i · seq_len. Its inputs are seq_len tokens, its targets the same moved on by one.",
        "The last target of a window is the first input of the next: windows share one token. So T tokens hold "
        "(T - 1) // seq_len windows.",
    ),
)
def check_windows(learner: Callable) -> Receipt:
    rows = []
    for seq_len, n, rest in ((random.randint(3, 6), random.randint(3, 6), 1), (4, 3, 4), (random.randint(7, 16), 9, 5)):
        count = seq_len * n + rest
        tokens = torch.randint(1000, (count,))
        tokens[seq_len : seq_len + 2] = 0  # a token that repeats
        found = learner(tokens.clone(), seq_len)
        _judge_windows(found, tokens, seq_len)
        targets = found[1].numel()
        rows += [
            row(f"{count} tokens, seq_len {seq_len}: windows", (count - 1) // seq_len, len(found[0])),
            row("    targets, each once", (count - 1) // seq_len * seq_len, targets),
            row("    waste", predict.packing_waste(count, seq_len), 1 - targets / count, tolerance=1e-9),
        ]
    return receipt("packing", rows)


def _judge_windows(found: Any, tokens: torch.Tensor, seq_len: int) -> None:
    who, n = f"{len(tokens)} tokens with seq_len {seq_len}", (len(tokens) - 1) // seq_len
    asked = "two tensors, (inputs, targets)"
    inputs, targets = expect_list(found, asked, f"{who}: you", count=2, of=torch.Tensor)
    places = torch.arange(n * seq_len).view(n, seq_len)
    if inputs.shape != places.shape or targets.shape != places.shape:
        raise CheckFailed(
            f"{who}: inputs are {list(inputs.shape)}, targets {list(targets.shape)}; both must be [{n}, {seq_len}]",
            evidence=found,
        )
    for name, mine, due in (("inputs", inputs, places), ("targets", targets, places + 1)):
        right = tokens[due]
        if mine.dtype != right.dtype:
            raise CheckFailed(f"{who}: {name} are {mine.dtype}, but tokens are {right.dtype}")
        if not torch.equal(mine, right):
            place = tuple((mine != right).nonzero()[0].tolist())
            said = f"{who}: {name}{list(place)} is {mine[place]}, but should be token {due[place]} of the text"
            raise CheckFailed(f"{said}, {right[place]}", evidence=found)


# Samples for ranks.


@exercise(
    "deal-samples",
    minutes=15,
    difficulty=3,
    hints=(
        "Write all epochs one after the other: a stream without end. All ranks together take the next "
        "world_size · batch_size of it. Which places are yours?",
        "Place p of the stream is sample order(p // num_samples)[p % num_samples]. Deal like cards: rank r takes the "
        "places position + r, position + r + world_size, ... A step may reach into the next epoch.",
    ),
)
def check_deal(learner: Callable) -> Receipt:
    num_samples, seed = random.choice([29, 31, 37]), random.randrange(1000)
    # Ranks, batch size, steps: 48, then 36, then 60 samples, then more than six epochs in each step.
    legs = [(4, 3, 4), (3, 3, 4), (2, 5, 6), (2, 3 * num_samples + 5, 2)]
    ranks = launch(feeding.deal_on_ranks, 4, learner, num_samples, seed, legs, device="cpu")
    dealt, messages = [found for found, _ in ranks], sum(sent for _, sent in ranks)
    order, position, seen = partial(permutation, num_samples, seed), 0, Counter()
    for leg, (world, batch_size, steps) in enumerate(legs):
        for step in range(steps):
            shares = [dealt[rank][leg][step] for rank in range(world)]
            feeding.judge_step(shares, position, num_samples, batch_size, order, resumed=leg > 0 and step == 0)
            seen.update(sample for share in shares for sample in share)
            position += world * batch_size
    _deal_in_turns(learner, seed)
    return receipt(
        f"{num_samples} samples, {position} dealt: on 4 ranks, resumed on 3, then on 2",
        [
            row("times the rarest sample was shown", position // num_samples, min(seen.values())),
            row("times the most frequent was", -(-position // num_samples), max(seen.values())),
            row("different samples", num_samples, len(seen)),
            row("messages between the ranks", 0, messages),
        ],
    )


def _deal_in_turns(learner: Callable, seed: int) -> None:
    """Three data sets and all ranks in one process: what a call returns depends on its arguments alone."""
    world, batch_size, small, large = 3, random.randint(2, 4), random.randint(11, 19), random.randint(20, 28)
    for num_samples, drawn_by in ((small, seed), (large, seed), (small, seed + 1)):
        order = partial(permutation, num_samples, drawn_by)
        for position in (0, num_samples - 1):
            shares = [learner(position, order, num_samples, batch_size, rank, world) for rank in range(world)]
            shares = [expect_whole("a rank's share", share, "a list of ints") for share in shares]
            feeding.judge_step(shares, position, num_samples, batch_size, order, resumed=False)


@exercise(
    "prefetch",
    minutes=20,
    difficulty=3,
    hints=(
        "A thread makes batches and puts them into a queue, you take them out. What stops it from filling your memory?",
        "queue.Queue(maxsize=depth): put waits while it is full. One thread keeps the order. An exception inside the "
        "thread reaches nobody by itself: put it into the queue, too, and raise it where the batch was due.",
    ),
)
def check_prefetch(learner: Callable) -> Receipt:
    total = random.randint(9, 14)
    return receipt(
        "prefetching, by events",
        [
            *feeding.judge_overlap(learner, depth=random.randint(5, 7), total=total),
            *feeding.judge_overlap(learner, depth=1, total=total + random.randint(1, 4)),
            *feeding.judge_early_stop(learner),
            *feeding.judge_failure(learner, total=random.randint(5, 8)),
        ],
    )
