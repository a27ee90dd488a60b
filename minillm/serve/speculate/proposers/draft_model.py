"""A small model of the same vocabulary guesses, token by token (Leviathan et al. 2023; Chen et al. 2023).

    pass 1   what it has not seen of each sequence: the last token, or all of a new prompt   ──▶ d1
    pass 2   d1 of every sequence that wants more                                            ──▶ d2
    ...      one pass per place of the draft, all sequences together, whatever their lengths

It keeps keys and values in blocks of its own. Those of rejected guesses are overwritten: a sequence's entries count
only as far as its tokens are what they were computed for.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from minillm.model import Transformer
from minillm.model.paged import Backend, PagedCache, default_backend
from minillm.model.paged.tables import to_device
from minillm.serve.numbers import check_whole
from minillm.serve.run.memory import blocks_of_full_length, draft_num_blocks
from minillm.serve.run.optimise import fuse
from minillm.serve.schedule.blocks import BlockPool
from minillm.serve.speculate.on_device import next_guesses
from minillm.serve.speculate.proposal import Draft, DraftRequest


@dataclass(eq=False)
class _Kept:
    """Of one sequence: the tokens whose keys and values lie in the blocks; the first `known` of them are verified."""

    tokens: list[int] = field(default_factory=list)
    known: int = 0
    computed: int = 0  # of the tokens of a draft under way, too
    blocks: list[int] = field(default_factory=list)

    def rewind(self, tokens: list[int]) -> None:
        """Keeps what was computed for these tokens, all but the last: its logits are wanted."""
        place = min(self.known, len(tokens) - 1)
        while place < min(len(self.tokens), len(tokens) - 1) and self.tokens[place] == tokens[place]:
            place += 1
        self.known = self.computed = place
        del self.tokens[place:]


class DraftModel:
    """`LLM(target, proposer=DraftModel(draft), k=4)`.

    backend: as of `EngineOptions`. num_blocks: of its own cache; None = `memory.draft_num_blocks`. If it is full, the
    sequence that was not asked for longest is dropped and computed again when asked: that costs time and changes no
    guess. passes: so far.
    """

    wants_hidden = False

    def __init__(
        self,
        model: Transformer,
        *,
        num_blocks: int | None = None,
        block_size: int = 16,
        backend: Backend | None = None,
        cost: float = 0.1,
    ):
        config, weight = model.config, model.embedding.weight
        check_whole("block_size", block_size, 1)
        full = blocks_of_full_length(config, block_size)
        num_blocks = draft_num_blocks(model, block_size) if num_blocks is None else num_blocks
        if num_blocks < full:
            raise ValueError(
                f"num_blocks {num_blocks} is too few: one sequence of the draft's full context needs {full}."
            )
        self.model, self.cost, self.vocab_size, self.device = model, cost, config.vocab_size, weight.device
        self.backend = backend or default_backend(weight.device, weight.dtype)
        if weight.is_cuda:
            fuse(model, kernels=True)
        self.pool = BlockPool(num_blocks, block_size, prefix_cache=False)
        self.cache = PagedCache(config, num_blocks, block_size, device=weight.device, dtype=weight.dtype)
        self.passes = 0
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()  # the sequence asked for last stands last

    @torch.inference_mode()
    def propose(self, asked: list[DraftRequest]) -> list[Draft]:
        drafts = [Draft([]) for _ in asked]
        context, places = self.model.config.max_seq_len, list(range(len(asked)))
        places = [place for place in places if len(asked[place].tokens) <= context]  # beyond it has nothing to say
        while places:
            group = self._seat(asked, places)
            lengths = [min(asked[p].k, context + 1 - len(asked[p].tokens)) for p in group]
            for place, draft in zip(group, self._draft([asked[p] for p in group], lengths), strict=True):
                drafts[place] = draft
            places = places[len(group) :]
        return drafts

    def observe(self, key: Hashable, start: int, hidden: Tensor) -> None:
        pass

    def forget(self, key: Hashable) -> None:
        if (kept := self._kept.pop(key, None)) is not None:
            self.pool.release(kept.blocks)
        if not self._kept:
            self.pool.reset()  # of what an interrupt may have left half done, too

    def _seat(self, asked: list[DraftRequest], places: list[int]) -> list[int]:
        """Blocks for as many as fit together, at least for the first."""
        group: list[int] = []
        for place in places:
            each = asked[place]
            kept = self._kept.setdefault(each.key, _Kept())
            self._kept.move_to_end(each.key)
            last = min(len(each.tokens) + each.k - 1, self.model.config.max_seq_len)
            missing = self.pool.blocks_for(last) - len(kept.blocks)
            seated = {asked[p].key for p in (*group, place)}
            while missing > self.pool.available and (out := next((k for k in self._kept if k not in seated), None)):
                self.forget(out)
            if missing > self.pool.available:
                break
            kept.blocks += self.pool.allocate(max(0, missing))
            group.append(place)
        return group

    def _draft(self, asked: list[DraftRequest], lengths: list[int]) -> list[Draft]:
        """Draft tokens stay on the device, where the next pass takes them from, until the host reads all of them."""
        kept = [self._kept[each.key] for each in asked]
        for each, mine in zip(asked, kept, strict=True):
            mine.rewind(each.tokens)
        fresh = [each.tokens[mine.known :] for each, mine in zip(asked, kept, strict=True)]
        [tokens] = to_device([np.array([token for mine in fresh for token in mine], np.int64)], self.device)
        counts, drafted, shares = [len(mine) for mine in fresh], [], []
        for position in range(max(lengths)):
            going = [i for i, length in enumerate(lengths) if length > position]
            rows = self._index(going)
            if position:
                tokens, counts = drafted[-1].index_select(0, rows), [1] * len(going)
            logits = self._forward([kept[i] for i in going], tokens, counts)
            before = torch.stack(drafted, dim=1).index_select(0, rows) if position else None
            ids, q = next_guesses(logits, [asked[i] for i in going], before)
            if len(going) < len(asked):
                ids = ids.new_zeros(len(asked)).index_copy(0, rows, ids)
            drafted.append(ids)
            shares.append(dict(zip(going, q if q is not None else [None] * len(going), strict=True)))
        found = torch.stack(drafted, dim=1).tolist()  # the one read
        drafts = []
        for i, (each, mine, length) in enumerate(zip(asked, kept, lengths, strict=True)):
            guesses = found[i][:length]
            mine.tokens += [*fresh[i], *guesses[:-1]]
            mine.known = len(each.tokens)
            q = None if each.params.temperature == 0 else torch.stack([shares[place][i] for place in range(length)])
            drafts.append(Draft(guesses, q))
        return drafts

    def _forward(self, kept: list[_Kept], tokens: Tensor, counts: list[int]) -> Tensor:
        """One pass over so many fresh tokens of each, one after the other: [sequences, vocab_size] after the last one,
        float32."""
        starts = [mine.computed for mine in kept]
        paged = self.cache.batch([mine.blocks for mine in kept], starts, counts, self.backend)
        logits = self.model(tokens[None], paged.positions, attention=paged, rows=paged.last_rows)
        for mine, count in zip(kept, counts, strict=True):
            mine.computed += count
        self.passes += 1
        return logits[0].float()

    def _index(self, rows: list[int]) -> Tensor:
        return to_device([np.array(rows, np.int64)], self.device)[0]
