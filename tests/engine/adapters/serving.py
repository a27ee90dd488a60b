"""Sixteen adapters of ranks 4 to 64 beside a small base, as folders of peft's, and what the merged models say."""

from pathlib import Path

import torch

from minillm.adapters import LoraConfig, attach, detach, merge
from minillm.adapters.attach import adapter_parameters
from minillm.adapters.peft_folder import load_peft, save_peft
from minillm.model import ModelConfig, Transformer
from minillm.model.generate import generate

CONFIG = ModelConfig(61, 32, 64, 2, 4, 2, max_seq_len=64, init_std=0.2)
TARGETS = (("all",), ("q", "v"), ("o", "down"), ("k", "gate", "up"))
NAMES = [f"tenant-{number}" for number in range(16)]


def base(seed: int = 2, config: ModelConfig = CONFIG) -> Transformer:
    return Transformer(config, seed=seed)


def write_adapter(folder: Path, number: int, config: ModelConfig = CONFIG, rank: int | None = None, **more) -> Path:
    """Ranks 4, 8, ... 64; every second with rsLoRA, in the layers of TARGETS by turns."""
    model = Transformer(config, seed=2)
    lora = LoraConfig(rank or 4 * (number + 1), TARGETS[number % 4], alpha=8.0, rslora=number % 2 == 1)
    attach(model, lora, seed=number)
    draw = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.6 / lora.rank**0.5)
    save_peft(model, lora, folder, **more)
    return folder


def write_all(folder: Path) -> dict[str, Path]:
    return {name: write_adapter(folder / name, number) for number, name in enumerate(NAMES)}


def merged(folder: Path, model: Transformer | None = None) -> Transformer:
    model = model or base()
    load_peft(model, folder)
    merge(model)
    detach(model)
    return model


def right(model: Transformer, prompt: list[int], tokens: int) -> list[int]:
    return list(generate(model, prompt, tokens))
