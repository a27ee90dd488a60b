"""Signals to the launching process while ranks start, at one line of it after the other: it ends, and so do they.

Each point is a process forked from one that has loaded torch. Eight points by default, eighty with MINILLM_PROOF=all.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[3]
SWEEP = """
import dis, functools, json, multiprocessing, os, signal, sys, tempfile, time
from multiprocessing import popen_forkserver, process
from pathlib import Path
from minillm.comm import launch
from minillm.comm.launch import forkserver, launcher

FILES = {each.__file__ for each in (launcher, forkserver, multiprocessing.forkserver, popen_forkserver, process)}
forkserver.PRELOAD.clear()  # ranks load what they need: the server starts at once
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it


@functools.cache
def lines(code):
    # Where a signal is handled: not at the bare `try` of a line, and at the first instruction of others.
    return {i.offset for i in dis.get_instructions(code) if i.opname != "NOP"}


class Trace:
    def __init__(self, number, wanted):
        self.number, self.wanted, self.count, self.started = number, wanted, 0, None

    def enter(self, frame, event, arg):
        if frame.f_code.co_filename not in FILES:
            return None
        if frame.f_code.co_name == "_watch" and self.started is None:
            self.started = self.count
            if self.wanted is None:
                print(self.started, flush=True)
                os.kill(os.getpid(), signal.SIGTERM)
        return self.line

    def line(self, frame, event, arg):
        if event == "line" and frame.f_lasti in lines(frame.f_code):
            self.count += 1
            if self.count == self.wanted:
                sys.settrace(None)
                signal.raise_signal(self.number)
        return self.line


def point(number, wanted, folder):
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    sys.settrace(Trace(number, wanted).enter)
    try:
        launch(lambda group: time.sleep(1000), 2)
    except KeyboardInterrupt:
        sys.settrace(None)
        multiprocessing.util._exit_function()  # as at the end of a process that was not forked
        os._exit(130)


for line in sys.stdin:
    number, wanted, folder = json.loads(line)
    if (child := os.fork()) == 0:
        point(number, wanted, folder)
    due, ended = time.monotonic() + 120, (0, None)
    while ended[0] == 0 and time.monotonic() < due:
        time.sleep(0.01)
        ended = os.waitpid(child, os.WNOHANG)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
    print(json.dumps(ended[1] if ended[0] else "still running"), flush=True)
"""


@pytest.fixture
def sweep(tmp_path):
    """Has a signal sent at a point and returns how the launching process ended, with the folder that it used."""
    command, pipes = [sys.executable, "-c", SWEEP], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = subprocess.Popen(command, env=environ, text=True, stderr=(tmp_path / "said").open("w"), **pipes)

    def send(number, wanted):
        folder = tmp_path / f"{number} {wanted}"
        folder.mkdir()
        program.stdin.write(json.dumps([number, wanted, str(folder)]) + "\n")
        program.stdin.flush()
        counted = int(program.stdout.readline()) if wanted is None else None
        return json.loads(program.stdout.readline()), folder, counted

    yield send
    program.stdin.close()
    program.kill()
    program.wait()


def left_of(folder):
    """Processes that the launch in this folder has started."""
    return [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("TMPDIR") == str(folder)]


@pytest.mark.full
def test_a_signal_at_any_line_of_the_start_ends_everything(sweep, tmp_path):
    status, folder, lines = sweep(signal.SIGTERM, None)
    assert os.WTERMSIG(status) == signal.SIGTERM and lines > 100
    print(f"{lines} lines", file=sys.stderr)
    points = [*range(1, lines + 1), *(lines + more for more in (5, 20, 60, 200))]
    every = len(points) // (40 if os.environ.get("MINILLM_PROOF") == "all" else 4)
    for number in (signal.SIGINT, signal.SIGTERM):
        for wanted in points[every // 2 :: every]:
            status, folder, _ = sweep(number, wanted)
            assert status != "still running", (number, wanted)
            if number == signal.SIGTERM:
                assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == number, wanted
            else:
                assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 130, wanted
            due = time.monotonic() + 120
            while (left := left_of(folder)) and time.monotonic() < due:
                psutil.wait_procs(left, timeout=1)
            assert not left, (number, wanted, left)
            assert number == signal.SIGTERM or not list(folder.iterdir()), (wanted, list(folder.iterdir()))
