"""Gradients of parameters that are in several places of a pipeline, added up.

    tied embedding    first part: d loss / d (as embedding)  ─┐
                      last part:  d loss / d (as head)       ─┴─ sum: what one process would have in one .grad
    DualPipe          every part is on two ranks, each of which has seen half of the microbatches

Without the sum the copies drift apart after the first step, which no error tells.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from minillm.comm import Group
from minillm.parallel.pipeline_parallel.schedule.actions import Place, Schedule

Key = tuple[int, str]  # (part, name); part is -1 for a name that means the same parameter in every part


class SharedGradients:
    """Finds out, in one exchange of names, which of this rank's parameters other ranks hold too.

    Parameters are the same if they have one name in one part of the model; or one name anywhere, where both parts list
    it in an attribute `tied`. (Names alone would not do: parts that are nn.Sequential all have a "0.weight".)
    """

    def __init__(self, schedule: Schedule, parts: Sequence[nn.Module], group: Group) -> None:
        self.group = group
        self.parameters: defaultdict[Key, list[nn.Parameter]] = defaultdict(list)
        for chunk, part in enumerate(parts):
            tied, index = getattr(part, "tied", ()), schedule.part_of[Place(group.rank, chunk)]
            for name, parameter in part.named_parameters():
                self.parameters[-1 if name in tied else index, name].append(parameter)
        own = {key: f"{list(held[0].shape)} {held[0].dtype}" for key, held in self.parameters.items()}
        told = group.gather_objects((f"{schedule.name} with {schedule.microbatches} microbatches", own))
        holders: defaultdict[Key, list[int]] = defaultdict(list)
        for rank, (plan, theirs) in enumerate(told):
            if plan != told[0][0]:
                raise ValueError(f"rank {rank} runs {plan}, but rank 0 runs {told[0][0]}: all ranks run one schedule")
            for key, what in theirs.items():
                first = told[holders[key][0]][1][key] if holders[key] else what
                if what != first:
                    raise ValueError(f"{key[1]} is {what} on rank {rank}, but {first} on rank {holders[key][0]}")
                holders[key].append(rank)
        self._first = {key for key in self.parameters if holders[key][0] == group.rank}
        self._shared = {  # key -> the ranks that hold it, for those in several places
            key: ranks
            for key, ranks in holders.items()
            if key in self.parameters and (len(ranks) > 1 or len(self._trainable(key)) > 1)
        }

    def owned(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter), each parameter of the model on one rank only: the first that holds it."""
        for key, held in self.parameters.items():
            if key in self._first:
                yield key[1], held[0]

    @torch.no_grad()
    def add_up(self) -> None:
        """Makes `.grad` of each shared parameter the sum over all places, with the same bits everywhere."""
        own = {key: self._sum(key) for key in self._shared if self._trainable(key)}
        packs: defaultdict[tuple[int, torch.dtype], list[Key]] = defaultdict(list)  # (other rank, dtype) -> in order
        for key, gradient in own.items():
            for rank in self._shared[key]:
                if rank != self.group.rank:
                    packs[rank, gradient.dtype].append(key)
        sends = [(torch.cat([own[key].flatten() for key in keys]), rank) for (rank, _), keys in packs.items()]
        receives = [(torch.empty_like(flat), rank) for flat, rank in sends]
        if sends:
            self.group.exchange(send=sends, recv=receives)
        found = {(self.group.rank, key): gradient for key, gradient in own.items()}
        for ((rank, _), keys), (flat, _) in zip(packs.items(), receives, strict=True):
            pieces = flat.split([own[key].numel() for key in keys])
            found |= {(rank, key): piece.view_as(own[key]) for key, piece in zip(keys, pieces, strict=True)}
        for key in own:
            self._set(key, [found[rank, key] for rank in self._shared[key]])

    def _trainable(self, key: Key) -> list[nn.Parameter]:
        return [p for p in dict.fromkeys(self.parameters[key]) if p.requires_grad]

    def _sum(self, key: Key) -> Tensor:
        """Of this rank's own places."""
        total, *others = (torch.zeros_like(p) if p.grad is None else p.grad for p in self._trainable(key))
        for gradient in others:
            total = total + gradient
        return total

    def _set(self, key: Key, gradients: list[Tensor]) -> None:
        """Added in rank order, so that all ranks come to the same bits; written where .grad already is, which may be a
        place in somebody's bucket."""
        total = gradients[0].clone()
        for gradient in gradients[1:]:
            total += gradient
        for p in self._trainable(key):
            if p.grad is None:
                p.grad = total.clone()
            else:
                p.grad.copy_(total)
