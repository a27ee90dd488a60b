"""A model's blocks through `torch.compile`, which joins what lies between two matrix products into few kernels.

    norm, q k v, rotation │ attention: as it is │ output, residual, norm, mlp, residual
          compiled        │   not looked into   │             compiled

Attention stays outside because it writes into the pool and is another object in every pass. All blocks of a kind share
what is compiled, for one token and for any larger number of them: so a layer's number is kept from the compiler. A
CUDA graph (`decode_graphs.py`) records compiled kernels like others; its first two passes, which are not recorded, are
the ones that compile.
"""

import torch
from torch import Tensor

from minillm.model import Transformer
from minillm.model.attention import AttentionFunction, sdpa
from minillm.model.compiler import check_compiler
from minillm.model.transformer import Block


def compile_blocks(model: Transformer, backend: bool | str = True) -> None:
    """For inference, in place; parameters keep their names. backend: True = "inductor", or another one of torch's.

    ValueError if there is no such backend, or not what it needs.
    """
    backend = "inductor" if backend is True else backend
    _check(backend, model.embedding.weight.device)
    for block in model.blocks:
        before = block.forward
        if isinstance(before, CompiledBlock):
            before.compile(backend)
        else:
            block.forward = CompiledBlock(block, backend)


class CompiledBlock:
    """Called in place of a block's `forward`."""

    def __init__(self, block: Block, backend: str):
        self._forward, self._attention = block.forward, _Opaque(block.attention.layer)
        block.attention.layer = 0
        self.compile(backend)

    def compile(self, backend: str) -> None:
        self._compiled = torch.compile(self._forward, backend=backend, dynamic=True)

    def __call__(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        attention: AttentionFunction = sdpa,
        positions: Tensor | None = None,
        *more,
    ) -> Tensor:
        self._attention.function = attention
        return self._compiled(x, rotation, self._attention, positions, *more)


class _Opaque:
    """An attention function that is the same object in every pass and that the compiler calls without looking in."""

    def __init__(self, layer: int):
        self.layer, self.function = layer, sdpa

    @torch.compiler.disable
    def __call__(self, *tensors: Tensor, **options) -> Tensor:
        return self.function(*tensors, **{**options, "layer": self.layer})


def _check(backend: object, device: torch.device) -> None:
    known = ["eager", "aot_eager", *torch.compiler.list_backends()]
    if backend not in known:
        raise ValueError(f"compile {backend!r} is unknown: use True for inductor, or one of {', '.join(known)}.")
    if backend == "inductor":
        check_compiler(device)
