"""`minillm.measure.wire` and its like are callables whichever module was imported first, and importing costs little."""

import subprocess
import sys

import pytest

PUBLIC = ("machine", "memory", "save_trace", "timeline", "trace", "wire")


@pytest.mark.parametrize(
    "first",
    [
        "import minillm.measure",
        "import minillm.measure.wire, minillm.measure.machine, minillm.measure.memory_tracker",
        "from minillm.measure.machine import Machine; from minillm.measure.wire import loopback",
        "import minillm.measure as m; m.memory; import importlib; importlib.import_module('minillm.measure.timeline')",
        "from minillm.measure import wire, memory; import minillm.measure.wire",
    ],
)
def test_public_names_are_callables_in_every_import_order(first):
    check = f"import minillm.measure as m; print([n for n in {PUBLIC} if not callable(getattr(m, n))])"
    done = subprocess.run([sys.executable, "-c", f"{first}\n{check}"], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_importing_is_light():
    heavy = ("matplotlib", "IPython", "transformers")
    code = f"import sys, minillm.measure; print([n for n in {heavy} if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_unknown_name():
    import minillm.measure

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = minillm.measure.nothing
