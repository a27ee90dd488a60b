"""What the root's conftest.py adds to pytest: strict solutions, and one more try of what failed, with the same draw."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[3]
OFF = """
from course.kit.receipts import receipt, row
receipt("a claim", [row("bytes", 1, 2, "B")])
"""
ONCE = """
from pathlib import Path
once = Path("tried")
if not once.exists():
    once.touch()
    raise RuntimeError("a busy machine")
"""

pytestmark = pytest.mark.full


@pytest.fixture
def run(tmp_path):
    """Runs pytest on files in a folder of its own; returns its exit status and what it printed."""

    def run(*arguments):
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "MINILLM_"))}
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "conftest", "-c", ROOT / "pyproject.toml"]
        environ |= {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*command, "--rootdir", tmp_path, *arguments], cwd=tmp_path, env=environ, capture_output=True, text=True
        )
        return done.returncode, done.stdout + done.stderr

    return run


def notebook(path, *sources):
    path.parent.mkdir(parents=True)
    text = nbformat.v4.new_markdown_cell("nbval counts code cells only", id="text")
    cells = [nbformat.v4.new_code_cell(source.strip(), id=f"code-{n}") for n, source in enumerate(sources)]
    nbformat.write(nbformat.v4.new_notebook(cells=[text, *cells]), path)


def test_a_claim_that_is_off_fails_a_solution_and_not_a_lab(run, tmp_path):
    for name in ("solutions/20_off.ipynb", "labs/21_off.ipynb"):
        notebook(tmp_path / name, "1", OFF)
    status, printed = run("solutions", "labs")
    assert status == 1 and "1 failed, 3 passed" in printed
    assert "FAILED solutions/20_off.ipynb::Cell 1" in printed


def test_a_notebook_is_tried_again_whole_and_forgotten_once_it_passes(run, tmp_path):
    notebook(tmp_path / "solutions" / "20_once.ipynb", "x = 1", ONCE, "x + 1")
    cache = tmp_path / "cache"
    assert run("-o", f"cache_dir={cache}", "solutions")[0] == 1
    status, printed = run("-o", f"cache_dir={cache}", "--last-failed", "solutions")
    assert status == 0 and "3 passed" in printed
    assert json.loads((cache / "v/cache/lastfailed").read_text()) == {}


def test_what_failed_is_drawn_again(run, tmp_path):
    drawn = tmp_path / "test_drawn.py"
    drawn.write_text("import os\n\ndef test_seed():\n    raise ValueError('seed ' + os.environ['MINILLM_SEED'])\n")
    seeds = []
    for options in ((), ("--last-failed",)):
        _, printed = run("-o", f"cache_dir={tmp_path / 'cache'}", *options, drawn)
        seeds.append(re.search(r"ValueError: seed (\d+)", printed)[1])
    assert seeds[0] == seeds[1]


@pytest.mark.parametrize("mark, kept", [("drawn(2)", 4), ("drawn(1)", 7), ("full", 3)])
def test_of_what_is_drawn_a_part_runs_unless_the_file_is_named(mark, kept, run, tmp_path):
    """What is `full` and does not say how often it runs does in one run of three."""
    case = f"import pytest\n\n@pytest.mark.full\n@pytest.mark.{mark}\n@pytest.mark.parametrize('n', range(7))\n"
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_cases.py").write_text(
        f"{case}def test_case(n):\n    pass\n\ndef test_quick():\n    pass\n"
    )
    for arguments, passed in ((("tests", "-m", "full"), kept), (("tests",), 1), (("tests/test_cases.py",), 8)):
        status, printed = run(*arguments)
        assert status == 0 and f"{passed} passed" in printed, printed
