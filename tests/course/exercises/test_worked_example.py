"""CONTRIBUTING's exercise, from an empty file to a green test: what it says, done in a copy of the course."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SECTION = re.compile(r"^### An exercise, from an empty file.*?(?=^### )", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^```python\n# (course/\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LAST_CELL = "# %%\nfinish("


def run(clone, *command):
    variables = os.environ | {"PYTHONPATH": str(clone), "PYTHONDONTWRITEBYTECODE": "1", "MINILLM_PROOF": "all"}
    return subprocess.run([sys.executable, *command], cwd=clone, env=variables, capture_output=True, text=True)


@pytest.fixture
def clone(tmp_path):
    for name in ("minillm", "course", "labs", "tests", "conftest.py", "pyproject.toml"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "solutions").mkdir()
    return tmp_path


@pytest.mark.full
def test_the_exercise_of_contributing_is_made_as_it_says(clone):
    section = SECTION.search((ROOT / "CONTRIBUTING.md").read_text())[0]
    written = dict(FILE.findall(section))
    assert [Path(name).stem for name in written] == ["notebook", "checks_bandwidth", "mistakes_bandwidth"]
    for name, text in written.items():
        file = clone / name
        if file.exists():  # the master: before its last cell
            assert file.read_text().count(LAST_CELL) == 1
            text = file.read_text().replace(LAST_CELL, f"{text.strip()}\n\n{LAST_CELL}")
        file.write_text(text)
    commands = re.findall(r"^    (python -m |MINILLM_PROOF=all pytest )(.*?)(?:  #.*)?$", section, re.MULTILINE)
    assert len(commands) == 3
    done = run(clone, "-m", *commands[0][1].split(), "--root", str(clone))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bus_bandwidth" in (clone / "labs/01_collectives.ipynb").read_text()
    done = run(clone, "-m", "pytest", "-q", "-n", "0", *commands[1][1].split())
    assert done.returncode == 0 and "5 passed" in done.stdout, done.stdout + done.stderr

    path = clone / "course/lab01_collectives/checks_bandwidth.py"  # a check that holds nobody to anything
    path.write_text(path.read_text().replace("tolerance=1e-9", "tolerance=1e9"))
    done = run(clone, "-m", "pytest", "-q", "-n", "0", *commands[1][1].split())
    assert "3 failed, 2 passed" in done.stdout, done.stdout
