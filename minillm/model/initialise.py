"""Initial values of a model's parameters: each is a function of (seed, name), so every layout begins with the same."""

import hashlib
import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from minillm.model.config import ModelConfig

Draw = Callable[[ModelConfig, str, tuple[int, ...], int], Tensor]  # (config, name, shape, seed) -> what it starts as


def draw_all(module: nn.Module, seed: int) -> None:
    """Gives a model, or a part of one, the initial values of its parameters and of the biases that balance experts."""
    biases = ((name, buffer) for name, buffer in module.named_buffers() if name.endswith(".balance_bias"))
    for name, tensor in itertools.chain(module.named_parameters(), biases):
        tensor.copy_(module.draw(module.config, name, tuple(tensor.shape), seed))


def initial(config: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The initial value of one parameter, a function of (seed, name) alone: float32, on the CPU.

    A rank that holds a slice draws the whole parameter (its `shape` is given) and keeps its part; a pipeline stage
    asks for its blocks by their names in the whole model. Both equal the model of a single process.
    """
    if name.endswith("norm.weight"):
        return torch.full(shape, 1 - config.norm_offset, device="cpu")
    if name.endswith((".bias", ".balance_bias")):
        return torch.zeros(shape, device="cpu")
    # two branches per block add up in the residual stream (GPT-2, §2.3)
    into_residual = name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj"))
    std = config.init_std / math.sqrt(2 * config.num_layers) if into_residual else config.init_std
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape, dtype=torch.float32, device="cpu").normal_(0.0, std, generator=generator)


class WithoutInitialisation(TorchFunctionMode):
    """Modules made inside keep uninitialised memory.

    torch's own initialisation would draw from the global generator, and on "meta" it first loads torch's compiler.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(function, "__module__", "") == "torch.nn.init":
            return kwargs.get("tensor", args[0] if args else None)
        return function(*args, **kwargs)
