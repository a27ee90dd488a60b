"""Medusa (Cai et al. 2024, §2.1): extra heads on the target's last hidden state guess several tokens at once.

    hidden state h of the newest computed position t
        the target's head   -> token t + 1      (drawn and verified already: it is the sequence's last token)
        Medusa head 1       -> token t + 2 ┐
        Medusa head 2       -> token t + 3 ├ the draft: one matrix product, no second model, no cache
        ...                                ┘

Head i is `layers` residual blocks x + silu(W x) on the normed hidden state, then an output head. The paper gives each
head an output matrix of its own; here all share the target's, which makes the weights small and training short.

A head does not see the tokens drafted before its own, so every position guesses worse than the one before it: the
draft is a chain of each head's best guess (the paper verifies a tree of combinations).
"""

from collections.abc import Hashable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.model import ModelConfig, Transformer
from minillm.model.paged.tables import to_device
from minillm.serve.speculate.heads import load
from minillm.serve.speculate.on_device import next_guesses
from minillm.serve.speculate.proposal import Draft, DraftRequest


class MedusaHeads(nn.Module):
    """hidden: [..., hidden] before the target's final norm -> what the target's head reads: [..., heads, hidden]."""

    def __init__(self, config: ModelConfig, *, heads: int = 4, layers: int = 2):
        super().__init__()
        if heads < 1 or layers < 1:
            raise ValueError(f"heads {heads} and layers {layers} must be at least 1.")
        size = config.hidden_size
        self.heads = nn.ModuleList(nn.Sequential(*(Residual(size) for _ in range(layers))) for _ in range(heads))

    def forward(self, hidden: Tensor, target: Transformer) -> Tensor:
        x = target.norm(hidden)
        return torch.stack([head(x) for head in self.heads], dim=-2)

    def logits(self, hidden: Tensor, target: Transformer) -> Tensor:
        """[..., heads, vocab_size]. Untrained (zero weights), each head repeats the target's own guess."""
        return target.head_logits(self(hidden, target), target._head)


class Residual(nn.Linear):
    """x + silu(W x + b); zero at first, so that it changes nothing."""

    def __init__(self, size: int):
        super().__init__(size, size)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(super().forward(x))


class Medusa:
    """The proposer. heads: None = the committed weights, or a folder of others.

    drawn: whether drafts are drawn from the heads' warped distributions at temperatures above 0, else each is a head's
    likeliest token. Both are exact; the first is accepted with Σ min(p, q), the second with p of one token, which with
    the committed heads is less.
    Keeps one hidden state per sequence. A sequence whose newest hidden state was not seen (a fork in its first step)
    gets an empty draft.
    """

    wants_hidden, cost = True, 0.05  # of a target's pass, a drafted token: measured at batch 1

    def __init__(self, target: Transformer, heads: MedusaHeads | str | Path | None = None, *, drawn: bool = True):
        self.target, self.drawn = target, drawn
        self.heads = heads if isinstance(heads, MedusaHeads) else load("medusa", MedusaHeads, target, heads)
        self._newest: dict[Hashable, tuple[int, Tensor]] = {}

    def observe(self, key: Hashable, start: int, hidden: Tensor) -> None:
        self._newest[key] = (start + len(hidden) - 1, hidden[-1].clone())

    def forget(self, key: Hashable) -> None:
        self._newest.pop(key, None)

    @torch.inference_mode()
    def propose(self, asked: list[DraftRequest]) -> list[Draft]:
        known = [one for one in asked if self._newest.get(one.key, (None,))[0] == len(one.tokens) - 2 and one.k > 0]
        drafts = {}
        if known:
            hidden = torch.stack([self._newest[one.key][1] for one in known])
            drafts = dict(zip([one.key for one in known], self._draft(known, hidden), strict=True))
        return [drafts.get(one.key, Draft([])) for one in asked]

    def _draft(self, known: list[DraftRequest], hidden: Tensor) -> list[Draft]:
        """One draft for each, from hidden [sequences, hidden_size]. The host reads once."""
        logits, ids = self.heads.logits(hidden, self.target).float(), []
        shares: list[dict[int, Tensor]] = []
        for place in range(min(logits.shape[1], max(one.k for one in known))):
            going = [row for row, one in enumerate(known) if one.k > place]
            [rows] = to_device([np.array(going, np.int64)], logits.device)
            before = torch.stack(ids, dim=1).index_select(0, rows) if ids else None
            wanted = [known[row] for row in going]
            found, q = next_guesses(logits[:, place].index_select(0, rows), wanted, before, drawn=self.drawn)
            ids.append(found.new_zeros(len(known)).index_copy(0, rows, found))
            shares.append(dict(zip(going, [None] * len(going) if q is None else q, strict=True)))
        drafts = []
        for row, (one, tokens) in enumerate(zip(known, torch.stack(ids, dim=1).tolist(), strict=True)):
            plain = one.params.temperature == 0 or not self.drawn
            q = None if plain else torch.stack([of_place[row] for of_place in shares[: one.k]])
            drafts.append(Draft(tokens[: one.k], q))
        return drafts
