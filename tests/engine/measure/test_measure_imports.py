"""`minillm.measure.wire` and its like are callables whichever module was imported first, and importing costs little."""

import subprocess
import sys

import pytest

PUBLIC = ("machine", "memory", "save_trace", "timeline", "trace", "wire")


ORDERS = (
    "import minillm.measure",
    "import minillm.measure.wire, minillm.measure.machine, minillm.measure.memory_tracker",
    "from minillm.measure.machine import Machine; from minillm.measure.wire import loopback",
    "import minillm.measure as m; m.memory; import importlib; importlib.import_module('minillm.measure.timeline')",
    "from minillm.measure import wire, memory; import minillm.measure.wire",
)
PROGRAM = f"""
import os, torch  # which takes long, and nothing of minillm
for first in {ORDERS}:
    if os.fork() == 0:
        exec(first)
        import minillm.measure as m
        os._exit(any(not callable(getattr(m, name)) for name in {PUBLIC}))
    print(os.wait()[1])
"""


def test_public_names_are_callables_in_every_import_order():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.split() == ["0"] * len(ORDERS), done.stdout + done.stderr


def test_importing_is_light():
    heavy = ("matplotlib", "IPython", "transformers")
    code = f"import sys, minillm.measure; print([n for n in {heavy} if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_unknown_name():
    import minillm.measure

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = minillm.measure.nothing
