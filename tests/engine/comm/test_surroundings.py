"""Ranks start in odd surroundings, or one sentence says why they cannot."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
from minillm.comm import launch

def total(group):
    import torch
    print("gr\\xf6\\xdfer")
    return group.all_reduce(torch.ones(1)).item()

print(launch(total, 2))
"""
AS_SOMEBODY_ELSE = """
import os
from minillm.comm import launch

os.setgid(65534), os.setuid(65534)
try:
    print(launch(lambda group: group.world_size, 2))
except ValueError as error:
    print(error)
"""


def python(folder: Path, *args: str, without: tuple[str, ...] = (), **environ: str) -> subprocess.CompletedProcess:
    inherited = {name: value for name, value in os.environ.items() if name not in without}
    environ = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), **environ}
    command, environment = [sys.executable, *args], {**inherited, **environ}
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, timeout=600)


@pytest.mark.full
def test_optimized_in_plain_c_without_a_home_on_a_narrow_terminal(tmp_path: Path) -> None:
    plain = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "20", "LINES": "5"}
    check(python(tmp_path, "-O", "-c", PROGRAM, without=("HOME", "USER", "LOGNAME"), **plain))


@pytest.mark.full
def test_every_warning_an_error_in_a_folder_with_umlauts_and_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "mein Ordner \u00fc\u4e2d"
    folder.mkdir()
    (folder / "pro gramm \u00fc.py").write_text(PROGRAM, encoding="utf-8")
    check(python(folder, "pro gramm \u00fc.py", PYTHONWARNINGS="error", HOME="/proc/1/nowhere"))


def check(done: subprocess.CompletedProcess) -> None:
    assert done.returncode == 0 and done.stderr == b"", done.stderr.decode()[-3000:]
    *said, result = done.stdout.decode("utf-8", "backslashreplace").splitlines()
    assert result == "[2.0, 2.0]" and sorted(line[:11] for line in said) == ["[rank 0] gr", "[rank 1] gr"], said


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "setuid") or os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_than_the_owner(tmp_path: Path) -> None:
    """Also where that user may not read Python itself: ranks are then forks of the process that could."""
    tmp_path.chmod(0o777)
    done = python(tmp_path, "-c", AS_SOMEBODY_ELSE, TMPDIR="/tmp", HOME="/tmp")
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    assert done.stdout.decode().startswith("[2, 2]"), done.stdout
