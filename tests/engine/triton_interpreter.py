"""Cases of a Triton kernel that run in its interpreter, in a process of their own: TRITON_INTERPRET is read when a
kernel is defined, and would stay for every other test."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def check_in_the_interpreter(cases: Path) -> None:
    """All tests of the file pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", str(cases)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
