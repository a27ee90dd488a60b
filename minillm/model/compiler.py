"""What torch.compile's default backend needs beside torch, and what it is applied to."""

import shutil
from importlib.util import find_spec

import torch
from torch import nn


def check_compiler(device: torch.device) -> None:
    """ValueError if inductor cannot make code for this device here."""
    if device.type == "cpu" and not (shutil.which("c++") or shutil.which("g++")):
        raise ValueError("compile needs a C++ compiler on a CPU and there is none: install g++ or leave it out.")
    if device.type == "cuda" and find_spec("triton") is None:
        raise ValueError("compile needs triton on a CUDA GPU and it is not installed: install it or leave it out.")


def compile_blocks(model: nn.Module) -> None:
    """Compiles the forward pass of each of `model.blocks`, in place. They are alike, so one compilation serves all.

    The whole model as one graph would have one backward node, which returns all gradients at its end: nothing could be
    reduced while backward computes, and nothing could be gathered block by block. Hooks of a block stay outside.
    """
    blocks = model.blocks.values() if isinstance(model.blocks, nn.ModuleDict) else model.blocks
    for block in blocks:
        block.forward = torch.compile(block.forward)
