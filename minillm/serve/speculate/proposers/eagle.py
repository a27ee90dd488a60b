"""EAGLE (Li et al. 2024): a head of one decoder block that goes on in the target's features instead of in tokens.

    tokens            t0   t1   t2   t3           the features (hidden states before the final norm) of t0 .. t2 are the
    target's features f0   f1   f2                target's own; t3 is verified, but the target has not computed it yet
    pairs                [t1  [t2  [t3  [t4'      a pair fuses a token with the feature of the place before it; t4' is
                          f0]  f1]  f2]  f3']     drafted and f3' is the head's own guess of the feature at t3
    the head          ->  f1'  f2'  f3'  f4'      the target's norm and output head turn f3' into the guess of t4

The feature says what the target was about to say, the token which of it was drawn: together they guess far better than
a small model that reads tokens alone (§3). The head keeps the keys and values of pairs of true features; those of a
draft are dropped after it. Training follows the head's own features for some steps (EAGLE-3, Li et al. 2025, §3.2).
The papers verify a tree; here the draft is a chain.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from minillm.model import AttentionFunction, Block, ModelConfig, Transformer, sdpa
from minillm.model.paged.tables import to_device
from minillm.model.transformer import RMSNorm
from minillm.serve.speculate.heads import hidden_states, load
from minillm.serve.speculate.on_device import next_guesses
from minillm.serve.speculate.proposal import Draft, DraftRequest

NOWHERE = 1 << 30


class EagleHead(nn.Module):
    """(tokens, features, positions) -> features: [batch, pairs, hidden]. It borrows the target's embedding and head."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        size = config.hidden_size
        self.token_norm, self.feature_norm = RMSNorm(size, config.norm_eps), RMSNorm(size, config.norm_eps)
        self.fuse = nn.Linear(2 * size, size, bias=False)
        self.block = Block(replace(config, num_layers=1), layer=0)

    @torch.no_grad()
    def initialize(self, target: Transformer, seed: int = 0) -> "EagleHead":
        """To train from: token + feature through the target's last block, the feature as large as the target's are."""
        size, vocab_size = target.config.hidden_size, target.config.vocab_size
        some = torch.randint(vocab_size, (4, 64), generator=torch.Generator().manual_seed(seed))
        self.token_norm.weight.fill_(1)
        self.feature_norm.weight.fill_(hidden_states(target, some)[-1].square().mean().sqrt())
        self.fuse.weight.copy_(torch.eye(size).repeat(1, 2))
        self.block.load_state_dict(target.blocks[-1].state_dict())
        return self

    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, target: Transformer, attention: AttentionFunction
    ) -> Tensor:
        pair = torch.cat((self.token_norm(target.embedding(tokens)), self.feature_norm(features)), dim=-1)
        x = self.fuse(pair)
        return self.block(x, target.rope(positions, x.dtype), attention, positions)


@dataclass
class Memory:
    """What is kept of one sequence. keys, values: [pairs, kv_heads, head_dim], of pairs of true features; positions:
    [pairs]; feature: [hidden], after the newest pair; fresh: features (position, [m, hidden]) not yet paired."""

    keys: Tensor
    values: Tensor
    positions: Tensor
    feature: Tensor | None = None
    fresh: list[tuple[int, Tensor]] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The position after the newest pair, those that wait for their tokens included; 0 if there is none."""
        if self.fresh:
            start, hidden = self.fresh[-1]
            return start + len(hidden) + 1
        return int(self.positions[-1]) + 1 if len(self.positions) else 0


class Eagle:
    """The proposer. head: None = the committed weights, or a folder of others.

    Features of positions that the target did not compute (found in the prefix cache) are missing: the pairs there are
    left out, and the head attends to the pairs it has. That is exact, like any draft; it may be accepted less often.
    A sequence whose newest feature was not seen (a fork in its first step) gets an empty draft.
    """

    wants_hidden, cost = True, 0.2  # of a target's pass, a drafted token: measured at batch 1

    def __init__(self, target: Transformer, head: EagleHead | str | Path | None = None):
        self.target = target
        self.head = head if isinstance(head, EagleHead) else load("eagle", EagleHead, target, head)
        self._memories: dict[Hashable, Memory] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values kept now."""
        return sum(memory.keys.nbytes + memory.values.nbytes for memory in self._memories.values())

    def observe(self, key: Hashable, start: int, hidden: Tensor) -> None:
        if key not in self._memories:
            config = self.target.config
            none = hidden.new_empty(0, config.num_kv_heads, config.head_dim)
            self._memories[key] = Memory(none, none, torch.empty(0, dtype=torch.int64, device=hidden.device))
        self._memories[key].fresh.append((start, hidden.clone()))

    def forget(self, key: Hashable) -> None:
        self._memories.pop(key, None)

    @torch.no_grad()
    def propose(self, asked: list[DraftRequest]) -> list[Draft]:
        ready = [one for one in asked if one.k > 0 and self._end(one) == len(one.tokens)]
        if not ready:
            return [Draft([]) for _ in asked]
        attention = PastAndNew([self._memories[one.key] for one in ready])
        feature, longest = self._read(ready, attention), max(one.k for one in ready)
        position = torch.tensor([[len(one.tokens) - 1] for one in ready], device=feature.device)
        ids: list[Tensor] = []
        shares: list[dict[int, Tensor | None]] = []
        for step in range(longest):
            going = [row for row, one in enumerate(ready) if one.k > step]  # no draw more than alone
            [rows] = to_device([np.array(going, np.int64)], feature.device)
            logits = self.target.logits(feature).float()[:, 0].index_select(0, rows)
            before = torch.stack(ids, dim=1).index_select(0, rows) if ids else None
            found, q = next_guesses(logits, [ready[row] for row in going], before)
            ids.append(found.new_zeros(len(ready)).index_copy(0, rows, found))
            shares.append(dict(zip(going, [None] * len(going) if q is None else q, strict=True)))
            if step + 1 < longest:
                position = position + 1
                feature = self.head(ids[-1][:, None], feature, position, self.target, attention)
        tokens = torch.stack(ids, dim=1).tolist()  # the one read
        drafts = {
            one.key: Draft(
                mine[: one.k],
                None if one.params.temperature == 0 else torch.stack([each[row] for each in shares[: one.k]]),
            )
            for row, (one, mine) in enumerate(zip(ready, tokens, strict=True))
        }
        return [drafts.get(one.key, Draft([])) for one in asked]

    def _end(self, asked: DraftRequest) -> int:
        return self._memories[asked.key].end if asked.key in self._memories else 0

    def _read(self, ready: list[DraftRequest], attention: "PastAndNew") -> Tensor:
        """Takes the sequences' new pairs into their memories. Returns the features after the newest, [n, 1, hidden]."""
        device, memories = self.target.embedding.weight.device, attention.memories
        if any(memory.fresh for memory in memories):
            ids, hidden, where = [], [], []
            for one, memory in zip(ready, memories, strict=True):
                spots = [at + 1 for start, h in memory.fresh for at in range(start, start + len(h))]
                ids.append(torch.tensor([one.tokens[at] for at in spots], dtype=torch.int64, device=device))
                hidden.append(torch.cat([self.target.embedding.weight[:0], *(h for _, h in memory.fresh)]))
                where.append(torch.tensor(spots, dtype=torch.int64, device=device))
                memory.fresh.clear()
            tokens, features = (pad_sequence(part, batch_first=True) for part in (ids, hidden))
            positions = pad_sequence(where, batch_first=True, padding_value=NOWHERE)
            attention.keep(self.head(tokens, features, positions, self.target, attention), where)
        return torch.stack([memory.feature for memory in memories])[:, None]


class PastAndNew:
    """An `AttentionFunction` over several sequences' memories and whatever passes bring after them.

    Rows are padded to the longest; a padded key stands NOWHERE, behind every query, so that only padding sees it.
    """

    def __init__(self, memories: list[Memory]):
        self.memories = memories
        self.keys, self.values = (
            pad_sequence([getattr(memory, name) for memory in memories], batch_first=True).transpose(1, 2)
            for name in ("keys", "values")
        )  # [sequences, kv_heads, pairs, head_dim]
        past = [memory.positions for memory in memories]
        self.positions = pad_sequence(past, batch_first=True, padding_value=NOWHERE)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, layer: int, positions: Tensor | None, **options) -> Tensor:
        self.keys, self.values = torch.cat((self.keys, k), dim=2), torch.cat((self.values, v), dim=2)
        self.positions = torch.cat((self.positions, positions), dim=1)
        where = {"positions": positions, "key_positions": self.positions}
        return sdpa(q, self.keys, self.values, layer=layer, **where, **options)

    def keep(self, features: Tensor, where: list[Tensor]) -> None:
        """What the last pass brought goes into the memories. features: [sequences, pairs, hidden], what it gave."""
        first = self.keys.shape[2] - features.shape[1]
        for row, (memory, spots) in enumerate(zip(self.memories, where, strict=True)):
            new, count = slice(first, first + len(spots)), len(spots)
            memory.keys = torch.cat((memory.keys, self.keys[row, :, new].transpose(0, 1)))
            memory.values = torch.cat((memory.values, self.values[row, :, new].transpose(0, 1)))
            memory.positions = torch.cat((memory.positions, spots))
            memory.feature = features[row, count - 1].clone() if count else memory.feature
