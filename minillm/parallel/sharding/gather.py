"""Whole tensors from the parts that ranks hold: one all-gather for some of them at a time, then `placement.join`."""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from minillm.comm import Group
from minillm.parallel.sharding.placement import Placement, join

AT_ONCE = 32  # tensors that are gathered together


@torch.no_grad()
def gather(parts: Mapping[str, Tensor | None], placements: Mapping[str, Placement], group: Group) -> dict[str, Tensor]:
    """This rank's parts by name (None, or no such name: others have all of it) -> whole tensors, on every rank's CPU.

    An all-gather for every 32 tensors, which bounds the memory; what every rank has whole does not travel. A rank's own
    parts are in its result as they are here, so that copies which have drifted apart show.
    """
    own = {name: part.detach() for name, part in parts.items() if part is not None}
    catalogue = group.gather_objects({name: (placements[name], part.dtype) for name, part in own.items()})
    names = dict.fromkeys(itertools.chain(*catalogue))
    travels = [n for n in names if not all(n in theirs and theirs[n][0].is_whole for theirs in catalogue)]
    found = {name: own[name].to("cpu", copy=True) for name in names.keys() - set(travels)}
    for start in range(0, len(travels), AT_ONCE):
        chosen = travels[start : start + AT_ONCE]
        sent = [
            [(name, *theirs[name]) for name in chosen if name in theirs and theirs[name][0].is_counted]
            for theirs in catalogue
        ]
        pieces = _exchange([own[name] for name, *_ in sent[group.rank]], sent, group)
        for name in chosen:
            pieces[name] += [(placements[name], own[name].cpu())] if name in own else []
            if pieces[name]:
                found[name] = join(pieces[name]).clone()
    return {name: found[name] for name in names if name in found}


def _exchange(
    parts: Sequence[Tensor], sent: Sequence[Sequence[tuple[str, Placement, torch.dtype]]], group: Group
) -> dict[str, list[tuple[Placement, Tensor]]]:
    """One all-gather. parts: what this rank sends, in the order of sent[rank]. Returns all ranks' pieces by name."""
    flat = [part.to(group.device).contiguous().view(-1).view(torch.uint8) for part in parts]
    sizes = [sum(place.part_shape.numel() * dtype.itemsize for _, place, dtype in theirs) for theirs in sent]
    row = torch.zeros(max(sizes), dtype=torch.uint8, device=group.device)
    if flat:
        torch.cat(flat, out=row[: sizes[group.rank]])
    rows = group.all_gather(row).cpu().view(group.world_size, -1) if max(sizes) else [row.cpu()] * group.world_size
    pieces: dict[str, list[tuple[Placement, Tensor]]] = defaultdict(list)
    for theirs, received in zip(sent, rows, strict=True):
        at = 0
        for name, place, dtype in theirs:
            size = place.part_shape.numel() * dtype.itemsize
            piece = received[at : at + size].clone().view(dtype).view(place.part_shape)
            pieces[name].append((place, piece))
            at += size
    return pieces
