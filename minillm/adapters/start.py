"""What a run with adapters starts from: a folder's weights, perhaps as NF4 codes, and the adapters' initial values.

A model asks for its initial values one parameter at a time (`model.draw`), the whole one or, where it is cut over
ranks, its part. `BaseFolder.draw` answers from a Hugging Face folder, so that whatever builds a model of random weights
builds this one, too: pipeline stages read their own layers, and with ZeRO-3 no rank ever holds all of them.
"""

import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from minillm.adapters.attach import adapted_shapes, attach
from minillm.adapters.codes import quantized_part
from minillm.adapters.lora import LoraConfig, base_name, initial_adapter, is_adapter
from minillm.adapters.parallel import part_of_adapted
from minillm.comm import Group
from minillm.model import ModelConfig
from minillm.model.hf.load import open_folder
from minillm.model.initialise import Draw, initial
from minillm.parallel.sharding.placement import Placement
from minillm.parallel.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from minillm.parallel.tensor_parallel.plan import whole_shapes
from minillm.parallel.tensor_parallel.quantized import cut_layer
from minillm.quantize.formats import NF4
from minillm.quantize.linear import QuantizedLinear

SAMPLE = 4  # rows of a tensor that its fingerprint looks at


class BaseFolder:
    """A Hugging Face folder as the source of initial values. config: of its model.

    fingerprint: tells bases apart, by names and shapes of all tensors and the first rows of each. ValueError for a
    folder that `load_hf` refuses, and for one whose layers are quantized.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        opened = open_folder(self.folder)
        if opened.quantized:
            raise ValueError(f"{folder} is quantized already: start from the folder that it was made of.")
        self.config, self._stored = opened.config, opened.stored
        self._pieces: dict[str, list[tuple[str, int, tuple[int, ...]]]] = {}  # parameter -> stored name, start, index
        shapes = whole_shapes(self.config)
        for stored, pieces in opened.held.items():
            start = 0
            for piece in pieces:
                self._pieces.setdefault(piece.name, []).append((stored, start, piece.index))
                start += shapes[piece.name][len(piece.index)]

    @property
    def fingerprint(self) -> str:
        crc = 0
        for name in sorted(self._stored):
            tensor = self._stored[name].get_slice(name)
            about = f"{name} {tensor.get_shape()} {tensor.get_dtype()}".encode()
            crc = zlib.crc32(about + tensor[:SAMPLE].contiguous().view(torch.uint8).numpy().tobytes(), crc)
        return f"{crc:08x}"

    def draw(self, config: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
        """The whole parameter as it is stored; a buffer, which no folder has, as `initial` draws it."""
        if name not in self._pieces:
            return initial(config, name, shape, seed)
        whole: Tensor | None = None
        for stored, start, index in self._pieces[name]:
            count = shape[len(index)]
            part = self._stored[stored].get_slice(stored)[start : start + count]
            whole = part.new_empty(shape) if whole is None else whole
            whole[index] = part
        return whole


@dataclass(frozen=True)
class Start:
    """Where training starts. base: a folder, or what has a `draw` like its; None = values drawn from the seed. lora:
    adapters, which alone are trained; None = everything is. qlora: the linear layers of the blocks are kept as NF4
    codes (Dettmers et al. 2023).

    A strategy builds a model on "meta", has it `read_base`, cuts it over ranks, has it `add_adapters`, then `fill`s it.
    """

    base: BaseFolder | None = None
    lora: LoraConfig | None = None
    qlora: bool = False

    def __post_init__(self) -> None:
        if self.qlora and self.lora is None:
            raise ValueError("qlora trains adapters beside 4-bit weights, which cannot learn themselves: give lora.")

    def read_base(self, module: nn.Module) -> None:
        """Before the module is cut over ranks."""
        if self.base is not None:
            module.draw = self.base.draw

    def add_adapters(self, module: nn.Module, tp: Group | None = None) -> None:
        """After it was cut, over the ranks of `tp`: attaches adapters and has `draw` know their values."""
        if (lora := self.lora) is None:
            return
        base: Draw = module.draw

        def draw(config: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
            if not is_adapter(name):
                return base(config, base_name(name), shape, seed)
            whole = adapted_shapes(config, lora)[name]
            part = () if tp is None else (part_of_adapted(config, name, tp.rank, tp.world_size),)
            return Placement(whole, part).cut(initial_adapter(lora, name, tuple(whole), seed))

        adapted_shapes(module.config, lora)  # of the whole model: this part need not have all targets
        attach(module, lora, seed=None, is_whole=False)
        module.draw = draw

    def fill(
        self,
        module: nn.Module,
        seed: int,
        device: torch.device | str,
        is_sharded: bool = False,
        tp: Group | None = None,
    ) -> None:
        """Gives a module on "meta" its memory and values. is_sharded: but for codes, which no rank shards, a wrapper
        does that. tp: over whose ranks it was cut; codes are made of whole layers, and cut afterwards."""
        layers = linears_of(module) if self.qlora else {}
        for name in layers:
            module.set_submodule(name, nn.Identity())
        if not is_sharded:
            module.to_empty(device=device)
            module.initialize(seed)
        draw = initial if self.base is None else self.base.draw
        for name, cut in layers.items():
            whole_name = base_name(f"{name}.weight").removesuffix(".weight")
            layer = quantized(module.config, whole_name, cut, draw, seed, device)
            if tp is not None:
                layer = cut_layer(whole_name, layer, module.config, tp)
            module.set_submodule(name, quantized_part(layer, cut))


def linears_of(module: nn.Module) -> dict[str, nn.Module]:
    """The layers that become NF4 codes, whole or cut over ranks. ValueError for experts."""
    if module.config.moe is not None:
        raise ValueError("qlora covers dense layers, and this model has experts: leave qlora out.")
    kinds = (nn.Linear, ColumnParallelLinear, RowParallelLinear)
    found = {name: layer for name, layer in module.named_modules() if type(layer) in kinds}
    return {name: layer for name, layer in found.items() if name.startswith("blocks.")}


@torch.no_grad()
def quantized(
    config: ModelConfig, name: str, cut: nn.Module, draw: Draw, seed: int, device: torch.device | str
) -> QuantizedLinear:
    """A layer of the whole model, by its name there, as codes of the values that are drawn: one layer is whole at a
    time. cut: the layer, or a rank's part of it, on "meta"."""
    values = {}
    for each, parameter in cut.named_parameters():
        shape = tuple(whole_shapes(config)[f"{name}.{each}"])
        values[each] = draw(config, f"{name}.{each}", shape, seed).to(device, parameter.dtype)
    outputs, inputs = values["weight"].shape
    whole = nn.Linear(inputs, outputs, bias="bias" in values, device="meta")
    for each, value in values.items():
        setattr(whole, each, nn.Parameter(value, requires_grad=False))
    return QuantizedLinear.of(whole, NF4())
