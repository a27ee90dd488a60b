import json
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from course.commands import doctor as of_course
from minillm.__main__ import run
from minillm.cli import doctor
from minillm.cli.doctor import CHECKS, Line, examine
from minillm.comm import HangError, RankError


def absent(package):
    raise metadata.PackageNotFoundError(package)


def raises(error):
    def probe(*_):
        raise error

    return probe


def without(name):
    return raises(ImportError(f"No module named {name!r}", name=name))


BROKEN = {  # check -> (a broken machine, what its line names, what its repair names)
    "python": (lambda: doctor.python("3.10.4"), "3.10.4", "make clean lab PYTHON="),
    "python too new": (lambda: doctor.python("3.13.0"), "3.13.0", "make clean lab PYTHON="),
    "torch absent": (lambda: doctor.torch(absent), "torch is not installed", 'pip install "torch>=2.11,<2.14"'),
    "torch too old": (lambda: doctor.torch(lambda _: "2.3.1+cpu"), "2.3.1+cpu", 'pip install "torch>=2.11,<2.14"'),
    "gloo raises": (lambda: doctor.gloo(raises(RankError("rank 1 of 2 died\nmore", 1))), "rank 1 of 2", "127.0.0.1"),
    "gloo hangs": (lambda: doctor.gloo(raises(HangError("no progress for 30 s"))), "no progress", "127.0.0.1"),
    "gloo adds wrongly": (lambda: doctor.gloo(lambda: [1.0, 2.0]), "[1.0, 2.0]", 'force-reinstall "torch'),
    "nbclient absent": (lambda: of_course.kernel(without("nbclient")), "nbclient is not installed", "nbclient"),
    "kernel dies": (lambda: of_course.kernel(raises(RuntimeError("kernel died"))), "kernel died", "ipykernel"),
    "widgets": (
        lambda: of_course.widgets(absent),
        "ipywidgets and jupyterlab_widgets not",
        "reload the JupyterLab page",
    ),
    "memory": (lambda: doctor.memory(lambda: 300 << 20), "0.3 GiB free", "more memory"),
    "shared memory": (
        lambda: doctor.shared_memory(Path("/"), lambda _: 1 << 20),
        "only 1 MiB free",
        "--shm-size=1g",
    ),
    "temp folder full": (lambda: doctor.temporary(free=lambda _: 1 << 20), "only 1 MiB free", "export TMPDIR="),
    "temp folder absent": (lambda: doctor.temporary(raises(FileNotFoundError(2, "No usable"))), "No usable", "TMPDIR"),
    "loopback": (lambda: doctor.loopback(raises(OSError(99, "Cannot assign"))), "Cannot assign", "ip link set lo up"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_off_says_how_to_repair_it(case):
    look, found, repair = BROKEN[case]
    line = look()
    assert line.verdict == "off"
    assert found in line.found and "\n" not in line.found
    assert repair in line.repair
    assert f"repair: {line.repair}" in str(line)


def test_folders_that_cannot_be_written(tmp_path):
    occupied = tmp_path / "file"
    occupied.write_text("in the way")
    line = doctor.cache_folder({"XDG_CACHE_HOME": str(occupied)})
    assert line.verdict == "off" and str(occupied) in line.found and "export XDG_CACHE_HOME=" in line.repair
    line = of_course.data_folder(occupied / "minillm" / "progress.json")
    assert line.verdict == "off" and str(occupied) in line.found and "export XDG_DATA_HOME=" in line.repair


def test_folders_that_can(tmp_path):
    line = doctor.cache_folder({"XDG_CACHE_HOME": str(tmp_path)})
    assert line.verdict == "ok" and list((tmp_path / "minillm").iterdir()) == []
    assert of_course.data_folder(tmp_path / "progress.json").verdict == "ok"


@pytest.mark.parametrize(
    "line, verdict, found",
    [
        (doctor.python("3.12.1"), "ok", "3.12.1"),
        (doctor.torch(lambda _: "2.13.0+cu130"), "ok", "2.13.0+cu130"),
        (doctor.gloo(lambda: [3.0, 3.0]), "ok", "2 ranks"),
        (of_course.kernel(lambda: None), "ok", "ran a cell"),
        (of_course.widgets(lambda _: "8.1.0"), "ok", "jupyterlab_widgets 8.1.0"),
        (doctor.memory(lambda: 8 << 30), "ok", "8.0 GiB"),
        (doctor.cores(1), "info", "overlap"),
        (doctor.cores(4), "ok", "4"),
        (doctor.shared_memory(Path("/no/such/folder")), "info", "no /no/such/folder"),
        (doctor.shared_memory(Path("/"), lambda _: 1 << 30), "ok", "1.0 GiB"),
        (doctor.temporary(free=lambda _: 1 << 30), "ok", "1.0 GiB"),
        (doctor.peers(absent, lambda _: None), "info", "nothing; without transformers, accelerate, chromium"),
        (doctor.peers(lambda _: "5.0", lambda name: f"/usr/bin/{name}"), "info", "accelerate 5.0, chromium"),
    ],
)
def test_what_is_fine(line, verdict, found):
    assert line.verdict == verdict and found in line.found and not line.repair


def test_gpus_are_information():
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, get_device_name=lambda i: f"card {i}")
    assert doctor.gpu(cuda, lambda: True) == Line("gpu", "info", "card 0, card 1; NCCL is available")
    assert "NCCL is missing" in doctor.gpu(cuda, lambda: False).found
    cuda.is_available = lambda: False
    assert doctor.gpu(cuda).verdict == "info" and "gloo" in doctor.gpu(cuda).found


def test_without_the_decode_kernel_its_reason_is_information():
    line = doctor.decode_kernel(lambda: "there is no C++ compiler: install g++.")
    assert line.verdict == "info" and "install g++. Serving on the CPU copies keys" in line.found
    assert "where they lie" in doctor.decode_kernel(lambda: "").found


def test_a_check_that_breaks_is_off_and_the_others_still_run():
    def odd_one():
        raise ZeroDivisionError("by zero")

    broken, fine = examine([odd_one, doctor.cores])
    assert (broken.name, broken.verdict, broken.found) == ("odd one", "off", "ZeroDivisionError: by zero")
    assert "requirements.txt" in broken.repair and fine.name == "cores"


def test_versions_are_those_of_pyproject():
    project = tomllib.loads(Path(doctor.__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
    assert project["requires-python"] == doctor.PYTHON
    assert f"torch{doctor.TORCH}" in project["dependencies"]


def test_this_machine(tmp_path, capsys, monkeypatch):
    """Every check for real: the probes that the other tests replace."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MINILLM_PROGRESS", str(tmp_path / "progress.json"))
    status = run(["doctor", "--json", str(tmp_path / "doctor.json")])
    rows = json.loads((tmp_path / "doctor.json").read_text())["rows"]
    verdicts = {row["name"]: row["verdict"] for row in rows}
    assert len(rows) == len(CHECKS) + len(of_course.CHECKS)
    assert status == (1 if "off" in verdicts.values() else 0)
    for name in ("python", "torch", "gloo", "kernel", "widgets", "loopback", "cache folder", "data folder"):
        assert verdicts[name] == "ok", rows
    assert all(row["repair"] for row in rows if row["verdict"] == "off")


def test_exit_status_and_summary(capsys, monkeypatch):
    def broken():
        return Line("leg", "off", "is broken", "a cast")

    monkeypatch.setattr(doctor, "CHECKS", (broken, doctor.cores))
    monkeypatch.setattr(doctor, "course_checks", tuple)
    assert run(["doctor"]) == 1
    assert "repair: a cast" in (out := capsys.readouterr().out) and out.endswith("To repair: leg\n")
