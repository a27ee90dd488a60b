"""Lookahead (Fu et al. 2024): the target guesses for itself, by Jacobi iteration inside the passes that verify.

    a pass reads       last  y1  y2  y3      guesses for all places at once (the Jacobi iterate)
    and answers         z0   z1  z2  z3      the target's likeliest token after each of them
    verified: y1 = z0 and z1 (y2 was wrong)  ->  the next iterate is what is left of the answers: z2 z3 ...

Every answer was made from the guesses before it, right or wrong, so the iterate drifts towards the fixed point where
y = z: the target's own greedy text (Santilli et al. 2023). What came up on the way is kept: an n-gram along the
diagonal of the last iterates (a token, what the next pass answered after it, what the pass after that answered, ...)
goes into the sequence's pool, and the pool is asked first for what follows the last token (§3.2).

Simpler than the paper: its pass has a window of iterates and several n-grams to verify side by side, behind a special
mask. Here a pass reads one chain, so the n-gram that is verified and the iterate that is improved are one row, and a
pass grows the pool by at most k + 1 n-grams. No second model, no further pass, no weights.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import Tensor

from minillm.serve.speculate.proposal import Asked, Draft


@dataclass
class Trace:
    """Of one sequence. iterate: {position: token}, to guess next; rows: the iterates of the last passes, oldest first;
    pool: {token: its continuations, newest last}."""

    rows: deque[dict[int, int]]
    iterate: dict[int, int] = field(default_factory=dict)
    pool: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    read: int = 0  # tokens of the sequence whose own n-grams are in the pool


class Lookahead:
    """The proposer. ngram: tokens of an n-gram, the one it is looked up by included. keep: continuations per token.

    prompt: whether the n-grams of the sequence's own tokens go into the pool too (an option of the paper's code).
    After a pass it wants to be told the target's answers to all its guesses, also the rejected ones: `answered`.
    """

    wants_hidden, cost = False, 0.0

    def __init__(self, ngram: int = 4, keep: int = 8, *, prompt: bool = False):
        if ngram < 2 or keep < 1:
            raise ValueError(f"ngram {ngram} must be at least 2 (a token and what follows), keep {keep} at least 1.")
        self.ngram, self.keep, self.prompt = ngram, keep, prompt
        self._traces: dict[Hashable, Trace] = {}

    def propose(self, asked: list[Asked]) -> list[Draft]:
        return [Draft(self._guess(self._trace(one.key), one.tokens, one.k)) for one in asked]

    def answered(self, key: Hashable, tokens: list[int], guesses: list[int], likeliest: list[int]) -> None:
        """A pass over tokens + guesses: likeliest[0] is the target's likeliest token after tokens, likeliest[i] after
        guesses[i - 1]; as many as were checked."""
        trace, start = self._trace(key), len(tokens)
        row = dict(enumerate(guesses, start))
        for position, answer in enumerate(likeliest, start):
            gram = self._diagonal([*trace.rows, row], tokens, position)
            self._add(trace, (*gram, answer))
        trace.rows.append(row)
        trace.iterate = dict(enumerate(likeliest, start))

    def observe(self, key: Hashable, start: int, hidden: Tensor) -> None:
        pass

    def forget(self, key: Hashable) -> None:
        self._traces.pop(key, None)

    def _trace(self, key: Hashable) -> Trace:
        return self._traces.setdefault(key, Trace(deque(maxlen=self.ngram - 2)))

    def _diagonal(self, rows: list[dict[int, int]], tokens: list[int], position: int) -> list[int]:
        """The ngram - 1 tokens before an answer at `position`: of the newest row, of the one before it, ..."""
        gram: list[int] = []
        for ago in range(1, self.ngram):
            place = position - ago
            row = rows[-ago] if ago <= len(rows) else {}
            if place < 0 or (place >= len(tokens) and place not in row):
                return []
            gram.append(tokens[place] if place < len(tokens) else row[place])
        return gram[::-1]

    def _add(self, trace: Trace, gram: tuple[int, ...]) -> None:
        if len(gram) == self.ngram:
            known = trace.pool.setdefault(gram[0], [])
            if gram[1:] in known:
                known.remove(gram[1:])
            known.append(gram[1:])
            del known[: -self.keep]

    def _guess(self, trace: Trace, tokens: list[int], k: int) -> list[int]:
        if self.prompt:
            for end in range(max(trace.read, self.ngram), len(tokens) + 1):
                self._add(trace, tuple(tokens[end - self.ngram : end]))
            trace.read = len(tokens) + 1
        guesses: list[int] = []
        while len(guesses) < k:
            place, last = len(tokens) + len(guesses), guesses[-1] if guesses else tokens[-1]
            if last in trace.pool:
                guesses += trace.pool[last][-1]
            else:  # the iterate; where it has not come yet, any token will do to begin with
                guesses.append(trace.iterate.get(place, tokens[place % len(tokens)]))
        return guesses[:k]
