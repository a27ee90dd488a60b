"""What lab 12 decodes with: a cache around the learner's attention, and a model that notes what is put through it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from minillm.model import ModelConfig, Transformer

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]
GARBAGE = 3e3  # what unwritten places hold: reading one cannot go unnoticed


class Cache:
    """Keys and values of one sequence, [layers, kv_heads, room, head_dim]: `model(tokens, positions, attention=cache)`.

    attend(q, k, v, keys, values, start) writes into its layer's part and attends; see exercise `cached-attention`.
    entries: tokens kept so far. Where a token is kept and where its rotation says it stands are two things.
    """

    def __init__(self, config: ModelConfig, room: int, attend: Attend, dtype: torch.dtype = torch.float32):
        shape = (config.num_layers, config.num_kv_heads, room, config.head_dim)
        self.keys, self.values = (torch.full(shape, GARBAGE, dtype=dtype) for _ in range(2))
        self.attend, self.room, self.entries = attend, room, 0

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, layer: int, positions: Tensor | None, window: int | None
    ) -> Tensor:
        start, new = self.entries, k.shape[2]
        if start + new > self.room:
            raise ValueError(f"the cache has {self.room} places and holds {start} tokens: {new} more do not fit")
        y = self.attend(q[0], k[0], v[0], self.keys[layer], self.values[layer], start)
        if layer == len(self.keys) - 1:
            self.entries += new
        return y[None]

    @property
    def bytes(self) -> int:
        """Of the entries kept."""
        return sum(part[:, :, : self.entries].numel() * part.element_size() for part in (self.keys, self.values))


@dataclass
class WatchedModel:
    """A model that notes each pass: (token ids, positions, whether the cache was handed on)."""

    model: Transformer
    passes: list[tuple[list[int], list[int], bool]] = field(default_factory=list)

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def __call__(self, tokens: Tensor, positions: Tensor | None = None, *, attention: Any = None, **options: Any):
        stand = list(range(tokens.shape[1])) if positions is None else positions.flatten().tolist()
        self.passes.append((tokens.flatten().tolist(), stand, attention is not None))
        return self.model(tokens, positions, attention=attention, **options)

    @property
    def computed(self) -> int:
        """Tokens put through the model."""
        return sum(len(tokens) for tokens, _, _ in self.passes)


@torch.no_grad()
def recompute(model: Transformer, prompt: Sequence[int], count: int) -> list[int]:
    """The oracle: greedy tokens with nothing kept, every pass brings all tokens so far."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]
