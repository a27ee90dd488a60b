"""Which part of every parameter a tensor-parallel rank holds: a function of the parameter's name and nothing else.

    embedding, head         rows      a rank's words; padded with zero rows where the vocabulary does not divide
    q_proj, k_proj, v_proj  rows      a rank's heads; fewer kv heads than ranks: several ranks hold the same one
    gate_proj, up_proj      rows      a rank's columns of the hidden layer; padded likewise
    o_proj, down_proj       columns   what reads them
    norms                   whole     on every rank

A zero row of gate or up gives silu(0) · 0 = 0, and the column of down that reads it is zero too, so padding changes no
value, gets no gradient and stays zero. Gradients are those of the whole model's parameter, or (`partial`) this rank's
share of it: of a norm that saw this rank's heads or this rank's part of the sequence only, of a kv head that answered
this rank's queries only. `sum_partial` adds the shares up.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.comm import Group
from minillm.model import ModelConfig

ROWS = ("embedding.weight", "head.weight", *(f"{name}_proj.weight" for name in ("q", "gate", "up")), "q_proj.bias")
KV_ROWS = tuple(f"{name}_proj.{kind}" for name in ("k", "v") for kind in ("weight", "bias"))
COLUMNS = ("o_proj.weight", "down_proj.weight")
HEAD_NORMS = ("q_norm.weight", "k_norm.weight")


@dataclass(frozen=True)
class Split:
    """This rank's part of a parameter.

    dim: it is cut along this dimension; None: whole on every rank. part, parts: it is the part-th of so many; when
    there are fewer parts than ranks, world_size / parts ranks in a row hold the same one. partial: its gradient is only
    this rank's share, to be summed over the ranks that hold the same part.
    """

    dim: int | None = None
    part: int = 0
    parts: int = 1
    partial: bool = False

    def size(self, whole: int) -> int:
        """Length of a part of `whole` along `dim`, padding included."""
        return -(-whole // self.parts)

    def real(self, whole: int) -> int:
        """How much of this rank's part is not padding."""
        size = self.size(whole)
        return min(max(whole - self.part * size, 0), size)

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole parameter: a contiguous copy, zeros where the cut does not come out even."""
        if self.dim is None:
            return whole.clone(memory_format=torch.contiguous_format)
        length = whole.shape[self.dim]
        size, real = self.size(length), self.real(length)
        shape = list(whole.shape)
        shape[self.dim] = size
        part = whole.new_zeros(shape) if real < size else whole.new_empty(shape)
        part.narrow(self.dim, 0, real).copy_(whole.narrow(self.dim, min(self.part * size, length), real))
        return part


def check_split(config: ModelConfig, world_size: int) -> None:
    """ValueError if attention heads cannot be dealt out to so many ranks. Other sizes are padded."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % world_size:
        divisors = [t for t in range(1, heads + 1) if heads % t == 0]
        raise ValueError(
            f"{heads} attention heads do not divide over {world_size} tensor-parallel ranks: every rank takes equally "
            f"many; use one of {', '.join(map(str, divisors))} ranks or another num_heads."
        )
    if kv_heads % world_size and world_size % kv_heads:
        raise ValueError(
            f"{kv_heads} kv heads neither divide over {world_size} tensor-parallel ranks nor the ranks over them: use "
            "a number of ranks that divides them or is a multiple of them."
        )


def split_of(config: ModelConfig, name: str, rank: int, world_size: int, sequence: bool = False) -> Split:
    """Which part of parameter `name` (its name in the whole model, or the end of it) `rank` of `world_size` holds.

    sequence: norms between the parallel regions see a part of the sequence. ValueError for heads that do not divide.
    """
    check_split(config, world_size)
    if name.endswith(HEAD_NORMS):
        return Split(partial=world_size > 1)
    if name.endswith("norm.weight"):
        return Split(partial=sequence and world_size > 1)
    if name.endswith(KV_ROWS):
        parts = min(world_size, config.num_kv_heads)
        return Split(0, rank * parts // world_size, parts, partial=parts < world_size)
    if name.endswith(ROWS):
        return Split(0, rank, world_size)
    if name.endswith(COLUMNS):
        return Split(1, rank, world_size)
    raise ValueError(f"parameter {name!r} is none of a Transformer's: no rule says how to split it.")


def join(parts: Sequence[Tensor], splits: Sequence[Split], shape: Sequence[int]) -> Tensor:
    """The ranks' parts (or their gradients, after `sum_partial`) in rank order -> the whole, of `shape`."""
    dim = splits[0].dim
    if dim is None:
        return parts[0].clone()
    each = {split.part: tensor for tensor, split in zip(parts, splits, strict=True)}
    return torch.cat([each[part] for part in sorted(each)], dim).narrow(dim, 0, shape[dim]).contiguous()


def sum_partial(named: Iterable[tuple[str, Tensor]], splits: Mapping[str, Split], group: Group) -> None:
    """Completes the gradients of the parameters whose split is partial, in place, by one all-reduce for all of them.

    named: parameters with their names; those without .grad are left out, on all ranks alike. Of a parameter in several
    parts, each part's sum has its own slot.
    """
    chosen = [(p.grad, splits[name]) for name, p in named if splits[name].partial and p.grad is not None]
    if not chosen or group.world_size == 1:
        return
    slots = []
    for gradient, split in chosen:
        slot = gradient.new_zeros((split.parts, gradient.numel()))
        slot[split.part] = gradient.flatten()
        slots.append(slot.flatten())
    flat = group.all_reduce(torch.cat(slots))
    for (gradient, split), summed in zip(chosen, flat.split([len(slot) for slot in slots]), strict=True):
        gradient.copy_(summed.view(split.parts, -1)[split.part].view_as(gradient))


def grad_norm(named: Iterable[tuple[str, Tensor]], splits: Mapping[str, Split], group: Group) -> Tensor:
    """Norm of the whole model's gradient, after `sum_partial`: one number to add up. What several ranks hold counts
    once: each of world_size / parts of them brings its share of the square."""
    squares = [p.grad.square().sum() * splits[name].parts for name, p in named if p.grad is not None]
    total = torch.stack(squares).sum() / group.world_size if squares else torch.zeros((), device=group.device)
    return (group.all_reduce(total) if group.world_size > 1 else total).sqrt()
