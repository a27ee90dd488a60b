"""What batching costs, by formula: decode steps, waits, gaps between tokens, and what preemption adds.

Symbols: B = max_num_seqs (sequences in one pass), n_i = tokens that request i decodes, in order of arrival. A *step* is
one forward pass that gives every sequence in it one token.

    lengths 2 4 1 3, B = 2      static: a batch runs until its longest is done     continuous: a place is taken at once
    place 0                     0 0 . . 2 . .                                      0 0 2 3 3 3
    place 1                     1 1 1 1 3 3 3   max(2,4) + max(1,3) = 7            1 1 1 1         6

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
    """Decode steps if the next request takes a place in the step after it was freed. All have arrived at the start."""
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


def overtakers(patience: int, priority_gap: int) -> int:
    """Later arrivals that may go first under the order `arrival + patience · priority`: patience · gap - 1 at most.

    The later one's number has to be smaller; of equals the earlier goes. Strict priorities are patience = infinity: no
    bound, so an unimportant request may starve.
    """
    return max(0, patience * priority_gap - 1)


# Seconds.


def worst_gap(cost: StepCost, prompt: int, chunk: int | None, decoding: Sequence[int]) -> float:
    """Longest time between two tokens of decoding sequences while a prompt comes in, in pieces of `chunk` tokens.

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
