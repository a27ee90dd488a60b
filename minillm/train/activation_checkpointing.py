"""Activation checkpointing: forward keeps a block's input only; backward runs the block again for the rest.

    forward    x ─ block ─ y        kept: x (and, selectively, the results of matmuls)
    backward   x ─ block ─ y'       the same numbers once more, with autograd watching; then gradients through it

Costs a forward, so 4 instead of 3 units of FLOPs in the blocks (Chen et al. 2016, https://arxiv.org/abs/1604.06174),
and keeps one block's activations at a time. "selective" chooses by operation, as torch's
`create_selective_checkpoint_contexts` does (PyTorch 2024, https://docs.pytorch.org/docs/stable/checkpoint.html): it
keeps what is expensive to compute (matmuls, attention) and recomputes norms, rotations and SwiGLU's products. What
Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198, §5) call selective recomputation is another choice: it
recomputes the core of attention, cheap for the memory of its scores, and keeps the rest; a fused attention does that by
itself.

Written as an autograd function that hands back the parameters' gradients like any other operation: hooks on parameters
fire as usual, and a block whose input needs no gradient still trains (torch's reentrant form raises there).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from minillm.model.parts import blocks_of

aten = torch.ops.aten
EXPENSIVE = frozenset(
    {
        aten.mm,
        aten.addmm,
        aten.bmm,
        aten.baddbmm,
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
    }
)
MODES = {"none": None, "full": frozenset(), "selective": EXPENSIVE}  # name -> operations whose results are kept


def checkpoint_blocks(model: nn.Module, keep: frozenset | None = frozenset(), every: int = 1) -> nn.Module:
    """Makes each `every`-th of `model.blocks` recompute in backward; names and results stay what they are.

    keep: operations whose results are kept: nothing by default, `EXPENSIVE` for selective, None undoes it all.
    """
    if every < 1:
        raise ValueError(f"every {every} must be at least 1: 2 recomputes every second block.")
    for index, block in enumerate(blocks_of(model)):
        vars(block).pop("forward", None)
        if keep is not None and index % every == 0:
            block.forward = functools.partial(_checkpointed_forward, block, keep)
    return model


def activation_checkpoint(
    function: Callable[..., Tensor],
    *args: Any,
    parameters: tuple[Tensor, ...] = (),
    keep: frozenset = frozenset(),
) -> Tensor:
    """function(*args), a tensor, remembering only its arguments. Random numbers and autocast are repeated exactly.

    parameters: the tensors besides `args` that the function differentiates (`tuple(module.parameters())`).
    """
    if not torch.is_grad_enabled():
        return function(*args)
    places = [place for place, arg in enumerate(args) if isinstance(arg, Tensor)]
    tensors = [args[place] for place in places]
    return _Checkpoint.apply(function, args, places, keep, *tensors, *parameters)


def _checkpointed_forward(block: nn.Module, keep: frozenset, *args: Any) -> Tensor:
    trained = tuple(parameter for parameter in block.parameters() if parameter.requires_grad)
    return activation_checkpoint(functools.partial(type(block).forward, block), *args, parameters=trained, keep=keep)


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, args, places, keep, *tensors):
        ctx.function, ctx.places, ctx.keep = function, places, keep
        ctx.args = [None if place in places else arg for place, arg in enumerate(args)]
        ctx.parameters = tensors[len(places) :]  # not saved for backward: they live in the module anyway
        inputs = tensors[: len(places)]
        ctx.surroundings = _Surroundings(inputs)
        recorder = _Record(keep)
        with recorder if keep else contextlib.nullcontext():
            result = function(*args)
        ctx.layouts = recorder.layouts
        ctx.save_for_backward(*inputs, *recorder.tensors)
        return result

    @staticmethod
    def backward(ctx, gradient):
        saved = ctx.saved_tensors
        inputs, kept = saved[: len(ctx.places)], saved[len(ctx.places) :]
        wanted = ctx.needs_input_grad[4 : 4 + len(inputs)]
        inputs = [tensor.detach().requires_grad_(want) for tensor, want in zip(inputs, wanted, strict=True)]
        replay = _Replay(ctx.keep, ctx.layouts, kept)
        with torch.enable_grad(), ctx.surroundings.again(), replay if ctx.keep else contextlib.nullcontext():
            args = list(ctx.args)
            for place, tensor in zip(ctx.places, inputs, strict=True):
                args[place] = tensor.view_as(tensor)  # no leaf: hooks on modules (a FLOP counter's) cannot take one
            result = ctx.function(*args)
        sources = [*(tensor for tensor in inputs if tensor.requires_grad), *ctx.parameters]
        found = iter(torch.autograd.grad(result, sources, gradient, allow_unused=True))
        return (None,) * 4 + tuple(next(found) if want else None for want in wanted) + tuple(found)


class _Surroundings:
    """What a function sees besides its arguments: the random number generators and autocast."""

    def __init__(self, inputs: tuple[Tensor, ...]):
        self.device = next((tensor.device for tensor in inputs if tensor.device.type != "cpu"), torch.device("cpu"))
        self.cpu_state = torch.get_rng_state()
        self.device_state = self._module().get_rng_state(self.device) if self.device.type != "cpu" else None
        kind = self.device.type
        self.autocast = (
            torch.is_autocast_enabled(kind),
            torch.get_autocast_dtype(kind),
            torch.is_autocast_cache_enabled(),
        )

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        on, dtype, cache = self.autocast
        devices = [] if self.device_state is None else [self.device]
        with (
            torch.random.fork_rng(devices, device_type=self.device.type if devices else "cuda"),
            torch.autocast(self.device.type, dtype, enabled=on, cache_enabled=cache),
        ):
            torch.set_rng_state(self.cpu_state)
            if devices:
                self._module().set_rng_state(self.device_state, self.device)
            yield

    def _module(self):
        return getattr(torch, self.device.type)


class _Record(TorchDispatchMode):
    """Collects the results of the operations in `keep`, in the order they happen: tensors, and the rest as layouts."""

    def __init__(self, keep: frozenset):
        super().__init__()
        self.keep, self.tensors, self.layouts = keep, [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if _is_kept(func, kwargs, self.keep):
            leaves, structure = tree_flatten(result)
            self.tensors += [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            self.layouts.append(([None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves], structure))
        return result


class _Replay(TorchDispatchMode):
    """Hands the collected results out again instead of computing them."""

    def __init__(self, keep: frozenset, layouts: list, tensors: tuple[Tensor, ...]):
        super().__init__()
        self.keep, self.layouts, self.tensors = keep, iter(layouts), iter(tensors)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not _is_kept(func, kwargs, self.keep):
            return func(*args, **(kwargs or {}))
        leaves, structure = next(self.layouts)
        return tree_unflatten([next(self.tensors).detach() if leaf is None else leaf[0] for leaf in leaves], structure)


def _is_kept(func: Any, kwargs: dict | None, keep: frozenset) -> bool:
    """Not what writes into memory that it was given, as experts' products do: that would stay unwritten."""
    return func.overloadpacket in keep and "out" not in (kwargs or {})
