"""What batching costs, before anyone runs it: decode steps, waits, gaps between tokens, and what preemption adds.

Symbols: B = seats (sequences in one pass), n_i = tokens that request i decodes, in order of arrival. A *step* is one
forward pass that gives every sequence in it one token.

    lengths 2 4 1 3, B = 2      static: a batch runs until its longest is done     continuous: a seat is taken at once
    seat 0                      0 0 . . 2 . .                                      0 0 2 3 3 3
    seat 1                      1 1 1 1 3 3 3   max(2,4) + max(1,3) = 7            1 1 1 1         6

Sources: Yu et al., "Orca" (2022); Kwon et al., "PagedAttention" (2023), §4.5 and §7.3; Agrawal et al., "Sarathi-Serve"
(2024); Graham, "Bounds on multiprocessing timing anomalies" (1969).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from course.shared.step_cost import StepCost

# Steps.


def static_steps(lengths: Sequence[int], max_num_seqs: int) -> int:
    """Decode steps if B requests start together and the next B wait for the longest of them: the sum of the maxima."""
    _check(max_num_seqs=max_num_seqs, **{"shortest length": min(lengths, default=1)})
    return sum(max(lengths[first : first + max_num_seqs]) for first in range(0, len(lengths), max_num_seqs))


def continuous_steps(lengths: Sequence[int], max_num_seqs: int) -> int:
    """Decode steps if the next request takes a seat in the step after it became free. All have arrived at the start."""
    _check(max_num_seqs=max_num_seqs, **{"shortest length": min(lengths, default=1)})
    free_at = [0] * max_num_seqs
    for length in lengths:
        heapq.heapreplace(free_at, free_at[0] + length)
    return max(free_at)


def least_steps(lengths: Sequence[int], max_num_seqs: int) -> int:
    """No schedule needs fewer: max(longest, ⌈Σ n_i / B⌉). Continuous batching needs fewer than Σ/B + longest."""
    _check(max_num_seqs=max_num_seqs)
    return max(max(lengths, default=0), -(-sum(lengths) // max_num_seqs))


def mean_longest(shares: Sequence[float], max_num_seqs: int) -> float:
    """E[max of B] of lengths 1, 2, ... with these shares (they sum to 1): Σ over k of 1 - P(n <= k)^B, k = 0, 1, ..."""
    _check(max_num_seqs=max_num_seqs)
    if not math.isclose(sum(shares), 1, rel_tol=1e-6):
        raise ValueError(f"the shares sum to {sum(shares):g}; they are probabilities and sum to 1")
    below, total = 0.0, 0.0
    for share in shares:
        total += 1 - below**max_num_seqs
        below += share
    return total


def static_over_continuous(shares: Sequence[float], max_num_seqs: int) -> float:
    """How many times the steps of continuous batching static batching takes in the long run: E[max of B] / E[n].

    Lengths 1 .. N alike often: about 2B/(B+1), at most 2. Exponential: 1 + 1/2 + ... + 1/B. All equal: 1.
    """
    return mean_longest(shares, max_num_seqs) / mean_longest(shares, 1)


# Waits.


def adaptive_latency(wait_s: float, batch_s: float, busy_s: float = 0.0) -> float:
    """Longest latency of a request in a batch that starts when it is full or its oldest has waited wait_s.

    busy_s: what the batch before it still takes at its arrival; requests queued for more than one batch wait longer.
    """
    return max(wait_s, busy_s) + batch_s


def adaptive_batch(per_s: float, wait_s: float, max_num_seqs: int) -> float:
    """Mean batch of an idle server under Poisson arrivals: the first, and those within wait_s of it, at most B."""
    _check(max_num_seqs=max_num_seqs)
    mean, chance, total = per_s * wait_s, math.exp(-per_s * wait_s), 0.0
    left = 1.0
    for others in range(max_num_seqs - 1):
        total += chance * (1 + others)
        left -= chance
        chance *= mean / (others + 1)
    return total + left * max_num_seqs


def overtakers(patience: int, priority_gap: int) -> int:
    """Later arrivals that may go first under the order `arrival + patience · priority`: patience · gap - 1 at most.

    The later one's number has to be smaller; of equals the earlier goes. Strict priorities are patience = infinity: no
    bound, so whoever is unimportant may starve.
    """
    return max(0, patience * priority_gap - 1)


# Seconds.


def worst_gap(cost: StepCost, prompt: int, chunk: int | None, decoding: Sequence[int]) -> float:
    """Longest time between two tokens of those who decode while a prompt comes in, in pieces of `chunk` tokens.

    decoding: tokens that each of them has. None, or a chunk as long as the prompt: the whole prompt is one step.
    """
    _check(prompt=prompt, chunk=chunk or 1)
    piece = min(prompt, chunk or prompt)
    return cost.step([(prompt - piece, piece), *((held - 1, 1) for held in decoding)])


def chunked_prefill(cost: StepCost, prompt: int, chunk: int | None, decoding: Sequence[int]) -> float:
    """Seconds until the prompt is computed, in pieces, while the others decode: the price of the shorter gap."""
    _check(prompt=prompt, chunk=chunk or 1)
    piece = min(prompt, chunk or prompt)
    others = [(held - 1, 1) for held in decoding]
    return sum(cost.step([(at, min(piece, prompt - at)), *others]) for at in range(0, prompt, piece))


def _check(**values: float) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; give at least 1")
