"""Lookahead (Fu et al. 2024): the target guesses for itself, by Jacobi iteration inside the passes that verify.

    a pass reads       last  y1  y2  y3      guesses for all places at once (the Jacobi iterate)
    and answers         z0   z1  z2  z3      the target's likeliest token after each of them
    verified: y1 = z0 and z1 (y2 was wrong)  ->  the next iterate is what is left of the answers: z2 z3 ...

Every answer was made from the guesses before it, right or wrong, so the iterate drifts towards the fixed point where
y = z: the target's own greedy text (Santilli et al. 2023). What came up on the way is kept: an n-gram along the
diagonal of the last iterates (a token, what the next pass answered after it, what the pass after that answered, ...)
goes into the sequence's pool, and the pool is asked first for what follows the last tokens (§3.2).

Simpler than the paper: its pass has a window of iterates and several n-grams to verify side by side, behind a special
mask. Here a pass reads one chain, so the n-grams that are verified and the iterate that is improved are one row, and a
pass grows the pool by at most k + 1 n-grams; one is looked up by as many of its tokens as match, not by its first. No
second model, no further pass, no weights.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import Tensor

from minillm.serve.speculate.proposal import Draft, DraftRequest


@dataclass
class Trace:
    """Of one sequence. iterate: {position: token}, to guess next; rows: the iterates of the last passes, oldest first;
    pool: {the beginning of an n-gram: its last token, as it was seen last}."""

    rows: deque[dict[int, int]]
    iterate: dict[int, int] = field(default_factory=dict)
    pool: dict[tuple[int, ...], int] = field(default_factory=dict)
    read: int = 1  # tokens of the sequence that are in the pool, if the prompt is wanted


class Lookahead:
    """The proposer. ngram: tokens of the longest n-grams, the one that is looked up included.

    prompt: whether the n-grams of the sequence's own tokens go into the pool too (an option of the paper's code): with
    it this is prompt lookup and lookahead in one.
    After a pass it wants to be told the target's answers to all its guesses, also the rejected ones: `on_verified`.
    """

    wants_hidden, cost = False, 0.0

    def __init__(self, ngram: int = 4, *, prompt: bool = False):
        if ngram < 2:
            raise ValueError(f"ngram {ngram} must be at least 2: a token and what follows it.")
        self.ngram, self.prompt = ngram, prompt
        self._traces: dict[Hashable, Trace] = {}

    def propose(self, asked: list[DraftRequest]) -> list[Draft]:
        return [Draft(self._guess(self._trace(one.key), one.tokens, one.k)) for one in asked]

    def on_verified(self, key: Hashable, tokens: list[int], guesses: list[int], likeliest: list[int]) -> None:
        """A pass over tokens + guesses: likeliest[0] is the target's likeliest token after tokens, likeliest[i] after
        guesses[i - 1]; as many as were checked."""
        trace, start = self._trace(key), len(tokens)
        row = dict(enumerate(guesses, start))
        for position, answer in enumerate(likeliest, start):
            self._add(trace, self._diagonal([*trace.rows, row], tokens, position), answer)
        trace.rows.append(row)
        trace.iterate = dict(enumerate(likeliest, start))

    def observe(self, key: Hashable, start: int, hidden: Tensor) -> None:
        pass

    def forget(self, key: Hashable) -> None:
        self._traces.pop(key, None)

    def _trace(self, key: Hashable) -> Trace:
        return self._traces.setdefault(key, Trace(deque(maxlen=self.ngram - 2)))

    def _diagonal(self, rows: list[dict[int, int]], tokens: list[int], position: int) -> list[int]:
        """Up to ngram - 1 tokens before an answer at `position`: of the newest row, of the one before it, ..."""
        gram: list[int] = []
        for ago in range(1, self.ngram):
            place, row = position - ago, rows[-ago] if ago <= len(rows) else {}
            if place < 0 or (place >= len(tokens) and place not in row):
                break
            gram.append(tokens[place] if place < len(tokens) else row[place])
        return gram[::-1]

    def _add(self, trace: Trace, before: list[int], answer: int) -> None:
        for size in range(1, len(before) + 1):
            trace.pool[tuple(before[-size:])] = answer

    def _guess(self, trace: Trace, tokens: list[int], k: int) -> list[int]:
        if self.prompt:
            for end in range(trace.read, len(tokens)):
                self._add(trace, tokens[max(0, end - self.ngram + 1) : end], tokens[end])
            trace.read = max(trace.read, len(tokens))
        text, last = tokens[-self.ngram :], len(tokens) + k
        for place in range(len(tokens), last):
            found = (trace.pool.get(tuple(text[-size:])) for size in range(min(self.ngram - 1, len(text)), 0, -1))
            # where neither pool nor iterate says anything yet, any token will do to begin with
            other = trace.iterate.get(place, tokens[place % len(tokens)])
            text.append(next((token for token in found if token is not None), other))
        return text[len(text) - k :]
