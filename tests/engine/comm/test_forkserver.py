"""Ctrl-C reaches every process of a terminal: the fork server and fresh ranks stay silent, the launcher stops."""

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

from minillm.comm import launch
from minillm.comm.launch.forkserver import load_ahead


def where(group):
    import loaded_once

    return loaded_once.__file__, loaded_once.PID == os.getpid(), os.environ.get("PYTHONSAFEPATH")


load_ahead(["loaded_once", "no_such_module"])
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
    done = subprocess.run([sys.executable, str(program / "main.py")], cwd=elsewhere, capture_output=True, text=True)
    assert done.stdout.strip() == str([(str(program / "loaded_once.py"), False, None)] * 2), done.stderr
