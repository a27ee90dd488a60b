"""The same solved script as plain Python, under torchrun, and as two agents: the same receipt."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from course.kit.execute import environment

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted((ROOT / "solutions" / "torchrun").glob("[0-9][0-9]_*.py"))
EACH = [pytest.param(path, id=path.stem) for path in SCRIPTS]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
pytestmark = pytest.mark.full


@pytest.fixture
def start():
    """Starts a command; what still runs after the test is asked to end, and an agent then ends its ranks."""
    started = []

    def start(*command):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(list(map(str, command)), env=environment(strict=False), **pipes))
        return started[-1]

    yield start
    for process in started:
        process.terminate()
        process.wait()


def finish(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


@pytest.mark.drawn(3)
@pytest.mark.parametrize("script", EACH)
def test_three_worlds_give_one_receipt(script, start):
    alone = finish(start(sys.executable, script))
    assert " off" not in alone and " ok" in alone
    assert finish(start(*TORCHRUN, "--nproc-per-node", "4", script)) == alone
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", script.stem]
    agents = [start(*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2", *rendezvous, script) for _ in range(2)]
    assert sorted(map(finish, agents)) == ["", alone]


@pytest.mark.drawn(3)
@pytest.mark.parametrize("script", EACH)
def test_unsolved_script_says_so(script, start):
    unsolved = ROOT / "labs" / "torchrun" / script.name
    assert "not written yet" in finish(start(sys.executable, unsolved))
