import io
import os
import re
import shutil
import sys
import time
from pathlib import Path

import nbformat
import pytest
from PIL import Image

from course.commands import notebooks
from course.kit import course, masters, receipt, row
from course.kit.execute import NotebookFailed, execute, off_rows
from minillm.__main__ import run
from minillm.drawing import small
from minillm.measure.machine import Machine

ROOT = Path(__file__).parents[3]
FIXTURE = Path(__file__).parents[1] / "exercises" / "fixture"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The fixture course, built once."""
    home = tmp_path_factory.mktemp("course")
    shutil.copytree(FIXTURE, home, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(FIXTURE))
        patch.setenv("MINILLM_PROGRESS", str(home / "progress.json"))
        assert run(["notebooks", "--root", str(home)]) == 0
    return home


@pytest.fixture
def home(built, tmp_path):
    """A copy of the built course to spoil."""
    return Path(shutil.copytree(built, tmp_path / "course"))


def notebook_of(*cells: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in cells],
        metadata={"kernelspec": {"display_name": "Python 3", "name": "python3"}},
    )


def test_built_course_is_up_to_date(built, capsys):
    assert run(["notebooks", "--check", "--root", str(built)]) == 0
    assert "1 labs are up to date" in capsys.readouterr().out
    assert not (built / "progress.json").exists()
    assert "raise NotImplementedError" in (built / "labs" / "torchrun" / "90_fixture.py").read_text()


@pytest.mark.parametrize("root", ["nowhere", "empty", "empty/file"])
def test_a_root_that_is_no_course_is_refused(tmp_path, capsys, root):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "file").touch()
    assert run(["notebooks", "--check", "--root", str(tmp_path / root)]) == 2
    assert f"no course in or above {tmp_path / root}" in capsys.readouterr().err


def test_executed_solution_is_clean(built):
    notebook = nbformat.read(built / "solutions" / "90_fixture.ipynb", as_version=4)
    assert set(notebook.metadata) == {"kernelspec", "language_info", "minillm"}
    assert notebook.metadata.kernelspec.name == "python3"
    text = (built / "solutions" / "90_fixture.ipynb").read_text()
    for unwanted in ("widget", 'execution"', "iopub", str(built), "interactive(children", "NotImplementedError"):
        assert unwanted not in text
    assert "fixture-mean: passed" in text and "mean of 1 and 2: 1.5" in text
    pictures = [
        output for cell in notebook.cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 1 and len(pictures[0].data["image/png"]) < 40_000


@pytest.mark.full
def test_marks_of_the_profiler_are_not_kept_and_warnings_are(tmp_path):
    marks = "".join(
        f"USDT:2026-11-24 00:47:33 9259:9259 SyncActivityProfilerHandler.cpp:{line}] profiler_{what}\\n"
        for line, what in ((52, "start"), (59, "stop"))
    )
    warning = "WARNING:2026-11-24 00:47:33 9259:9259 SyncActivityProfilerHandler.cpp:9] buffer full\\n"
    cells = [f"import sys; print('{text}', end='', file=sys.stderr)" for text in (marks, marks + warning)]
    only_marks, with_warning = execute(notebook_of(*cells), tmp_path).cells
    assert only_marks.outputs == []
    assert [output.text for output in with_warning.outputs] == [warning.replace("\\n", "\n")]


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("spoil", "report"),
    [
        (lambda h: (h / "labs/90_fixture.ipynb").unlink(), "labs/90_fixture.ipynb is missing"),
        (
            lambda h: swap(h / "labs/90_fixture.ipynb", "A fixture", "My fixture"),
            "labs/90_fixture.ipynb differs from its master",
        ),
        (lambda h: swap(h / "labs/torchrun/90_fixture.py", "Twice", "Thrice"), "labs/torchrun/90_fixture.py differs"),
        (lambda h: swap(h / "solutions/90_fixture.ipynb", "A fixture", "B"), "solutions/90_fixture.ipynb differs"),
        (
            lambda h: swap(h / "course/lab90_fixture/notebook.py", "result = 0", "result = -0"),
            "solutions/90_fixture.ipynb differs",
        ),
        (lambda h: (h / "solutions/90_fixture.ipynb").unlink(), "solutions/90_fixture.ipynb is missing"),
        (lambda h: strip(h / "solutions/90_fixture.ipynb"), "solutions/90_fixture.ipynb has not been executed"),
        (
            lambda h: unsign(h / "solutions/90_fixture.ipynb"),
            "90_fixture.ipynb does not say which code made its outputs",
        ),
        (
            lambda h: swap(h / "fixture_exercises.py", "total of", "sum of"),
            "solutions/90_fixture.ipynb was executed before the code of cell 'total = check(\"fixture-total\", total)' "
            "changed in fixture_exercises.py",
        ),
        (lambda h: fail(h / "solutions/90_fixture.ipynb"), "solutions/90_fixture.ipynb shows an error"),
        (lambda h: show_card(h / "solutions/90_fixture.ipynb"), "90_fixture.ipynb shows a machine card that was"),
        (lambda h: (h / "labs/91_old.ipynb").write_text("{}"), "labs/91_old.ipynb has no master"),
    ],
)
def test_every_kind_of_drift_is_reported(home, capsys, spoil, report):
    spoil(home)
    assert run(["notebooks", "--check", "--root", str(home)]) == 1
    error = capsys.readouterr().err
    assert report in error and "python -m minillm notebooks" in error


def swap(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def strip(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(notebook, path)


def unsign(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    del notebook.metadata["minillm"]
    nbformat.write(notebook, path)


def fail(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[1].outputs = [nbformat.v4.new_output("error", ename="E", evalue="v", traceback=[])]
    nbformat.write(notebook, path)


def test_names_by_number_and_unknown_names(home, capsys):
    assert run(["notebooks", "90", "--check", "--root", str(home)]) == 0
    assert run(["notebooks", "90_fixtur", "--root", str(home)]) == 2
    assert "no lab is called '90_fixtur'; did you mean '90_fixture'?" in capsys.readouterr().err
    assert run(["notebooks", "--root", str(home / "nowhere-else"), "--nonsense"]) == 2


def test_labs_only_leaves_solutions_alone(home):
    solution = home / "solutions" / "90_fixture.ipynb"
    before = solution.read_text()
    swap(home / "course/lab90_fixture/notebook.py", "A fixture", "Another fixture")
    assert run(["notebooks", "--labs-only", "--root", str(home)]) == 0
    assert solution.read_text() == before and "Another" in (home / "labs/90_fixture.ipynb").read_text()


@pytest.mark.full
def test_only_stale_solutions_are_executed_unless_named_or_all(home, capsys, monkeypatch):
    executed = []
    monkeypatch.setattr(notebooks, "execute", lambda notebook, folder: executed.append(folder) or notebook)
    for arguments, runs in ([], 0), (["90"], 1), (["--all"], 2):
        assert run(["notebooks", *arguments, "--root", str(home)]) == 0
        assert len(executed) == runs
    assert "1 solutions are up to date; --all executes them, too" in capsys.readouterr().out
    swap(home / "fixture_exercises.py", "total of", "sum of")
    assert run(["notebooks", "--root", str(home)]) == 0
    assert len(executed) == 3


def test_failing_solution_is_named_and_not_written(home, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FIXTURE))
    solution = home / "solutions" / "90_fixture.ipynb"
    before = solution.read_text()
    swap(home / "course/lab90_fixture/notebook.py", "result = 0", "result = 1")
    assert run(["notebooks", "--root", str(home)]) == 1
    error = capsys.readouterr().err
    assert (
        "90_fixture: cell 'total = check(\"fixture-total\", total)' raised CheckFailed: fixture-total: the total of"
        in error
    )
    assert solution.read_text() == before


@pytest.mark.full
def test_kernel_is_this_interpreter_in_the_folder_and_is_gone_afterwards(tmp_path):
    cell = "import os, sys; print(sys.executable, os.getcwd(), os.environ['MINILLM_STRICT'], os.getpid())"
    executed = execute(notebook_of(cell), tmp_path)
    executable, folder, strict, pid = executed.cells[0].outputs[0].text.split()
    assert (
        Path(sys.prefix, executable) == Path(sys.executable) and strict == "1" and folder == tmp_path.name
    )  # paths are anonymous
    for _ in range(100):
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("the kernel is still there")


RECEIPT = "from course.kit import receipt, row\nmade = receipt('bytes', [row('sent', 8, 9, 'B', noisy={noisy})])"


@pytest.mark.parametrize("display", ["made", "print(made)", "display(made)"])
def test_a_receipt_that_is_off_fails_a_solution(tmp_path, display):
    cells = RECEIPT.format(noisy=False), display
    with pytest.raises(NotebookFailed, match=rf"cell '{re.escape(display)}' raised ReceiptOff: receipt 'bytes' is off"):
        execute(notebook_of(*cells), tmp_path)


@pytest.mark.parametrize(("noisy", "strict"), [(True, True), (False, False)])
def test_a_noisy_row_and_a_learners_lab_may_be_off(tmp_path, noisy, strict):
    executed = execute(notebook_of(RECEIPT.format(noisy=noisy), "made"), tmp_path, strict=strict)
    assert "off" in executed.cells[1].outputs[0].data["text/plain"]


def show_card(path: Path, load: float = 0.6) -> nbformat.NotebookNode:
    """The notebook with a machine card that was measured under this load."""
    notebook = nbformat.read(path, as_version=4)
    card = Machine("cpu", 2, 8, "3.11", "2.13", "2026-01-01", load, 8.0, 4.0, 8.0, 1.0, links={})
    notebook.cells[1].outputs = [nbformat.v4.new_output("display_data", {"text/html": card._repr_html_()})]
    nbformat.write(notebook, path)
    return notebook


@pytest.mark.parametrize(("load", "status"), [(0.4, 0), (0.6, 1)])
def test_a_card_that_was_measured_under_load_is_not_stored(home, tmp_path, capsys, monkeypatch, load, status):
    solution = home / "solutions" / "90_fixture.ipynb"
    executed = show_card(shutil.copy(solution, tmp_path / "executed.ipynb"), load)
    before = solution.read_text()
    monkeypatch.setattr(notebooks, "execute", lambda notebook, folder: executed)
    assert run(["notebooks", "90", "--root", str(home)]) == status
    assert ("machine --refresh" in capsys.readouterr().err) == bool(status)
    assert (solution.read_text() == before) == bool(status)


def with_off_rows() -> nbformat.NotebookNode:
    """A notebook that displays a receipt, whose folded row is off, and prints another."""
    fine = [row(f"fine {number}", 1, 1) for number in range(3)]
    long = receipt("long", [*fine, row("    two <levels>", 2.0, 3.0, "s", guess=1.0, noisy=True)])
    short = receipt("short", [*fine, row("wire, P = 8", 8, 9, "B", noisy=True), row("time", None, 1.0, "s")])
    notebook = notebook_of("long", "print(short)", "'status   off'")
    displayed = nbformat.v4.new_output("display_data", {"text/plain": repr(long), "text/html": long._repr_html_()})
    notebook.cells[0].outputs = [displayed]
    notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text=f"{short}\n")]
    notebook.cells[2].outputs = [nbformat.v4.new_output("stream", text="status   off\n")]
    return notebook


def test_an_off_row_that_is_stored_is_named(home, capsys, monkeypatch):
    monkeypatch.setattr(notebooks, "execute", lambda notebook, folder: with_off_rows())
    assert run(["notebooks", "90", "--root", str(home)]) == 0
    said, advice = capsys.readouterr().out, "execute it again on a quiet machine or explain it in the text"
    for name, values in (
        ("two <levels>", "your guess 1.00 s, formula 2.00 s, measured 3.00 s"),
        ("wire, P = 8", "formula 8 B, measured 9 B"),
    ):
        assert f"90_fixture: noisy row '{name}' is off in the stored solution ({values}): {advice}\n" in said
    assert said.count(advice) == 2


EXPLAINED = {  # rows that may be off in stored solutions, with what their lab's text says of them
    ("01_collectives", "dist.reduce_scatter_tensor"): "torch implements `reduce_scatter_tensor` as an all-reduce",
    ("18_distributed_serving", "layer by layer: hidden share of the transfer"): "Slower cores hide less",
}
for _row in ("tp 4: step; 7.9", "dp 2, tp 2: step; 3.6", "pp 2, tp 2: step; 3.2"):  # on fewer cores than ranks
    EXPLAINED["09_four_dimensions", f"{_row} MB sent by all"] = "rank computes while another waits for its message"
for _row in ("tp inside", "tp across", "pp 2, tp 2: tp across / tp inside, times"):
    EXPLAINED["09_four_dimensions", _row] = "a row can be off where ranks share cores"


def test_every_off_row_that_is_stored_is_explained_in_the_text():
    paths = {name: ROOT / "solutions" / f"{name}.ipynb" for name in course.masters(ROOT)}
    off = {
        (name, row_name) for name, path in paths.items() for row_name, _ in off_rows(nbformat.read(path, as_version=4))
    }
    assert off <= set(EXPLAINED), "execute the solution again on a quiet machine, or explain the row in its lab"
    for (name, _), sentence in EXPLAINED.items():
        assert sentence in course.masters(ROOT)[name].read_text(encoding="utf-8")


@pytest.mark.full
def test_slow_and_dying_cells_are_named(tmp_path):
    with pytest.raises(NotebookFailed, match=r"cell 'import time; time.sleep\(60\)' took longer than 1 s"):
        execute(notebook_of("1", "import time; time.sleep(60)"), tmp_path, timeout_s=1)
    with pytest.raises(NotebookFailed, match=r"the kernel died in cell 'import os; os._exit\(3\)'"):
        execute(notebook_of("import os; os._exit(3)"), tmp_path)


def test_pictures_shrink_only_when_opaque():
    def png(mode, colour):
        buffer = io.BytesIO()
        picture = Image.new(mode, (300, 300), colour)
        for x in range(300):
            picture.putpixel((x, x), (x % 256, 0, 0, 255)[: len(mode)])
        picture.save(buffer, "PNG", compress_level=0)
        return buffer.getvalue()

    opaque, transparent = png("RGBA", (255, 255, 255, 255)), png("RGBA", (255, 255, 255, 0))
    assert len(small(opaque)) < len(opaque) / 10 and small(transparent) == transparent
    assert Image.open(io.BytesIO(small(opaque))).size == (300, 300)


def test_unexecuted_solution_matches_its_lab_cell_by_cell(built):
    lab = nbformat.read(built / "labs" / "90_fixture.ipynb", as_version=4)
    solution = masters.solution(built / "course" / "lab90_fixture" / "notebook.py")
    assert [cell.id for cell in lab.cells] == [cell.id for cell in solution.cells[:-1]]
