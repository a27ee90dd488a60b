"""What torch.compile's default backend needs beside torch, what it is applied to, and our own C++ as a library."""

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from minillm.files import cache_folder, draft_of
from minillm.model.parts import blocks_of

COMPILERS = ("c++", "g++")
# Sums may be taken in another order, as a vector instruction does; values that are not finite stay what they are.
FLAGS = ["-O3", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"]
FLAGS += ["-fassociative-math", "-freciprocal-math"]
WISHES = (["-march=native", "-fopenmp"], ["-march=native"], [])  # not every compiler has these: the first that works


def shared_library(source: Path) -> ctypes.CDLL:
    """A C++ file, compiled for this processor; the next process finds it in the cache folder.

    ValueError if there is no compiler, it refuses the file, or what it makes cannot be kept and loaded anywhere.
    """
    facts = (source.read_text(), str(FLAGS), str(WISHES), _processor())
    name = f"{source.stem}-{hashlib.sha256(chr(0).join(facts).encode()).hexdigest()[:16]}.so"
    try:
        kept = cache_folder() / "compiled" / name
        if not kept.is_file():
            kept.parent.mkdir(parents=True, exist_ok=True)
            with draft_of(kept) as draft:
                _compile(source, draft)
        return ctypes.CDLL(str(kept))
    except OSError:  # a folder that cannot be written, or executed from
        try:
            with tempfile.TemporaryDirectory(prefix="minillm-") as folder:
                _compile(source, made := Path(folder, name))
                return ctypes.CDLL(str(made))
        except OSError as failure:
            raise ValueError(f"{source.name} cannot be compiled or loaded: {failure}.") from failure


def _compile(source: Path, library: Path) -> None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise ValueError("there is no C++ compiler: install g++.")
    for wishes in WISHES:
        command = [compiler, *FLAGS, *wishes, str(source), "-o", str(library)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode == 0:
            return
    lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
    raise ValueError(f"{compiler} cannot compile {source.name}: {lines[0]}.")


def _processor() -> str:
    """What a library is made for: instructions that another machine with the same home may lack."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        kinds = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    except OSError:
        kinds = {platform.processor()}
    return " ".join((platform.system(), platform.machine(), *sorted(kinds)))


def check_compiler(device: torch.device) -> None:
    """ValueError if inductor cannot make code for this device here."""
    if device.type == "cpu" and not any(map(shutil.which, COMPILERS)):
        raise ValueError("compile needs a C++ compiler on a CPU and there is none: install g++ or leave it out.")
    if device.type == "cuda" and find_spec("triton") is None:
        raise ValueError("compile needs triton on a CUDA GPU and it is not installed: install it or leave it out.")


def compile_blocks(model: nn.Module) -> None:
    """Compiles the forward pass of each of `model.blocks`, in place. They are alike, so one compilation serves all.

    The whole model as one graph would have one backward node, which returns all gradients at its end: nothing could be
    reduced while backward computes, and nothing could be gathered block by block. Hooks of a block stay outside.
    """
    for block in blocks_of(model):
        block.forward = torch.compile(block.forward)
