"""What torch.compile's default backend needs beside torch."""

import shutil
from importlib.util import find_spec

import torch


def check_compiler(device: torch.device) -> None:
    """ValueError if inductor cannot make code for this device here."""
    if device.type == "cpu" and not (shutil.which("c++") or shutil.which("g++")):
        raise ValueError("compile needs a C++ compiler on a CPU and there is none: install g++ or leave it out.")
    if device.type == "cuda" and find_spec("triton") is None:
        raise ValueError("compile needs triton on a CUDA GPU and it is not installed: install it or leave it out.")
