"""`quantize(model, settings)`: the linear layers of a model become `QuantizedLinear`, in place.

    method        what it needs         what it does to a block
    rtn           nothing               rounds every weight to the nearest value of its grid
    awq           text to calibrate on  rescales inputs and weights first (rescale.py)
    gptq          text to calibrate on  rounds column by column, the rest makes good for the error (gptq.py)
    smoothquant   text to calibrate on  rescales, and rounds the inputs too, in int8 with a scale for each token

Embedding, norms, routers and the head stay as they are: they are few, or what they hold is looked up, not multiplied.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minillm.model.moe.experts import Experts
from minillm.model.transformer import Block, Transformer, check_tokens
from minillm.quantize.calibrate import Group, block_by_block, groups_of
from minillm.quantize.experts import separate_experts, weights_of_each
from minillm.quantize.formats import Format, Int
from minillm.quantize.gptq import gptq
from minillm.quantize.joined import join_layers
from minillm.quantize.linear import QuantizedLinear
from minillm.quantize.rescale import awq_factors, rescale, smooth_factors

METHODS = ("rtn", "awq", "gptq", "smoothquant")


@dataclass(frozen=True)
class Settings:
    """format: of the weights. method: see above. skip: a layer whose name holds one of these, such as "blocks.0." or
    "down_proj", is not rounded (a rescaling of the layer behind it may still divide its rows). damping: of GPTQ's
    Hessian."""

    format: Format
    method: str = "rtn"
    skip: tuple[str, ...] = ()
    damping: float = 0.01

    def __post_init__(self):
        if self.method not in METHODS:
            raise ValueError(f"method {self.method!r} is unknown: use one of {', '.join(METHODS)}.")
        if self.method == "smoothquant" and self.format != Int(scale_dtype=self.format.scale_dtype):
            raise ValueError("smoothquant multiplies int8 with int8: use bits 8, symmetric, one scale per output.")
        if not 0 < self.damping < 1:
            raise ValueError(f"damping {self.damping} must lie between 0 and 1.")

    @property
    def needs_text(self) -> bool:
        return self.method != "rtn"

    @property
    def quantizes_inputs(self) -> bool:
        return self.method == "smoothquant"


@dataclass(frozen=True)
class Receipt:
    """bytes_before, bytes_after: of the whole model. bits: per weight of the quantized layers, scales included.
    errors: layer -> Σ ‖(W - Ŵ) x‖² / Σ ‖W x‖² on the calibration's text; none without text. kernels: what multiplies,
    and how many layers it serves."""

    bytes_before: int
    bytes_after: int
    bits: float
    errors: dict[str, float]
    kernels: dict[str, int]

    def __str__(self) -> str:
        by = ", ".join(f"{kernel} ({count} layers)" for kernel, count in self.kernels.items())
        worst = max(self.errors, key=self.errors.get, default=None)
        error = "" if worst is None else f"; largest output error {self.errors[worst]:.2%}, of {worst}"
        sizes = f"{self.bytes_before / 1e6:.1f} -> {self.bytes_after / 1e6:.1f} MB"
        return f"{sizes}, {self.bits:.2f} bits a quantized weight; multiplied by {by}{error}"


@torch.no_grad()
def quantize(
    model: Transformer, settings: Settings, windows: Tensor | None = None, *, progress: bool = False
) -> Receipt:
    """windows: [n, seq] ids to calibrate on; "rtn" uses them only to measure errors.

    ValueError, and nothing is changed, if the method needs text and has none, if a group does not divide the inputs of
    a layer, if its weights are not finite, or if the model is quantized already.
    """
    if any(isinstance(module, QuantizedLinear) for module in model.modules()):
        raise ValueError("this model is quantized already: load the one that it was made of.")
    if settings.needs_text and windows is None:
        raise ValueError(f"method {settings.method!r} calibrates on text: give windows of tokens.")
    if windows is not None and not windows.numel():
        raise ValueError("calibration has no text: give at least one window of tokens.")
    if windows is not None:
        check_tokens(windows, model.config)
    before = nbytes(model)
    _check_layers(model, settings)
    separate_experts(model)
    errors: dict[str, float] = {}
    for number, (block, groups) in enumerate(_blocks(model, windows, progress)):
        for group in groups:
            if not any(_stays(f"blocks.{number}.{name}", settings) for name in group.layers):
                _prepare(group, settings)
        for group in groups:
            for name, layer in group.layers.items():
                whole = f"blocks.{number}.{name}"
                if not _stays(whole, settings):
                    quantized = _rounded(layer, group, settings)
                    if group.inputs is not None and group.inputs.rows:
                        errors[whole] = _relative_error(layer.weight.float(), quantized.weight, group)
                    block.set_submodule(name, quantized)
    join_layers(model)
    layers = list(quantized_layers(model).values())
    weights = sum(layer.out_features * layer.in_features for layer in layers)
    bits = 8 * sum(layer.nbytes - (0 if layer.bias is None else layer.bias.nbytes) for layer in layers) / weights
    return Receipt(before, nbytes(model), bits, errors, dict(Counter(layer.kernel for layer in layers)))


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Name -> layer."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def nbytes(model: nn.Module) -> int:
    """Bytes of all parameters of a model, embedding and norms included, and of the codes, scales and zero points of
    its quantized layers; a parameter that is shared counts once."""
    layers = quantized_layers(model)
    inside = {id(each) for layer in layers.values() for each in layer.parameters()}
    plain = sum(each.nbytes for each in model.parameters() if id(each) not in inside)
    return plain + sum(layer.nbytes for layer in layers.values())


def _blocks(model: Transformer, windows: Tensor | None, progress: bool) -> Iterator[tuple[Block, list[Group]]]:
    if windows is not None:
        return block_by_block(model, windows, progress)
    return ((block, groups_of(block)) for block in model.blocks)


def _prepare(group: Group, settings: Settings) -> None:
    if settings.method == "awq":
        rescale(group, awq_factors(group, settings.format))
    elif settings.method == "smoothquant":
        rescale(group, smooth_factors(group))


def _rounded(layer: nn.Linear, group: Group, settings: Settings) -> QuantizedLinear:
    rounded = None
    if settings.method == "gptq" and group.inputs.rows:
        rounded = gptq(layer.weight, group.inputs.gram, settings.format, damping=settings.damping)
    return QuantizedLinear.of(layer, settings.format, rounded, quantizes_inputs=settings.quantizes_inputs)


def _relative_error(weight: Tensor, rounded: Tensor, group: Group) -> float:
    whole = group.inputs.error(weight)
    return group.inputs.error(rounded - weight) / whole if whole else 0.0


def _stays(name: str, settings: Settings) -> bool:
    return any(part in name for part in settings.skip)


def _check_layers(model: Transformer, settings: Settings) -> None:
    """ValueError before anything is changed. Stacked experts go by the names that they will have as layers."""
    weights = {name: module.weight for name, module in model.named_modules() if type(module) is nn.Linear}
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            for number, parts in enumerate(weights_of_each(module)):
                weights |= {f"{name}.{number}.{part}": weight for part, weight in parts.items()}
    weights = {name: weight for name, weight in weights.items() if name.startswith("blocks.")}
    if unknown := [part for part in settings.skip if not any(part in name for name in weights)]:
        such = next(iter(weights))
        raise ValueError(f"skip {unknown[0]!r} is in no layer's name: give parts of names such as {such}.")
    if not (chosen := {name: weight for name, weight in weights.items() if not _stays(name, settings)}):
        raise ValueError(f"skip {', '.join(settings.skip)} leaves no layer to quantize: skip less.")
    for name, weight in chosen.items():
        settings.format.check_size(weight.shape[1], name)
        if not weight.isfinite().all():
            raise ValueError(f"{name} has weights that are not finite: load another checkpoint.")
