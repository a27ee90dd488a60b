"""Prompt lookup: what followed the last time the same few tokens occurred (Saxena 2023; Yang et al. 2023, "LLMA").

    ... x = self.pool[ i ] ... y = self.pool[           the longest suffix that occurred before: "self . pool ["
                      └ guess: i ] ...                  its most recent occurrence says what comes next

Costs nothing but a few look-ups, and gains where answers repeat: code, summaries, quotes.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import Tensor

from minillm.serve.speculate.proposal import Draft, DraftRequest


@dataclass
class _Index:
    """after[n-gram]: the place behind its most recent occurrence that has something behind it, of the first `length`
    tokens."""

    after: dict[tuple[int, ...], int] = field(default_factory=dict)
    length: int = 0


class NGram:
    """Looks for the last `longest` tokens, then for fewer, down to `shortest`. One pass over each new token: O(1)."""

    wants_hidden, cost = False, 0.0

    def __init__(self, longest: int = 5, shortest: int = 2):
        if not 1 <= shortest <= longest:
            raise ValueError(f"shortest {shortest} must be at least 1, longest {longest} at least that.")
        self.longest, self.shortest = longest, shortest
        self._indexes: dict[Hashable, _Index] = {}

    def propose(self, asked: list[DraftRequest]) -> list[Draft]:
        return [Draft(self._follow(each.key, each.tokens, each.k)) for each in asked]

    def observe(self, key: Hashable, start: int, hidden: Tensor) -> None:
        pass

    def forget(self, key: Hashable) -> None:
        self._indexes.pop(key, None)

    def _follow(self, key: Hashable, tokens: list[int], k: int) -> list[int]:
        index = self._indexes.setdefault(key, _Index())
        for end in range(max(index.length, 1), len(tokens)):  # the token at `end` says what followed
            for size in range(self.shortest, min(self.longest, end) + 1):
                index.after[tuple(tokens[end - size : end])] = end
        index.length = len(tokens)
        for size in range(min(self.longest, len(tokens)), self.shortest - 1, -1):
            if (place := index.after.get(tuple(tokens[-size:]))) is not None:
                guesses: list[int] = []
                while len(guesses) < k:  # past the end of the tokens it goes on with its own guesses: a repetition
                    guesses.append(tokens[place] if place < len(tokens) else guesses[place - len(tokens)])
                    place += 1
                return guesses
        return []
