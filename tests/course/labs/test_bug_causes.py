"""Every bug of the debugging rounds has a cause in a whole sentence, and causes.toml lists no other."""

import pytest

from course.kit import exercises
from course.lab24_interview import bugs, tasks

BUGS = [name for exercise in tasks.TASKS for name in bugs.of_exercise(exercise)]


@pytest.mark.parametrize("exercise", sorted({name.partition("/")[0] for name in BUGS}))
def test_a_bug_has_a_cause_in_a_sentence(exercise):
    causes = {name: bugs.bug(name).cause for name in BUGS if name.startswith(f"{exercise}/")}
    short = {name: cause for name, cause in causes.items() if len(cause.split()) < 4 or not cause.endswith((".", "?"))}
    assert not short


def test_the_table_holds_bugs_that_need_it():
    for exercise, causes in bugs._causes().items():
        if exercise not in tasks.TASKS:
            continue
        shown = {answer.label: answer for answer in exercises.answers(exercise) if bugs._is_shown(answer)}
        for label, cause in causes.items():
            assert label in shown, f"{exercise}/{label}"
            assert len(cause.split()) >= 6 and cause.endswith("."), cause


def test_there_are_many():
    assert len(BUGS) >= 250
