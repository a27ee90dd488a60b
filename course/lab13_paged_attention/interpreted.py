"""A learner's Triton kernel in Triton's interpreter, in a process of its own.

TRITON_INTERPRET is read when a kernel is defined, and would stay for the whole process: so the function's text goes to
a file, a new Python sets the variable, defines the kernel and runs it on every case.
"""

import ast
import inspect
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

INSTALLED = find_spec("triton") is not None
MISSING = "Triton is not installed here, so this exercise is left out: pip install triton (Linux, no GPU needed)."
_RUN = """
for case in (cases := torch.load(sys.argv[1])):
    sizes = case.pop("sizes")
    kernel[(len(case["q"]),)](*case.values(), **sizes)
torch.save([case["y"] for case in cases], sys.argv[2])
"""


def run(function: Callable, cases: Sequence[dict]) -> list[Tensor]:
    """What the kernel has written to each case's "y". A case: the arguments by name, "sizes" the compile-time ones.

    ValueError with the last line of the kernel's error if it stopped.
    """
    with tempfile.TemporaryDirectory() as folder:
        script, given, found = (Path(folder, name) for name in ("kernel.py", "given.pt", "found.pt"))
        imports = "import math\nimport sys\n\nimport torch\nimport triton\nimport triton.language as tl\n\n\n"
        script.write_text(f"{imports}{_kernel(function)}\n{_RUN}", encoding="utf-8")
        torch.save(list(cases), given)
        environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", str(script), str(given), str(found)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise ValueError(done.stderr.strip().splitlines()[-1])
        return torch.load(found)


def _kernel(function: Callable) -> str:
    """The function's text under the name `kernel`: jitted, its arguments in capitals compile-time constants."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    tree.name, tree.returns, tree.decorator_list = "kernel", None, [ast.parse("triton.jit", mode="eval").body]
    for argument in tree.args.args:
        constant = argument.arg.isupper()
        argument.annotation = ast.parse("tl.constexpr", mode="eval").body if constant else None
    return ast.unparse(ast.fix_missing_locations(tree))
