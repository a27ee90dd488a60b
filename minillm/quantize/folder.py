"""Quantized models in Hugging Face folders, in compressed-tensors' layout, which transformers loads, in three kinds:

    pack-quantized     X.weight_packed [out, in · bits / 32] int32, X.weight_scale [out, groups], X.weight_shape [2],
                       X.weight_zero_point [out · bits / 32, groups] int32, if the grid is asymmetric
    int-quantized      X.weight [out, in] int8, X.weight_scale; inputs are rounded per token (W8A8)
    float-quantized    X.weight [out, in] e4m3, X.weight_scale

Codes of 4 bits lie in an int32 from its lowest bits up, each plus 8; zero points likewise, along the outputs. Which
layers are quantized is read from the tensors that are there; how, from `quantization_config` in config.json.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from minillm.files import new_folder
from minillm.model.config import ModelConfig
from minillm.model.hf.families import Piece, config_to_hf, stored_tensors
from minillm.model.hf.weights import Stored
from minillm.model.hf.write import write
from minillm.model.transformer import Transformer
from minillm.quantize.experts import PROJECTIONS, separate_experts
from minillm.quantize.formats import FLOAT8, Float8, Format, Grid, Int
from minillm.quantize.hub import HubLayout, read_hub_layout
from minillm.quantize.in_place import quantized_layers
from minillm.quantize.joined import join_layers
from minillm.quantize.linear import QuantizedLinear
from minillm.quantize.words import from_words, to_words

PACKED, INTS, FLOATS = "pack-quantized", "int-quantized", "float-quantized"
PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
# beginnings of the names of what is copied: the tokenizer's files and how to generate
COPIED = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "chat_template", "generation_config")


@dataclass(frozen=True)
class Layout:
    """How the layers of a folder are kept. name: one of the three above. scale_dtype of the format: as stored."""

    name: str
    format: Format
    quantizes_inputs: bool = False

    def marker(self, weight: str) -> str:
        """The tensor that says that the layer of `X.weight` is quantized."""
        return f"{weight}_packed" if self.name == PACKED else f"{weight}_scale"

    def shapes(self, weight: str, shape: list[int]) -> dict[str, list[int]]:
        """Tensors that hold the layer of `X.weight`, [out, in] -> their shapes."""
        outputs, inputs = shape
        self.format.check_size(inputs, weight)
        scales = {f"{weight}_scale": [outputs, inputs // (self.format.group or inputs)]}
        if self.name != PACKED:
            return {weight: shape} | scales
        words, bits = scales | {f"{weight}_shape": [2]}, self.format.bits
        words[f"{weight}_packed"] = [outputs, -(-inputs * bits // 32)]
        if not self.format.symmetric:
            words[f"{weight}_zero_point"] = [-(-outputs * bits // 32), scales[f"{weight}_scale"][1]]
        return words

    def read(self, weight: str, shape: list[int], stored: Stored) -> tuple[Tensor, Grid]:
        """(codes [out, in], the grid) of the layer of `X.weight`."""

        def tensor(name: str) -> Tensor:
            return stored[name].get_tensor(name)

        scale = tensor(f"{weight}_scale")
        if self.name != PACKED:
            codes = tensor(weight)
            return (codes if self.name == INTS else codes.view(torch.uint8)), Grid(scale.float())
        codes = from_words(tensor(f"{weight}_packed"), self.format.bits, shape[1])
        if self.format.symmetric:
            return codes, Grid(scale.float())
        zero = from_words(tensor(f"{weight}_zero_point").T.contiguous(), self.format.bits, shape[0]).T
        return codes, Grid(scale.float(), zero.float())

    def write(self, weight: str, layers: list[QuantizedLinear]) -> dict[str, Tensor]:
        """The tensors of layers that are stored as one, their outputs after each other."""
        codes = torch.cat([layer.unpacked() for layer in layers])
        scale = {f"{weight}_scale": torch.cat([layer.scale for layer in layers])}
        if self.name != PACKED:
            return scale | {weight: codes if self.name == INTS else codes.view(FLOAT8)}
        scale |= {
            f"{weight}_packed": to_words(codes, self.format.bits),
            f"{weight}_shape": torch.tensor(codes.shape, dtype=torch.int64),
        }
        if not self.format.symmetric:
            zero = torch.cat([layer.zero for layer in layers])
            scale[f"{weight}_zero_point"] = to_words(zero.T.contiguous(), self.format.bits).T.contiguous()
        return scale

    def to_json(self, ignore: list[str]) -> dict:
        """`quantization_config`. ignore: layers that are not quantized, by their stored names."""
        group = self.format.group
        weights = {
            "num_bits": self.format.bits,
            "type": "float" if self.name == FLOATS else "int",
            "symmetric": getattr(self.format, "symmetric", True),
            "strategy": "channel" if group is None else "group",
            "group_size": group,
            "dynamic": False,
        }
        inputs = PER_TOKEN if self.quantizes_inputs else None
        return {
            "quant_method": "compressed-tensors",
            "format": self.name,
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": self.name}
            },
            "ignore": ignore,
        }


def read_layout(raw: dict, scale_dtype: torch.dtype = torch.bfloat16) -> Layout | HubLayout:
    """The layout that a `quantization_config` describes. ValueError for one that is not covered."""
    if raw["quant_method"] in ("gptq", "awq"):
        return read_hub_layout(raw, scale_dtype)
    groups = list((raw.get("config_groups") or {}).values())
    beyond = [key for key in ("kv_cache_scheme", "sparsity_config", "transform_config") if raw.get(key)]
    if beyond:
        raise ValueError(f"quantization_config has {beyond[0]}: load a folder whose weights alone are quantized.")
    if not groups or any(
        each.get(key) != groups[0].get(key) for each in groups for key in ("weights", "input_activations")
    ):
        raise ValueError(f"quantization_config has {len(groups)} kinds of layers: load a folder that has one.")
    weights, inputs = groups[0].get("weights") or {}, groups[0].get("input_activations")
    name, kind, bits = raw.get("format"), weights.get("type", "int"), weights.get("num_bits", 8)
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
    kinds = {PACKED: ("int", None), INTS: ("int", 8), FLOATS: ("float", 8)}
    covered = name in kinds and kinds[name][0] == kind and kinds[name][1] in (None, bits)
    if not covered or strategy not in ("group", "channel") or weights.get("actorder") == "group":
        raise ValueError(
            f"quantization_config has format {name!r}, {kind} of {bits} bits by {strategy!r}, actorder "
            f"{weights.get('actorder')!r}: use {', '.join(kinds)} by 'channel' or 'group', without an index of groups."
        )
    if inputs and {key: inputs.get(key) for key in PER_TOKEN} != PER_TOKEN:
        raise ValueError("quantization_config rounds inputs otherwise than to int8 per token: load another folder.")
    group = weights.get("group_size") if strategy == "group" else None
    if kind == "float":
        return Layout(name, Float8(group=group, scale_dtype=scale_dtype), bool(inputs))
    format = Int(bits=bits, group=group, symmetric=weights.get("symmetric", True), scale_dtype=scale_dtype)
    return Layout(name, format, bool(inputs))


def layout_of(layers: list[QuantizedLinear]) -> Layout:
    """ValueError if there is no layout for these layers, or not one for all."""
    kinds = {(layer.format, layer.quantizes_inputs) for layer in layers}
    if len(kinds) != 1:
        raise ValueError(f"the model's layers have {len(kinds)} formats: quantize all that are quantized alike.")
    return layout_of_format(*kinds.pop())


def layout_of_format(format: Format, quantizes_inputs: bool = False) -> Layout:
    """ValueError for NF4, which compressed-tensors does not have."""
    if not isinstance(format, Int | Float8):
        raise ValueError(f"compressed-tensors has no layout for {type(format).__name__}: use integers or float8.")
    name = FLOATS if isinstance(format, Float8) else INTS if quantizes_inputs else PACKED
    return Layout(name, format, quantizes_inputs)


def empty_model(
    config: ModelConfig,
    held: dict[str, list[Piece]],
    layout: Layout | HubLayout,
    stored: Stored,
    device,
    dtype: torch.dtype,
) -> Transformer:
    """The model with its quantized layers read. held: stored weight -> the pieces it holds, of the quantized ones.
    Other parameters have memory, and no values yet."""
    model = Transformer(config, device="meta", dtype=dtype)
    if any(piece.index for pieces in held.values() for piece in pieces):
        separate_experts(model)
    layers: dict[str, QuantizedLinear] = {}
    linears = {module: model.get_submodule(module) for pieces in held.values() for module in map(module_of, pieces)}
    for module in linears:
        model.set_submodule(module, nn.Identity())
    device = torch.device(device or torch.get_default_device())
    model.to_empty(device=device)
    for weight, pieces in held.items():
        rows = [linears[module_of(piece)].out_features for piece in pieces]
        inputs = linears[module_of(pieces[0])].in_features
        codes, grid = layout.read(weight, [sum(rows), inputs], stored)
        codes, grid, start = codes.to(device), grid.map(lambda each: each.to(device)), 0
        for piece, count in zip(pieces, rows, strict=True):
            own = slice(start, start + count)
            part = grid.map(lambda each, own=own: each[own].clone())
            has_bias = linears[module_of(piece)].bias is not None
            bias = torch.empty(count, dtype=dtype, device=device) if has_bias else None
            layers[module_of(piece)] = QuantizedLinear(
                layout.format, layout.format.pack(codes[own]), part, bias, layout.quantizes_inputs
            )
            start += count
    for module, layer in layers.items():
        model.set_submodule(module, layer)
    join_layers(model)
    return model


def save_quantized(model: Transformer, folder: str | Path, source: str | Path | None = None) -> None:
    """Writes a folder in compressed-tensors' layout, which transformers loads, and `load_hf`: all of it or nothing.

    source: the folder that the model was made of; its config.json is kept, and tokenizer and chat template are copied.
    ValueError if `folder` holds anything already, or if compressed-tensors has no layout for the model.
    """
    folder, layers = Path(folder), quantized_layers(model)
    layout = layout_of(list(layers.values()))
    raw = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    raw |= config_to_hf(model.config, model.embedding.weight.dtype)
    if source is not None:
        raw = json.loads((Path(source) / "config.json").read_text()) | {"dtype": raw["dtype"]}
        raw.pop("torch_dtype", None)
    named = dict(model.named_parameters())
    plain = Transformer(model.config, device="meta")
    tensors: dict[str, Tensor | list[Tensor]] = {}
    ignore: list[str] = []
    for stored, pieces in stored_tensors(model.config, raw["model_type"], dict(plain.named_parameters())).items():
        modules = [module_of(piece) for piece in pieces]
        if stored.endswith(".weight") and all(module in layers for module in modules):
            tensors |= layout.write(stored, [layers[module] for module in modules])
            continue
        if any(module in layers for module in modules) and stored.endswith(".weight"):
            raise ValueError(f"{stored} holds layers that are quantized and others: quantize all of them or none.")
        tensors[stored] = [_parameter(piece, named) for piece in pieces]
        if stored.endswith(".weight") and tensors[stored][0].dim() == 2 and "embed_tokens" not in stored:
            ignore.append(stored.removesuffix(".weight"))
    ignore += [] if "lm_head" in ignore else ["lm_head"]
    raw["quantization_config"] = layout.to_json(ignore)
    with new_folder(folder) as draft:
        for path in sorted(Path(source).iterdir()) if source is not None else []:
            if path.name.startswith(COPIED):
                shutil.copyfile(path, draft / path.name)
        write(tensors, draft, max_shard_bytes=None, beside={"config.json": raw})


def module_of(piece: Piece) -> str:
    """The layer that a piece of a parameter is the weight of; an expert's part names it among the separated ones."""
    if not piece.index:
        return piece.name.rpartition(".")[0]
    expert, *half = piece.index
    return f"{piece.name.rpartition('.')[0]}.{expert}.{PROJECTIONS[half[0] if half else 2]}"


def _parameter(piece: Piece, named: dict[str, Tensor]) -> Tensor:
    """Of a model whose experts are stacked, or are separate layers."""
    return (piece.of(named) if piece.name in named else named[f"{module_of(piece)}.weight"]).detach()
