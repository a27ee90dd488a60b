"""Counts the kernels that a piece of work would launch on a GPU, on a machine without one.

Every aten operation that computes or moves something counts as one launch; views and uninitialised memory launch
nothing. Where a GPU has one fused kernel and the CPU does the same in many, `as_on_a_gpu` puts an operation of one
launch in its place: RMSNorm (torch's fused one), and paged attention (`triton_split_kv`: the split kernel and, for long
contexts, the one that combines). So a count is a lower bound: some operations launch several kernels on a GPU.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.model.paged import gathered
from minillm.model.transformer import RMSNorm

LAUNCH_NOTHING = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh"),
    *("_unsafe_view", "_reshape_alias", "is_same_size", "_local_scalar_dense"),
}
LAUNCHES_OF = {"paged_attention": 2}


class Launches(TorchDispatchMode):
    """`with Launches() as launches: ...`, then launches.total, and launches.calls by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(count * LAUNCHES_OF.get(name, 1) for name, count in self.calls.items())

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = launching_name(func)
        if name is not None:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


@lru_cache(None)
def launching_name(func: Any) -> str | None:
    """The operation's name, or None if it launches nothing."""
    schema = func._schema
    name = schema.name.partition("::")[2]
    aliases = [argument.alias_info for argument in schema.arguments if argument.alias_info is not None]
    is_view = bool(aliases) and not any(alias.is_write for alias in aliases)
    return None if is_view or name in LAUNCH_NOTHING else name


def launches(work: Callable[[], Any]) -> Launches:
    """Of one call of `work`, which has run before."""
    with as_on_a_gpu():
        work()
        with Launches() as counted:
            work()
    return counted


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Inside, RMSNorm is one operation, and its backward another."""

    def fused(self: RMSNorm, x: Tensor) -> Tensor:
        return torch.ops.budgets.rms_norm(x, self.weight, self.eps)

    with mock.patch.object(RMSNorm, "forward", fused):
        yield


@torch.library.custom_op("budgets::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


@torch.library.custom_op("budgets::rms_norm_backward", mutates_args=())
def rms_norm_backward(gradient: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    normalised, to_normalised = x * scale, gradient * weight
    to_x = scale * (to_normalised - normalised * (to_normalised * normalised).mean(-1, keepdim=True))
    return to_x, (gradient * normalised).flatten(0, -2).sum(0)


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.eps = inputs[2]


rms_norm.register_autograd(
    lambda ctx, gradient: (*torch.ops.budgets.rms_norm_backward(gradient, *ctx.saved_tensors, ctx.eps), None),
    setup_context=_save,
)


@torch.library.custom_op("budgets::paged_attention", mutates_args=())
def _paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
) -> Tensor:
    return gathered(q, k_pool, v_pool, block_table, query_lens, context_lens, window=None).clone()


def paged_attention(q: Tensor, k_pool: Tensor, v_pool: Tensor, *sizes: Any, window: int | None = None) -> Tensor:
    """A backend of paged attention that is two launches, as `triton_split_kv` is."""
    return torch.ops.budgets.paged_attention(q, k_pool, v_pool, *sizes)
