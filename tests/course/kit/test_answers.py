"""Answers taken from a master: whole, edited, as text."""

from pathlib import Path
from textwrap import dedent

import pytest

from course.kit import answers, course

MASTER = dedent("""
    # %%
    import math
    SCALE = 10

    # %%
    def shrink(x):
        # BEGIN SOLUTION
        return x / SCALE
        # END SOLUTION

    shrink = check("shrink", shrink)

    # %%
    def root(x):
        # BEGIN SOLUTION
        y = shrink(x)

        return math.sqrt(y)
        # END SOLUTION

    root = check("root", root)
""")


@pytest.fixture
def lab(tmp_path, monkeypatch):
    folder = tmp_path / "lab90_demo"
    folder.mkdir()
    (folder / "notebook.py").write_text(MASTER)
    monkeypatch.setattr(course, "masters", lambda root: {"90_demo": folder / "notebook.py"})
    for cached in (answers.answers_of, answers.answer_to, answers.answer_text):
        cached.cache_clear()
    yield "90_demo"
    for cached in (answers.answers_of, answers.answer_to, answers.answer_text):
        cached.cache_clear()


def test_an_edit_changes_one_answer_and_no_other(lab):
    changed = answers.changed_answer("root", lab, {"math.sqrt": "math.exp", "y = shrink(x)": "y = shrink(x) - 4"})
    assert changed(40) == 1
    assert answers.answer_to("root", lab)(40) == 2
    assert answers.changed_answer("shrink", lab, {"/ SCALE": "* SCALE"})(4) == 40


@pytest.mark.parametrize(("old", "times"), [("cosine", 0), ("SCALE", 0), ("x", 2)])
def test_an_edit_needs_a_text_that_stands_once_in_the_exercises_cell(lab, old, times):
    with pytest.raises(ValueError, match=f"'{old}' stands {times} times in the cell"):
        answers.changed_answer("root", lab, {old: "y"})


def test_a_traceback_of_an_edited_answer_names_its_line_in_the_master(lab):
    changed = answers.changed_answer("root", lab, {"math.sqrt(y)": "math.sqrt(-y)"})
    with pytest.raises(ValueError) as caught:
        changed(1)
    frame = caught.traceback[-1]
    assert Path(frame.path).name == "notebook.py (edited)"
    assert "math.sqrt(y)" in MASTER.splitlines()[frame.lineno]


def test_the_text_of_an_answer_is_what_stands_between_the_marks(lab):
    assert answers.answer_text("root", lab) == "y = shrink(x)\n\nreturn math.sqrt(y)"
