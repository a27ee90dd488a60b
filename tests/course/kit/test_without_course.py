"""The package alone, without the clone: it works, and what needs the course says in one line how to get it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OUTSIDE = """
import sys
sys.path[:] = [folder for folder in sys.path if folder == {target!r} or "site-packages" in folder or "lib" in folder]
from minillm.__main__ import run
sys.exit(run({argv!r}))
"""


def minillm(target, folder, *argv):
    code = OUTSIDE.format(target=str(target), argv=list(argv))
    variables = os.environ | {"PYTHONPATH": str(target)}
    return subprocess.run([sys.executable, "-P", "-c", code], cwd=folder, env=variables, capture_output=True, text=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """`pip install .` into a folder of its own."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    for name in ("minillm", "pyproject.toml", "README.md"):
        (source / name).symlink_to(ROOT / name)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True, capture_output=True)
    assert (target / "minillm" / "__init__.py").exists() and not (target / "course").exists()
    return target


@pytest.mark.full
@pytest.mark.parametrize("command", ["tour", "lab", "progress", "interview", "notebooks", "figures"])
def test_what_needs_the_course_says_how_to_get_it(target, tmp_path, command):
    found = minillm(target, tmp_path, command)
    assert found.returncode == 2 and found.stdout == ""
    assert found.stderr.count("\n") == 1 and "clone the repository" in found.stderr


@pytest.mark.full
def test_training_and_generating_need_no_course(target, tmp_path):
    (tmp_path / "text").write_text("a text to learn\n" * 400)
    small = ["--model-size", "tiny", "--steps", "2", "--seq-len", "16", "--batch-size", "2", "--data", "text"]
    found = minillm(target, tmp_path, "train", *small, "--dp", "2", "--export", "model")
    assert found.returncode == 0 and "exported" in found.stdout, found.stderr[-3000:]
    found = minillm(target, tmp_path, "generate", "def ", "--max-new-tokens", "2", "--model", "model")
    assert (found.returncode, found.stderr) == (0, ""), found.stderr[-3000:]


@pytest.mark.full
def test_inside_a_clone_an_installed_package_finds_the_course(target):
    code = (
        "from minillm.clone import course_module\n"
        "print(course_module('kit.course').home(), course_module('shared.trials').__file__)"
    )
    variables = os.environ | {"PYTHONPATH": str(target)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=ROOT / "labs", env=variables, capture_output=True, text=True, check=True
    )
    home, module = done.stdout.split()
    assert Path(home) == ROOT and Path(module) == ROOT / "course" / "shared" / "trials.py"


@pytest.mark.full
def test_the_doctor_says_where_the_course_is(target, tmp_path):
    found = minillm(target, tmp_path, "doctor")
    assert "info  course" in found.stdout and "clone the repository" in found.stdout, found.stderr[-3000:]


def where_course_is(group):
    for name in [name for name in sys.modules if name.partition(".")[0] == "course"]:
        del sys.modules[name]  # what the server of these tests has loaded already
    from course.shared import trials

    return trials.__file__


def test_ranks_find_the_course_from_any_working_directory(tmp_path, monkeypatch):
    from course.kit import course
    from minillm.comm import launch

    monkeypatch.chdir(tmp_path)
    assert course.home() == ROOT
    assert launch(where_course_is, 2) == [str(ROOT / "course" / "shared" / "trials.py")] * 2
