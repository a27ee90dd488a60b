"""Adapters in a model: `attach(model, LoraConfig(16, ("q", "v")))`, in place; merge, unmerge, switch off, detach.

    blocks.0.attention.q_proj.weight    ->    blocks.0.attention.q_proj.base.weight     frozen, as all of the model
                                              blocks.0.attention.q_proj.lora_A          trained
                                              blocks.0.attention.q_proj.lora_B          trained

A layer is chosen by its name here, `blocks.0.attention.q_proj`, or in Hugging Face's layout,
`model.layers.0.self_attn.q_proj`: a pattern is the end of either ("q_proj", "self_attn.q_proj"), may contain * and may
leave "_proj" out; "all" is every layer that can have an adapter.
"""

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import nn

from minillm.adapters.dropout import Rows
from minillm.adapters.lora import LoraConfig, LoraLinear, initial_adapter, is_adapter
from minillm.adapters.parallel import adapted, adapted_column_linears
from minillm.model import ModelConfig, Transformer
from minillm.model.hf.families import hf_name
from minillm.model.moe import MoE
from minillm.parallel.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, fused_column_linears
from minillm.quantize.linear import QuantizedLinear

LAYERS = (nn.Linear, QuantizedLinear, ColumnParallelLinear, RowParallelLinear)


def attach(
    model: nn.Module,
    config: LoraConfig,
    *,
    seed: int | None = 0,
    dtype: torch.dtype | None = None,
    is_whole: bool = True,
) -> dict[str, LoraLinear]:
    """Gives the layers that config.targets name an adapter each and freezes everything else. Returns them by name.

    model: a Transformer, or a pipeline's part of one, which may be cut over tensor-parallel ranks. seed: of A's initial
    values; None leaves them unset. dtype: of the adapters; None = the model's. is_whole: a pattern that matches nothing
    is a mistake. ValueError for that, and for a model that has adapters.
    """
    if adapters(model):
        raise ValueError("this model has adapters: merge or detach them first.")
    layers = adaptable(model)
    has_experts = any(isinstance(module, MoE) for module in model.modules())
    chosen = chosen_layers(layers, config.targets, is_whole, has_experts)
    first = next(model.parameters())
    model.requires_grad_(False)
    rows = Rows(positions_of=getattr(model, "positions_of", None))
    for name in chosen:
        layer = adapted(layers[name], config, dtype or first.dtype, first.device, name, rows)
        model.set_submodule(name, layer.train(layers[name].training))
    for module in model.modules():
        if getattr(module, "linears", None) is fused_column_linears:
            module.linears = adapted_column_linears
    made = adapters(model)
    if seed is not None and first.device.type != "meta":
        with torch.no_grad():
            for name, parameter in adapter_parameters(model).items():
                parameter.copy_(initial_adapter(config, name, tuple(parameter.shape), seed))
    return made


def adaptable(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that can have an adapter, by name: the linear ones of the blocks, without routed experts, of which a
    token activates a few only."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, LAYERS)}
    return {name: layer for name, layer in found.items() if name.startswith("blocks.") and ".experts." not in name}


def chosen_layers(
    names: Iterable[str], targets: tuple[str, ...], is_whole: bool = True, has_experts: bool = False
) -> list[str]:
    """Those names that a pattern matches, in order. ValueError for a pattern that matches none."""
    names = list(names)
    for pattern in targets if is_whole else ():
        if not any(matches(pattern, name) for name in names):
            ends = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
            about_experts = "; routed experts have none: their weights are one tensor, and a token activates a part"
            more = about_experts if has_experts else ""
            raise ValueError(f"target {pattern!r} matches no layer: there are {ends} in each block, and all{more}.")
    return [name for name in names if any(matches(pattern, name) for pattern in targets)]


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern names the layer; see the top."""
    if pattern == "all":
        return True
    ends = (pattern, f"{pattern}_proj")
    return any(fnmatchcase(f".{each}", f"*.{end}") for each in (name, hf_name(name)) for end in ends)


def adapters(model: nn.Module) -> dict[str, LoraLinear]:
    """Name of a layer -> the layer with its adapter."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """All that training changes, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if is_adapter(name)}


def merge(model: nn.Module) -> None:
    """Adds every update to its weight: `LoraLinear.merge`. Then `detach` leaves a plain model, which `save_hf` writes.
    ValueError, and nothing has changed, if one cannot."""
    _check_all(model, is_merged=False)
    for layer in adapters(model).values():
        layer.merge()


def unmerge(model: nn.Module) -> None:
    """The inverse of `merge`, to rounding."""
    _check_all(model, is_merged=True)
    for layer in adapters(model).values():
        layer.unmerge()


def detach(model: nn.Module) -> None:
    """Takes the adapters off, merged or not: the layers are what they were, and still frozen."""
    for name, layer in adapters(model).items():
        model.set_submodule(name, layer.base)
    for module in model.modules():
        if getattr(module, "linears", None) is adapted_column_linears:
            module.linears = fused_column_linears


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes what the base does: the frozen reference of preference training."""
    layers = adapters(model).values()
    if any(layer.is_merged for layer in layers):
        raise ValueError("merged adapters cannot be switched off: unmerge them first.")
    before = [layer.is_on for layer in layers]
    try:
        for layer in layers:
            layer.is_on = False
        yield
    finally:
        for layer, was_on in zip(layers, before, strict=True):
            layer.is_on = was_on


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Inside, adapters compute as they will when they are used."""
    layers = adapters(model).values()
    before = [layer.training for layer in layers]
    try:
        for layer in layers:
            layer.eval()
        yield
    finally:
        for layer, was_training in zip(layers, before, strict=True):
            layer.train(was_training)


@functools.lru_cache(4)
def adapted_shapes(config: ModelConfig, lora: LoraConfig | None) -> dict[str, torch.Size]:
    """Shapes of the whole model's parameters by name, adapters included. ValueError for targets that it lacks."""
    model = Transformer(config, device="meta")
    if lora is not None:
        attach(model, lora)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def adapted_kinds(config: ModelConfig, lora: LoraConfig) -> tuple[str, ...]:
    """The last parts of the names of layers that have an adapter, each once: ("q_proj", "v_proj")."""
    names = (name for name in adapted_shapes(config, lora) if is_adapter(name))
    return tuple(dict.fromkeys(name.split(".")[-2] for name in names))


def _check_all(model: nn.Module, is_merged: bool) -> None:
    layers = adapters(model)
    if not layers:
        raise ValueError("this model has no adapters: attach or load some first.")
    for name, layer in layers.items():
        if layer.is_merged != is_merged:
            advice = "a second time would add the updates twice" if layer.is_merged else "there is nothing to take out"
            raise ValueError(f"{name} is {'merged already' if layer.is_merged else 'not merged'}: {advice}.")
        if not isinstance(layer.base.weight, nn.Parameter):
            raise ValueError(
                f"{name} is quantized, and its codes cannot take an update: load the model it was made of, and merge "
                "into that."
            )
