"""How many tokens to guess: a fixed number, or what the measured acceptance says pays most."""

from dataclasses import dataclass, field

from minillm.predict.serving.speculation import best_k


@dataclass
class Counts:
    """At each place of the drafts: how many guesses were checked with all before them accepted, how many accepted."""

    tried: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)

    def add(self, checked: int, accepted: int, first: int = 0) -> None:
        """Of a draft's guesses from place `first` on, `checked` had a row of the target, `accepted` were right."""
        reached = first + min(checked, accepted + 1)
        grown = [0] * (reached - len(self.tried))
        self.tried += grown
        self.kept += grown
        for place in range(first, reached):
            self.tried[place] += 1
            self.kept[place] += place < first + accepted

    @property
    def alpha(self) -> list[float]:
        """Acceptance at each place, given that it was reached."""
        return [kept / tried for kept, tried in zip(self.kept, self.tried, strict=True)]

    @property
    def accepted(self) -> float:
        """Of all that were checked, the share accepted: α, if every place is alike. 0 before anything was tried."""
        return sum(self.kept) / sum(self.tried) if sum(self.tried) else 0.0


@dataclass(frozen=True)
class AdaptiveK:
    """k = the argmax of `predict.serving.speculation.speedup` at the acceptance a sequence has had lately.

    A sequence's own counts decide, so its answer does not depend on what else runs.

    cost: c, a draft token's seconds / a target pass's. most: never more. prior: the acceptance to begin with, worth
    `weight` guesses. memory: how much a pass still counts one pass later. probe: where guessing does not pay, one guess
    every so many passes finds out whether it does again.
    """

    cost: float = 0.1
    most: int = 8
    prior: float = 0.7
    weight: float = 4.0
    memory: float = 0.9
    probe: int = 16

    def __post_init__(self):
        if not self.cost >= 0:
            raise ValueError(f"cost {self.cost} must be at least 0: seconds of a draft token / of a target pass.")
        if isinstance(self.most, bool) or not isinstance(self.most, int) or self.most < 1 or self.probe < 1:
            raise ValueError(f"most {self.most} and probe {self.probe} must be whole numbers of at least 1.")
        if not (0 <= self.prior <= 1 and 0 <= self.memory <= 1 and self.weight > 0):
            raise ValueError(
                f"prior {self.prior}, memory {self.memory} must lie in 0 .. 1, weight {self.weight} above 0."
            )

    def k(self, tried: float, kept: float, passes: int) -> int:
        """tried, kept: guesses checked and accepted, as `fade` counts them. The same for the same numbers."""
        return best_k(round(kept / tried, 2), self.cost, self.most) or int(passes % self.probe == 0)

    def fade(self, tried: float, kept: float, checked: int, accepted: int) -> tuple[float, float]:
        """(tried, kept) after a pass with so many guesses; a sequence begins with (weight, weight · prior)."""
        if checked == 0:
            return tried, kept
        return self.memory * tried + min(checked, accepted + 1), self.memory * kept + accepted
