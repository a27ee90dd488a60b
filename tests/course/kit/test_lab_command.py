import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from course.commands import lab
from course.kit import masters
from course.kit.execute import environment
from minillm.__main__ import run

REPO = Path(__file__).parents[3]
FIXTURE = REPO / "tests" / "course" / "exercises" / "fixture"


@pytest.fixture
def home(tmp_path, monkeypatch):
    shutil.copytree(FIXTURE, tmp_path / "course")
    master = tmp_path / "course" / "course" / "lab90_fixture" / "notebook.py"
    lab = tmp_path / "course" / "labs" / "90_fixture.ipynb"
    lab.parent.mkdir(exist_ok=True)
    lab.write_text(masters.write(masters.lab(master)))
    monkeypatch.chdir(tmp_path / "course")
    return tmp_path / "course"


def test_unknown_lab_is_refused_with_the_list(home, capsys):
    assert run(["lab", "nonsense"]) == 2
    assert capsys.readouterr().err == "minillm: no lab is called 'nonsense'; there are 90_fixture\n"


def test_course_without_notebooks_says_how_to_build_them(home, capsys):
    (home / "labs" / "90_fixture.ipynb").unlink()
    assert run(["lab"]) == 2
    assert "python -m minillm notebooks" in capsys.readouterr().err


def test_taken_port_is_one_line(home, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(["lab", "--port", str(port)]) == 2
    assert capsys.readouterr().err.startswith(f"minillm: --port {port} is taken")
    assert run(["lab", "--port", "99999"]) == 2
    assert "'--port'" in capsys.readouterr().err


@pytest.mark.full
def test_serves_on_loopback_with_token_and_stops_on_interrupt(home):
    """The real server: prints its address, refuses strangers, asks nobody for news, leaves nothing behind."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "minillm", "lab", "90", "--no-browser", "--port", str(port)],
        cwd=home,
        env=os.environ | {"PYTHONPATH": str(REPO), "HOME": str(home), "JUPYTER_CONFIG_DIR": str(home / "config")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    watchdog = threading.Timer(60, server.kill)
    watchdog.start()
    try:
        url = next(match[0] for line in server.stdout if (match := re.search(r"http://\S+", line)))
        assert url.startswith(f"http://127.0.0.1:{port}/lab/tree/labs/90_fixture.ipynb?token=")
        page = urllib.request.urlopen(url, timeout=20).read().decode()
        assert re.search(r'"news":\s*{"disabled":\s*true}', page)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api/contents", timeout=20)
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=30) == 0
    finally:
        watchdog.cancel()
        server.kill()
        server.wait()
        server.stdout.close()
    for _ in range(100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.05)
    pytest.fail("something still listens")


@pytest.mark.parametrize(("shell", "settings"), [("bash", ".bashrc"), ("zsh", ".zshrc"), ("sh", "")])
def test_python_in_a_terminal_is_the_one_that_serves(shell, settings, tmp_path, monkeypatch):
    """Also where the user's own settings put another python in front; they hold otherwise."""
    if not (path := shutil.which(shell)):
        pytest.skip(f"no {shell} here")
    other = tmp_path / "other" / "python"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    if settings:
        (tmp_path / settings).write_text(f"PATH={other.parent}:$PATH\nMINE=kept\n")
    for variable, value in (("SHELL", path), ("HOME", str(tmp_path)), ("PATH", "/usr/bin:/bin")):
        monkeypatch.setenv(variable, value)
    monkeypatch.delenv("ZDOTDIR", raising=False)
    command = [*lab._shell(), "-i", "-c", "echo $MINE; command -v python"]
    said = subprocess.run(command, env=environment(strict=False), capture_output=True, text=True, timeout=60).stdout
    assert said.split() == [*(["kept"] if settings else []), str(Path(sys.executable).parent / "python")]
