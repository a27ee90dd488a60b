"""The model to beat: interpolated Kneser-Ney n-grams, counted by sorting.

    p(w | h) = max(c(h w) - d, 0) / c(h)  +  d * kinds(h) / c(h) * p(w | h without its first token)

c(h w) counts the n-gram, kinds(h) the different tokens seen after h; d = 0.75. Below the highest order, counts are of
different left neighbours ("San" before "Francisco"), not of occurrences: Kneser and Ney 1995; Chen and Goodman 1999,
section 2.7. The recursion ends at 1 / vocab_size.

An n-gram is one 64-bit number (its tokens as digits in base vocab_size), so counting is a sort and looking up a binary
search, vectorised over the whole validation text.
"""

import math
from typing import NamedTuple

import numpy as np


class _Order(NamedTuple):
    """Sorted n-grams with their counts, and sorted contexts with the sum and the number of these counts."""

    grams: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    kinds: np.ndarray


class KneserNey:
    """Learns from an array of ids below `vocab_size`; order 1 ignores all context.

    Raises ValueError if vocab_size ** order does not fit 63 bits (4096 tokens: order 5; bytes: order 7).
    """

    def __init__(self, tokens: np.ndarray, vocab_size: int, order: int, discount: float = 0.75):
        highest = int(63 / math.log2(vocab_size))
        if not 1 <= order <= highest:
            raise ValueError(f"order {order} is outside 1..{highest}, what fits 63 bits with {vocab_size} tokens")
        if len(tokens) < order:
            raise ValueError(f"{len(tokens)} tokens hold no {order}-gram: give more text")
        self.vocab_size, self.order, self.discount = vocab_size, order, discount
        grams, counts = np.unique(_grams(tokens, vocab_size, order), return_counts=True)
        self._orders = [self._table(grams, counts)]
        for shorter in range(order - 1, 0, -1):  # counts of the order above, once per different left neighbour
            grams, counts = np.unique(grams % vocab_size**shorter, return_counts=True)
            self._orders.insert(0, self._table(grams, counts))

    def probabilities(self, tokens: np.ndarray) -> np.ndarray:
        """[len(tokens)] p of each token given those before it in the array (fewer than order - 1 at its start)."""
        result = np.full(len(tokens), 1 / self.vocab_size)
        for n, table in enumerate(self._orders, start=1):
            if len(tokens) >= n:
                result[n - 1 :] = self._interpolate(table, _grams(tokens, self.vocab_size, n), result[n - 1 :])
        return result

    def nats_per_token(self, tokens: np.ndarray) -> float:
        """Mean -ln p over `tokens`."""
        return float(-np.log(self.probabilities(tokens)).mean())

    def _interpolate(self, table: _Order, grams: np.ndarray, shorter: np.ndarray) -> np.ndarray:
        counts = _lookup(table.grams, table.counts, grams)
        contexts = grams // self.vocab_size
        totals, kinds = (_lookup(table.contexts, column, contexts) for column in (table.totals, table.kinds))
        seen = (np.maximum(counts - self.discount, 0) + self.discount * kinds * shorter) / np.maximum(totals, 1)
        return np.where(totals > 0, seen, shorter)

    def _table(self, grams: np.ndarray, counts: np.ndarray) -> _Order:
        contexts, starts, kinds = np.unique(grams // self.vocab_size, return_index=True, return_counts=True)
        return _Order(grams, counts, contexts, np.add.reduceat(counts, starts), kinds)


def _grams(tokens: np.ndarray, vocab_size: int, order: int) -> np.ndarray:
    """[len(tokens) - order + 1] each run of `order` tokens as one number, the first token its highest digit."""
    ids = np.asarray(tokens, dtype=np.int64)
    grams = np.zeros(len(ids) - order + 1, dtype=np.int64)
    for i in range(order):
        grams = grams * vocab_size + ids[i : len(ids) - order + 1 + i]
    return grams


def _lookup(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
