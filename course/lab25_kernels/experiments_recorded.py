"""A decode step that was recorded once, as a CUDA graph holds it: the same work, at the same addresses, of one size.

The model is as small as can be: the logits of a sequence are a row of numbers for its token, plus what the
cache holds in
its slot after the token's key was written there. So a wrong token, a wrong slot, or a key that padding wrote shows.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Toy:
    """rows: [tokens, vocabulary]; keys: [tokens]; cache: [slots]."""

    rows: Tensor
    keys: Tensor
    cache: Tensor

    @classmethod
    def drawn(cls, tokens: int = 23, vocabulary: int = 5, slots: int = 40) -> "Toy":
        return cls(torch.randn(tokens, vocabulary), torch.randn(tokens), torch.randn(slots))

    def step(self, tokens: Tensor, slots: Tensor) -> Tensor:
        self.cache[slots] = self.keys[tokens]
        return self.rows[tokens] + self.cache[slots, None]


@dataclass(eq=False)
class Recorded:
    """tokens, slots: [size], static; logits: [size, vocabulary], static. What is in them before the first
    replay is what
    the recording left there."""

    size: int
    model: Toy
    tokens: Tensor = field(init=False)
    slots: Tensor = field(init=False)
    logits: Tensor = field(init=False)
    replays: int = 0

    def __post_init__(self) -> None:
        self.tokens = torch.randint(len(self.model.rows), (self.size,))
        self.slots = torch.randint(len(self.model.cache), (self.size,))
        self.logits = torch.full((self.size, self.model.rows.shape[1]), float("nan"))
        self._addresses = self.tokens, self.slots, self.logits

    def replay(self) -> None:
        """The recorded launches: whatever the names mean by now, these are the arrays that they read and write."""
        self.replays += 1
        tokens, slots, logits = self._addresses
        logits.copy_(self.model.step(tokens, slots))
