"""The fork server: silent under Ctrl-C, which reaches every process of a terminal; loaded with what its ranks need, and
never with what has been edited since."""

import os
import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import torch
from minillm.comm import launch

print("ready", flush=True)
try:
    while True:
        launch(lambda group: group.rank, 2)
except KeyboardInterrupt:
    print("stopped", flush=True)
"""


@pytest.mark.full
@pytest.mark.drawn(2)
@pytest.mark.parametrize("seconds", [0.1, 1.5])
def test_an_interrupt_of_the_whole_group_shows_no_traceback_of_helpers(tmp_path, seconds):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, str(file)], start_new_session=True, **pipes) as program:
        assert program.stdout.readline() == "ready\n"
        time.sleep(seconds)  # while the server starts, loads torch, or ranks start
        os.killpg(program.pid, signal.SIGINT)
        out, err = program.communicate(timeout=300)
    assert out == "stopped\n" and err == ""


AHEAD = """
import os
import sys

from minillm.comm import launch
from minillm.comm.launch.forkserver import load_ahead


def where(group):
    import loaded_once

    return loaded_once.__file__, loaded_once.PID == os.getpid(), os.environ.get("PYTHONSAFEPATH")


load_ahead(["loaded_once", "no_such_module"])
print(launch(where, 2))
with open(sys.argv[1], "a") as file:
    file.write("edited = True\\n")
print(launch(where, 2))
"""


@pytest.mark.full
def test_modules_are_loaded_by_the_server_and_from_this_programs_path(tmp_path):
    """Not from the folder in which it happens to run, whose module of the same name is another."""
    program, elsewhere = tmp_path / "program", tmp_path / "elsewhere"
    for folder in (program, elsewhere):
        folder.mkdir()
        (folder / "loaded_once.py").write_text("import os\nPID = os.getpid()\n")
    (program / "main.py").write_text(AHEAD)
    command, file = [sys.executable, str(program / "main.py")], str(program / "loaded_once.py")
    done = subprocess.run([*command, file], cwd=elsewhere, capture_output=True, text=True)
    loaded, edited = ([(file, by_the_rank, None)] * 2 for by_the_rank in (False, True))
    assert done.stdout.splitlines() == [str(loaded), str(edited)], done.stderr


EDITED = """
import os
import sys
from pathlib import Path

from course import loaded
from minillm.comm import launch


def seen(group):
    return loaded.VERSION, loaded.PID == os.getpid()


file = Path(loaded.__file__)
print(launch(seen, 2))
for version in ("second", "third!"):
    file.write_text(file.read_text().replace(loaded.VERSION, version))
    print(launch(seen, 2))
    loaded.VERSION = version
file.write_text("no Python")
try:
    launch(seen, 2)
except Exception as error:
    print(type(error).__name__, "invalid syntax" in str(error))
"""


@pytest.mark.full
def test_ranks_find_loaded_what_is_unchanged_and_see_each_edit(tmp_path):
    """A module of ours is loaded by the server until it is edited, and by every rank from then on."""
    (tmp_path / "course").mkdir()
    (tmp_path / "course/__init__.py").touch()
    (tmp_path / "course/loaded.py").write_text("import os\nPID, VERSION = os.getpid(), 'first'\n")
    (tmp_path / "main.py").write_text(EDITED)
    done = subprocess.run([sys.executable, str(tmp_path / "main.py")], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        str([("first", False)] * 2),
        str([("second", True)] * 2),
        str([("third!", True)] * 2),
        "RankError True",
    ], done.stderr
