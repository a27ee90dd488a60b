"""What a learner hands in is run again, in the lab as it is handed out."""

import json

import nbformat
import pytest

from course.kit import course, hand_in, masters, progress
from minillm.__main__ import run

LAB = "20_design_training"
MASTER = course.masters(course.home())[LAB]


def learners(folder, solved, passed):
    """A folder of notebooks: the lab with some exercises solved, a cell of the learner's own, and what they passed."""
    notebook = masters.lab(MASTER, solved=solved)
    notebook.cells.insert(1, nbformat.v4.new_code_cell("mine = 7"))
    nbformat.write(notebook, folder / f"{LAB}.ipynb")
    for name in passed:
        progress.record(name, LAB, "passed")


def test_a_file_holds_the_cells_and_what_passed(tmp_path):
    learners(tmp_path, ["state-bytes"], ["state-bytes"])
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(hand_in.collect(tmp_path, [LAB, "01_collectives"])))
    labs = hand_in.read(file)
    assert list(labs) == [LAB] and labs[LAB]["passed"] == ["state-bytes"]
    assert labs[LAB]["cells"][0][1] == "mine = 7"


def test_nothing_passed_is_nothing_to_hand_in(tmp_path, capsys):
    learners(tmp_path, [], [])
    with pytest.raises(ValueError, match="nothing to export"):
        hand_in.collect(tmp_path, [LAB])
    assert run(["progress", "--export", str(tmp_path / "mine.json")]) == 2
    assert "nothing to export" in capsys.readouterr().err and not (tmp_path / "mine.json").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda text: text.replace("mine = 7", "mine = 8"), "changed after it was written"),
        (lambda text: text[:-9], "nothing that `progress --export` wrote"),
        (lambda text: "[]", "nothing that `progress --export` wrote"),
    ],
)
def test_a_damaged_file_is_one_sentence(tmp_path, capsys, change, sentence):
    learners(tmp_path, ["state-bytes"], ["state-bytes"])
    file = tmp_path / "mine.json"
    file.write_text(change(json.dumps(hand_in.collect(tmp_path, [LAB]))))
    assert run(["progress", "--grade", str(file)]) == 2
    error = capsys.readouterr().err
    assert sentence in error and len(error.splitlines()) == 1


def test_commands_that_exclude_each_other(capsys):
    assert run(["progress", "--export", "a.json", "--reset"]) == 2
    assert "give one of them" in capsys.readouterr().err


def test_answers_go_into_the_lab_as_it_is_handed_out():
    lab, solved = masters.lab(MASTER), masters.lab(MASTER, solved=["state-bytes"])
    cells = [[cell.id, cell.source] for cell in solved.cells if cell.cell_type == "code"]
    asks = {cell.id for cell in lab.cells if "NotImplementedError" in cell.source}
    spoilt = [[cell_id, source if cell_id in asks else "pass"] for cell_id, source in cells]
    made = hand_in.with_answers(masters.lab(MASTER), [*spoilt[:3], ["", "mine = 7"], *spoilt[3:]])
    assert [cell.source for cell in made.cells if cell.source != "mine = 7"] == [cell.source for cell in solved.cells]
    place = next(index for index, cell in enumerate(made.cells) if cell.source == "mine = 7")
    assert made.cells[place - 1].id == cells[2][0]


@pytest.mark.full
def test_what_passes_again_counts_and_what_was_only_claimed_does_not(tmp_path, capsys):
    learners(tmp_path, ["state-bytes"], ["state-bytes", "save-interval"])
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(hand_in.collect(tmp_path, [LAB])))
    before = progress.path().read_text()
    assert run(["progress", "--grade", str(file), "--json", str(tmp_path / "grades.json")]) == 1
    assert f"{LAB}: 1 of 2 pass again; not save-interval\n" in capsys.readouterr().out
    [row] = json.loads((tmp_path / "grades.json").read_text())["rows"]
    assert row["passed"] == ["state-bytes"] and row["lost"] == ["save-interval"] and row["stopped"] == ""
    assert progress.path().read_text() == before
