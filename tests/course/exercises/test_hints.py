"""`hint("...")` works in every lab as its cards print it."""

import contextlib
from pathlib import Path

import pytest

from course.kit import card, checks, course, exercises, masters, progress
from tests.course.exercises import harness

ROOT = Path(__file__).parents[3]
MASTERS = course.masters(ROOT)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("lab", MASTERS)
def test_the_call_that_a_card_prints_opens_the_hint(lab, monkeypatch, tmp_path, capsys):
    """Only the lab's first code cell has been run: what it imports is all that a learner has by then."""
    monkeypatch.setenv("MINILLM_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.delenv("MINILLM_STRICT", raising=False)
    first = next(cell for cell in masters.lab(MASTERS[lab]).cells if cell.cell_type == "code")
    with contextlib.chdir(MASTERS[lab].parent), harness._as_main() as namespace:
        harness._execute(first.source, f"<{lab}, first cell>", namespace)
        for exercise in exercises.all_exercises(lab):
            capsys.readouterr()
            checks.check(exercise.name, None)
            [call] = [line.split("? ")[1].split(" opens")[0] for line in lines(capsys) if "Stuck?" in line]
            assert call == f'hint("{exercise.name}")'
            eval(call, namespace)
            assert f"Hint 1 of 3: {exercise.hints[0].splitlines()[0]}" in capsys.readouterr().out
            assert progress.load()[exercise.name].hints == 1


def lines(capsys) -> list[str]:
    assert not card.in_notebook()
    return capsys.readouterr().out.splitlines()
