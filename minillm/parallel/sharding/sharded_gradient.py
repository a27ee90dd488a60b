"""Gradients of slices, on which torch's tools for *all* gradients do not go wrong silently."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.comm import Group

NORMS = (torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm, torch._foreach_norm)


class ShardedGradient(Tensor):
    """A slice of a gradient.

    torch.amp.GradScaler learns of an overflow on any rank of `group`, so that all ranks skip the step and lower their
    scale together. torch.nn.utils.clip_grad_norm_ and torch's norms are refused: they would see this rank's slices
    only. A sum of squares that is written out is not noticed: sum it over `group`.
    """

    group: Group

    @staticmethod
    def of(gradient: Tensor, group: Group) -> "ShardedGradient":
        part = gradient.as_subclass(ShardedGradient)
        part.group = group
        return part

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func in NORMS:
            raise ValueError(
                "a norm (that of torch.nn.utils.clip_grad_norm_, too) sees only this rank's slices of the gradients: "
                "use clip_grad_norm_ of the optimizer."
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs or {})
            if func is torch._amp_foreach_non_finite_check_and_unscale_:
                group, found = args[0][0].group, args[1]
                found.copy_(group.all_reduce(found.to(group.device, copy=True), "max"))
        return result


def plain(gradient: Tensor) -> Tensor:
    """A ShardedGradient as an ordinary tensor, which shares its memory."""
    return gradient.as_subclass(Tensor)
