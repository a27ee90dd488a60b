"""Every lab and every exercise of the course, held to the strict harness."""

import os
from pathlib import Path

import pytest

from course.commands import notebooks
from course.kit import course, exercises, masters
from tests.course.exercises import harness

ROOT = Path(__file__).parents[3]
MASTERS = course.masters(ROOT)
EXERCISES = {exercise.name: exercise for exercise in exercises.all_exercises()}
ANSWERS = {f"{answer.exercise}/{answer.label}": answer for answer in exercises.answers()}


PROOF = os.environ.get("MINILLM_PROOF") == "all"


def of_every_exercise(wrong: bool, most: int) -> list:
    """Names of its mistakes or alternatives: `make test` draws of the first `most`, `make full` of the others."""
    rare, found = [pytest.mark.full, pytest.mark.drawn(4)], []
    for name in EXERCISES:
        keys = [key for key, each in ANSWERS.items() if each.wrong == wrong and each.exercise == name]
        found += [pytest.param(key, marks=pytest.mark.drawn(6)) for key in keys[:most]]
        found += [pytest.param(key, marks=rare) for key in keys[most:]]
    return found


CHECKED = [
    (lab, name) for lab, path in MASTERS.items() for cell in masters.lab(path).cells for name in masters.checked(cell)
]


@pytest.mark.full
@pytest.mark.drawn(1)
def test_all_notebooks_are_what_their_masters_give_and_none_has_no_master():
    assert notebooks.stale(ROOT) == []


@pytest.mark.drawn(4)
@pytest.mark.parametrize("lab", MASTERS)
def test_unsolved_checks_find_nothing_attempted(lab, tmp_path):
    harness.check_unsolved(MASTERS[lab], tmp_path)


@pytest.mark.parametrize("lab", MASTERS)
def test_what_is_unwritten_is_replaced_before_it_is_read(lab):
    harness.check_rebound(MASTERS[lab])


@pytest.mark.skipif(not PROOF, reason="some minutes; MINILLM_PROOF=all runs it")
@pytest.mark.parametrize("lab", MASTERS)
def test_half_solved_lab_runs(lab, tmp_path):
    harness.check_half(MASTERS[lab], tmp_path)


@pytest.mark.drawn(6)
@pytest.mark.parametrize(("lab", "name"), CHECKED)
def test_exercise_passes_alone(lab, name, tmp_path):
    harness.check_alone(MASTERS[lab], name, tmp_path)


@pytest.mark.parametrize("lab", sorted({exercise.lab for exercise in EXERCISES.values()}))
def test_enough_mistakes_and_alternatives(lab):
    harness.check_counts(lab, EXERCISES.values(), ANSWERS.values())


@pytest.mark.parametrize("key", of_every_exercise(wrong=True, most=1))
def test_mistake_is_rejected_with_its_sentence(key):
    harness.check_mistake(ANSWERS[key])


@pytest.mark.parametrize("key", of_every_exercise(wrong=False, most=1))
def test_alternative_is_accepted(key):
    harness.check_alternative(ANSWERS[key])
