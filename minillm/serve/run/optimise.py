"""What makes a model's layers launch fewer kernels: `fuse` joins matrix products, `compile_blocks` what lies between.

`fuse` makes one product of layers that share an input: query, key and value, and a SwiGLU's gate and up. Without a
compiler it also takes one kernel for the rotation and one for the gate (`minillm/model/elementwise_triton.py`).

    q_proj.weight ┐                          one [q + k + v, hidden] matrix; the layers' own parameters become views of
    k_proj.weight ├── rows of one matrix     it, so names, values and memory stay as they are, and so does what is saved
    v_proj.weight ┘

`compile_blocks` puts each block through `torch.compile`, except for attention:

    norm, q k v, rotation │ attention: as it is │ output, residual, norm, mlp, residual
          compiled        │     not traced      │             compiled

Attention stays outside because it writes into the pool and is another object in every pass. All blocks of a kind share
what is compiled, for one token and for any larger number of them, so a layer's number is kept from the compiler. A
CUDA graph (`decode_graphs.py`) records compiled kernels like others; its first two passes, which are not recorded,
compile them.
"""

from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.model import Transformer
from minillm.model.attention import AttentionFunction, sdpa
from minillm.model.compiler import check_compiler
from minillm.model.parts import blocks_of
from minillm.model.transformer import Block, apply_linears


@torch.no_grad()
def fuse(model: Transformer, *, kernels: bool = False) -> int:
    """Fuses what can be; returns how many groups. For inference: an optimizer made before would miss its parameters.

    kernels: the rotation and the gate, too, as one Triton kernel each, where triton is installed
    (`minillm/model/elementwise_triton.py`).
    Left alone are layers that are split over ranks, quantized, adapted or shared: anything but a plain `nn.Linear`.
    """
    count = 0
    kernels = kernels and find_spec("triton") is not None
    for block in blocks_of(model):
        mlp = getattr(block.mlp, "shared", block.mlp)  # experts hold gate and up as one matrix as it is
        if kernels:
            from minillm.model.elementwise_triton import gated_triton, rotate_both_triton

            block.attention.rotate_both = rotate_both_triton
            if mlp is not None:
                mlp.gated = partial(gated_triton, *mlp.gated.args)
        for part, names in ((block.attention, ("q_proj", "k_proj", "v_proj")), (mlp, ("gate_proj", "up_proj"))):
            layers = [getattr(part, name, None) for name in names]
            if getattr(part, "linears", None) is apply_linears and _alike(layers):
                part.linears = Fused(layers)
                count += 1
    return count


class Fused:
    """An `apply_linears` of these layers alone; of any others, it is `apply_linears` itself."""

    def __init__(self, layers: list[nn.Linear]):
        self.layers, self.sizes = tuple(layers), [layer.out_features for layer in layers]
        self.weight = torch.cat([layer.weight for layer in layers])
        self.bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        for layer, weight in zip(layers, self.weight.split(self.sizes), strict=True):
            layer.weight.data = weight
        if self.bias is not None:
            for layer, bias in zip(layers, self.bias.split(self.sizes), strict=True):
                layer.bias.data = bias

    def __call__(self, x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
        if layers != self.layers or not (torch.compiler.is_compiling() or self.holds()):
            return apply_linears(x, *layers)
        return F.linear(x, self.weight, self.bias).split_with_sizes(self.sizes, dim=-1)

    def holds(self) -> bool:
        """Are the parameters still rows of the matrix? Not after `model.to(...)`, which gives each its own memory. No
        compiler can trace addresses, so `CompiledBlock` asks before what it compiled runs."""
        start = self.weight.data_ptr()
        for layer in self.layers:
            if layer.weight.data_ptr() != start or layer.weight.dtype != self.weight.dtype:
                return False
            start += layer.weight.nbytes
        return True


def _alike(layers: list[nn.Module | None]) -> bool:
    if not all(type(layer) is nn.Linear and not layer._forward_hooks for layer in layers):
        return False
    if any(layer.weight.is_meta for layer in layers):
        return False
    kinds = {(layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None) for layer in layers}
    return len(kinds) == 1 and len({layer.weight.data_ptr() for layer in layers}) == len(layers)


def compile_blocks(model: Transformer, backend: bool | str = True) -> None:
    """For inference, in place; parameters keep their names. backend: True = "inductor", or another one of torch's.

    ValueError if there is no such backend, or not what it needs, and for a model that serves adapters.
    """
    from minillm.adapters.routed import is_routed

    if is_routed(model):
        raise ValueError("compile beside adapters: compiled blocks have no place for updates, load the model anew.")
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
        mlp = getattr(block.mlp, "shared", block.mlp)
        self._parts = [part for part in (block.attention, mlp) if hasattr(part, "linears")]
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
        for part in self._parts:
            if isinstance(part.linears, Fused) and not part.linears.holds():
                part.linears = apply_linears  # compiled anew without it
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
