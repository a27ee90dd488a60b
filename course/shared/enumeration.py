"""Every way a program's random choices can fall, each with its probability: a proof by enumeration, not by sampling.

    outcomes(lambda draw: tuple(verify(target, draft, draw)))  ->  {(5, 2): 0.3, (5, 1): 0.2, (4,): 0.5}

The program runs once for each way. It draws by `verify.uniform` and `verify.choose`; a uniform number is an interval
that shrinks with each comparison, so a program that compares one number twice gets a wrong answer.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator

from torch import Tensor


class Script:
    """Stands for a generator. Repeats the given branches, then takes the first possible one and notes the others."""

    def __init__(self, branches: tuple[int, ...] = ()):
        self.branches, self.taken, self.probability = branches, [], 1.0
        self.open: list[tuple[int, ...]] = []  # beginnings of runs still to be made
        self._numbers, self._next = {}, (0, 0)

    def uniform(self) -> "Number":
        seed, place = self._next
        self._next = seed, place + 1
        return self._numbers.setdefault((seed, place), Number(self))

    def choose(self, probabilities: Tensor) -> int:
        return self.branch(probabilities.tolist())

    def manual_seed(self, seed: int) -> "Script":
        """The numbers after it are those after the last call with this seed."""
        self._next = seed + 1, 0
        return self

    def branch(self, probabilities: list[float]) -> int:
        done = len(self.taken)
        if done < len(self.branches):
            index = self.branches[done]
        else:
            index, *others = (i for i, p in enumerate(probabilities) if p > 0)
            self.open += [(*self.taken, other) for other in others]
        self.taken.append(index)
        self.probability *= probabilities[index]
        return index


class Number:
    """Uniform in [low, high), of which a comparison keeps one part."""

    def __init__(self, script: Script):
        self.script, self.low, self.high = script, 0.0, 1.0

    def __lt__(self, bound: float) -> bool:
        cut = min(max(float(bound), self.low), self.high)
        below = (cut - self.low) / (self.high - self.low)
        if self.script.branch([below, 1 - below]) == 0:
            self.high = cut
            return True
        self.low = cut
        return False

    __le__ = __lt__  # a single number has no probability

    def __ge__(self, bound: float) -> bool:
        return not self < bound

    __gt__ = __ge__

    def __mul__(self, factor: float) -> "Scaled":
        return Scaled(self, float(factor))

    __rmul__ = __mul__


class Scaled:
    """A number times a positive factor: u · q < p says the same as u < p / q."""

    def __init__(self, number: Number, factor: float):
        self.number, self.factor = number, factor

    def __lt__(self, bound: float) -> bool:
        return self.number < float(bound) / self.factor

    __le__ = __lt__

    def __ge__(self, bound: float) -> bool:
        return not self < bound

    __gt__ = __ge__


def outcomes(run: Callable[[Script], Hashable]) -> dict[Hashable, float]:
    """{what run(draw) can return: with which probability}, for a run that ends after finitely many choices."""
    found: dict[Hashable, float] = defaultdict(float)
    for result, probability in _runs(run):
        found[result] += probability
    return dict(found)


def _runs(run: Callable[[Script], Hashable]) -> Iterator[tuple[Hashable, float]]:
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        script = Script(waiting.pop())
        result = run(script)
        yield result, script.probability
        waiting += script.open
