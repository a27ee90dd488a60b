"""Training, generating, a stop of the tour and a lab in surroundings that nobody planned for, several at a time.

Each case is one process that does all of it; what ranks alone do there is held by
tests/engine/comm/test_surroundings.py, an installed package without its course by
tests/course/kit/test_without_course.py.
"""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.drawn(4)
EVERYTHING = """
import os
import sys
from pathlib import Path

from minillm.__main__ import run
from course.kit import course, masters
from course.kit.execute import execute

TEXT, MODEL = (os.fsdecode(name.encode("utf-8")) for name in ("te\\u00e4t", "mod\\u00e4l"))
SMALL = ["--model-size", "tiny", "--steps", "2", "--seq-len", "16", "--batch-size", "2", "--data", TEXT]


def must(*argv):
    if status := run(argv):  # no assert, which python -O takes away
        sys.exit(f"{argv} ended with {status}")


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # as the program does
    Path(TEXT).write_text("a t\\u00e4xt to learn\\n" * 400, encoding="utf-8")
    must("train", *SMALL, "--export", MODEL)
    must("train", *SMALL, "--dp", "2", "--zero", "1")
    must("generate", "d\\u00e4f ", "--model", MODEL, "--max-new-tokens", "3")
    run(["tour", "--labs", "04", "--json", "tour.json"])  # its verdicts are held elsewhere
    if "lab" in sys.argv:
        execute(masters.solution(course.masters(course.root())["00_start_here"]), Path.cwd())
    print("everything ran")
"""
FOLDER = "mein Ordner ü中"


def everything(folder: Path, *args: str, prefix: tuple[str, ...] = (), without: tuple[str, ...] = (), **environ: str):
    """The finished process; the parts of `EVERYTHING` that it asked for by `args` after the script's name."""
    place = folder / FOLDER
    place.mkdir()
    place.chmod(0o777)
    (place / "pro gramm.py").write_text(EVERYTHING, encoding="utf-8")
    inherited = {name: value for name, value in os.environ.items() if name not in without}
    environ = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(place), **environ}
    command = [*prefix, sys.executable, *args]
    done = subprocess.run(command, env={**inherited, **environ}, cwd=place, capture_output=True, timeout=900)
    assert b"rows, " in done.stdout and (place / "tour.json").exists(), done.stderr.decode("utf-8", "replace")[-4000:]
    return done


def check(done: subprocess.CompletedProcess) -> None:
    said = done.stdout.decode("utf-8", "backslashreplace")
    assert b"Traceback" not in done.stderr, done.stderr.decode("utf-8", "replace")[-4000:]
    assert done.returncode == 0 and said.endswith("everything ran\n"), done.stderr.decode("utf-8", "replace")[-4000:]


@pytest.mark.full
def test_optimized_in_plain_c_without_a_home_on_a_narrow_terminal(tmp_path: Path) -> None:
    plain = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    gone = ("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME", "XDG_DATA_HOME")
    check(everything(tmp_path, "-O", "pro gramm.py", "lab", without=gone, COLUMNS="20", LINES="5", **plain))


@pytest.mark.full
def test_every_warning_an_error(tmp_path: Path) -> None:
    check(everything(tmp_path, "pro gramm.py", PYTHONWARNINGS="error"))


@pytest.mark.full
def test_a_tiny_shared_memory(tmp_path: Path) -> None:
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    if not shutil.which("unshare") or subprocess.run(["unshare", "-m", "sh", "-c", mount]).returncode:
        pytest.skip("only root can give a process another /dev/shm")
    check(everything(tmp_path, "pro gramm.py", prefix=("unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh")))


@pytest.mark.full
def test_another_user_than_the_owner_in_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    """Of the clone and of Python: nothing is written beside the package, and warnings say what is not kept at home."""
    readable = all(
        folder.stat().st_mode & stat.S_IXOTH
        for path in (Path(sys.executable), Path(sys.executable).resolve(), ROOT)
        for folder in path.parents
    )
    if os.geteuid() != 0 or not shutil.which("setpriv") or not readable:
        pytest.skip("only root can become somebody else, who has to be able to read Python and this clone")
    everyone = Path("/tmp", f"everyone {os.getpid()}")
    everyone.mkdir()
    everyone.chmod(0o777)
    try:
        somebody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--")
        (everyone / "home").mkdir(mode=0o555)
        gone = ("XDG_CACHE_HOME", "XDG_DATA_HOME", "MINILLM_PROGRESS")
        done = everything(everyone, "pro gramm.py", "lab", prefix=somebody, without=gone, HOME=str(everyone / "home"))
        check(done)
        said = done.stderr.decode("utf-8", "replace")
        assert all(f"cannot {what}" in said for what in ("keep the machine card", "cache tokens")), said[-3000:]
        assert not list((everyone / "home").iterdir())
    finally:
        shutil.rmtree(everyone)
