"""Fewer bytes for a gradient: communication hooks, `BucketedDDP(module, group, hook=...)`.

    bf16, fp16              1/2     round every number to 16 bits
    int8_error_feedback     1/4     8 bits and one scale per chunk (Seide et al. 2014, "1-bit SGD": error feedback)
    top_k(share)         ~2 share   the largest values with their places (Aji & Heafield 2017; at N = 2)
    power_sgd(rank)       r(n+m)/nm a matrix as the product of two thin ones (Vogels, Karimireddy & Jaggi 2019)

    owed += gradient;  send Q(owed);  owed -= Q(owed)

What the lossy ones leave out is not lost but owed: *error feedback* adds it to the next gradient, so that in the long
run everything is sent, only later. Without it the same small components are dropped forever (Karimireddy et al. 2019).

A hook is `hook(bucket, flat, group)` and runs as one collective of the group, written as plain blocking code. Every
rank ends up with the same bits. Debts live in `bucket.hook_state`; packing anew after the first step forgives those of
that step. `predict/training/sharding.py` has the exact bytes.
"""

import math

import torch
from torch import Tensor

from minillm.comm import Group
from minillm.parallel.data_parallel.ddp import Hook
from minillm.parallel.data_parallel.packing import Bucket


def bf16(bucket: Bucket, flat: Tensor, group: Group) -> None:
    """Average in bfloat16: the range of float32 with 8 bits of mantissa."""
    _cast(flat, group, torch.bfloat16)


def fp16(bucket: Bucket, flat: Tensor, group: Group) -> None:
    """Average in float16: 11 bits of mantissa; what is above 65504 becomes infinite, and below 3e-8 zero."""
    _cast(flat, group, torch.float16)


def _cast(flat: Tensor, group: Group, dtype: torch.dtype) -> None:
    flat.copy_(group.all_reduce((flat / group.world_size).to(dtype)))  # divided first, so that the sum fits


def int8_error_feedback(bucket: Bucket, flat: Tensor, group: Group) -> None:
    """A reduce-scatter and an all-gather, both in int8: rank j adds up every rank's chunk j and sends the mean to all.

    Rounding happens twice, so there are two debts: of this rank's gradient, and of the chunk that it averages.
    """
    own = _with_debt(bucket, "own", flat)
    packed = _quantize(own.view(group.world_size, -1))
    _owe(bucket, "own", own - _dequantize(packed, flat.dtype).flatten())
    mean = _dequantize(group.all_to_all(packed), flat.dtype).mean(dim=0)
    mean = _with_debt(bucket, "chunk", mean)
    packed = _quantize(mean[None])
    _owe(bucket, "chunk", mean - _dequantize(packed, flat.dtype)[0])
    flat.copy_(_dequantize(group.all_gather(packed), flat.dtype).flatten())


def _quantize(rows: Tensor) -> Tensor:
    """rows: [rows, n] -> bytes: [rows, 4 + n], a float32 scale before each row of int8. NaN and inf come out as NaN."""
    scale = rows.abs().amax(dim=1, keepdim=True).float() / 127
    levels = (rows / scale.clamp(min=torch.finfo(torch.float32).tiny)).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scale.view(torch.uint8), levels.view(torch.uint8)], dim=1)


def _dequantize(packed: Tensor, dtype: torch.dtype) -> Tensor:
    scale, levels = packed[:, :4].flatten().view(torch.float32), packed[:, 4:].view(torch.int8)
    return levels.to(dtype) * scale.to(dtype)[:, None]


def top_k(share: float = 0.01, error_feedback: bool = True) -> Hook:
    """Sends the ceil(share * n) largest of a bucket's n numbers, with their places (int32), to all ranks."""
    if not 0 < share <= 1:
        raise ValueError(f"share is {share}: the part of the gradient that is sent lies above 0 and up to 1")

    def hook(bucket: Bucket, flat: Tensor, group: Group) -> None:
        own = _with_debt(bucket, "own", flat) if error_feedback else flat
        places = own[: bucket.numel].abs().topk(math.ceil(share * bucket.numel)).indices
        values = own[places]
        if error_feedback:
            _owe(bucket, "own", own.index_fill(0, places, 0))
        all_places = group.all_gather(places.int()).view(group.world_size, -1)
        all_values = group.all_gather(values).view(group.world_size, -1)
        flat.zero_()
        for rank in range(group.world_size):
            flat[all_places[rank].long()] += all_values[rank]
        flat /= group.world_size

    hook.__name__ = f"top_k({share})"
    return hook


def power_sgd(rank: int = 2, error_feedback: bool = True) -> Hook:
    """Send each matrix M: [n, m] as P: [n, rank] and Q: [m, rank]; one step of the power iteration, begun where the
    last one ended.

        P = mean of M Q;  orthogonalise P;  Q = mean of M^T P;  M is about P Q^T

    Parameters of more dimensions are [first, the others]; vectors, and matrices that would not shrink, go whole.
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}: a matrix is approximated by a product of rank 1 or more")

    def hook(bucket: Bucket, flat: Tensor, group: Group) -> None:
        if error_feedback:
            flat.copy_(_with_debt(bucket, "own", flat))
        owed, work = torch.zeros_like(flat), torch.promote_types(flat.dtype, torch.float32)
        pairs = list(zip(bucket.views(flat), bucket.views(owed), strict=True))
        thin = [(gradient, debt) for gradient, debt in pairs if _shrinks(gradient, rank)]
        whole = [gradient for gradient, _ in pairs if not _shrinks(gradient, rank)]

        matrices = [gradient.flatten(1).to(work) for gradient, _ in thin]
        last_q = bucket.hook_state.get("q") or [_start(m, rank) for m in matrices]
        products = [m @ q for m, q in zip(matrices, last_q, strict=True)]
        means = _average([*products, *(gradient.to(work) for gradient in whole)], group)
        p = [torch.linalg.qr(x).Q for x in means[: len(thin)]]
        own_q = [m.T @ x for m, x in zip(matrices, p, strict=True)]
        mean_q = _average(own_q, group)

        for (gradient, debt), m, x, own, mean in zip(thin, matrices, p, own_q, mean_q, strict=True):
            debt.copy_((m - x @ own.T).view(debt.shape))
            gradient.copy_((x @ mean.T).view(gradient.shape))
        for gradient, mean in zip(whole, means[len(thin) :], strict=True):
            gradient.copy_(mean)
        bucket.hook_state["q"] = [q.nan_to_num(0, 0, 0) for q in mean_q]
        if error_feedback:
            _owe(bucket, "own", owed)

    hook.__name__ = f"power_sgd({rank})"
    return hook


def _shrinks(gradient: Tensor, rank: int) -> bool:
    """Whether two factors of that rank are smaller than the gradient."""
    return gradient.dim() > 1 and rank * (len(gradient) + gradient[0].numel()) < gradient.numel()


def _start(matrix: Tensor, rank: int) -> Tensor:
    """The first Q: [m, rank], random, but the same on every rank."""
    return torch.randn(matrix.shape[1], rank, generator=torch.Generator().manual_seed(0)).to(matrix)


def _average(tensors: list[Tensor], group: Group) -> list[Tensor]:
    """Their means over the ranks, in one all-reduce."""
    if not tensors:
        return []
    flat = group.all_reduce(torch.cat([x.flatten() for x in tensors]), "avg")
    parts = flat.split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def _with_debt(bucket: Bucket, name: str, x: Tensor) -> Tensor:
    """x and what is still owed of earlier steps, in a new tensor."""
    return x + bucket.hook_state[name] if name in bucket.hook_state else x.clone()


def _owe(bucket: Bucket, name: str, debt: Tensor) -> None:
    """Remember what was not sent. A step that overflowed is skipped, so its debt is forgiven."""
    bucket.hook_state[name] = debt.nan_to_num_(0, 0, 0)
