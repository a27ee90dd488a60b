"""The story of docs/end_to_end.md, whose script runs the page's own commands: here with fewer steps and a free port.
What the page shows as printed is what the commands print, but for numbers and for what a model writes."""

import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "end_to_end.md"
SCRIPT = ROOT / "recipes" / "end_to_end.sh"
MINIATURE = {  # as printed: as run here
    "--out model-int8 --report": "--out model-int8",
    "--steps 120 --save-every 20": "--steps 12 --save-every 3",
    "--rate 4,16,64 --requests 60": "--rate 20 --requests 20",
}
LONGER = ("[rank #] step #: validation", "model MB", "original", "rtn int#")  # lines that the miniature does not print
PATIENCE_S = 600


def commands(page):
    return re.findall(r"^```bash\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def outputs(page):
    return re.findall(r"^```text\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def shapes(printed):
    """Each line without what another run prints otherwise: numbers, the uses of a run's time, the words of a model, the
    widths of a table's columns. Of lines alike that follow one another, one."""
    text = re.sub(
        r"(?<=\battempt)s?: .*|(?<=: Beautiful is).*|(?<=^class Parser:).*(?:\n .*)*", "", printed, flags=re.MULTILINE
    )
    lines = (" ".join(re.sub(r"\d[\d,.]*", "#", line).split()) for line in text.splitlines())
    return [line for line, _ in itertools.groupby(lines)]


def test_every_step_of_the_page_has_commands_that_bash_reads_and_an_output():
    page = PAGE.read_text()
    steps = page.split("\n## ")[1:]
    assert len(steps) == 9
    for step in steps:
        found = commands(step)
        assert found and outputs(step), step.partition("\n")[0]
        for block in found:
            assert subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True).stderr == ""
    assert all(page.count(printed) == 1 for printed in MINIATURE)


def _leads_into(link, folder):
    try:
        return link.resolve().is_relative_to(folder)
    except OSError:
        return False  # it has ended


@pytest.mark.full
@pytest.mark.drawn(1)
def test_the_story_runs_to_its_end(tmp_path):
    if missing := [name for name in ("bash", "curl") if not shutil.which(name)]:
        pytest.skip(f"{', '.join(missing)} not installed")
    clone = tmp_path / "clone"
    for path in (PAGE, SCRIPT):
        (clone / path.relative_to(ROOT)).parent.mkdir(parents=True)
        shutil.copy(path, clone / path.relative_to(ROOT))
    with socket.create_server(("127.0.0.1", 0)) as free:
        page = PAGE.read_text().replace("8000", str(free.getsockname()[1]))
    for printed, here in MINIATURE.items():
        page = page.replace(printed, here)
    (clone / "docs" / PAGE.name).write_text(page)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", clone / "recipes" / SCRIPT.name, "story"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = done.stdout
    ours, theirs = re.findall(r"^class Parser:.*(?:\n .*)*", told, re.MULTILINE)
    assert ours == theirs  # minillm's and transformers' text of the exported model
    story = tmp_path / "story"
    made = ["adapter", "model", "model-int8", "runs", "server.log", "zen.txt"]
    assert sorted(path.name for path in story.iterdir()) == made
    assert "zen: Beautiful is' better than ugly." in told  # what the adapter has learnt, beside the quantized base
    assert "Finished server process" in told
    assert "20 of 20" in told  # requests that the server answered under load
    lines = iter(shapes(told))
    shown = [line for line in shapes("".join(outputs(PAGE.read_text()))) if not line.startswith(LONGER)]
    assert not [line for line in shown if line not in lines], "the page shows what is not printed, or not in this order"
    left = [path for path in Path("/proc").glob("[0-9]*/cwd") if _leads_into(path, tmp_path)]
    assert not left  # nor did a rank outlive the SIGKILL of its run
    again = subprocess.run(
        ["bash", SCRIPT, "story"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (again.returncode, "Name a folder that is not there yet" in again.stderr) == (2, True)
