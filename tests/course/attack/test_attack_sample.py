"""A sample of the attack, by the day's seed: `make full` tries a few candidates, `make mutants` all of them."""

import os
import random

import pytest

from course.kit import exercises
from tests.course.attack import runner, table

EXERCISES, EACH = 6, 9


@pytest.mark.full
def test_sample_of_the_day_has_no_survivor_without_a_reason():
    draw = random.Random(int(os.environ["MINILLM_SEED"]))
    known = [each.name for each in exercises.all_exercises()]
    entries, wrong = table.read(), []
    with runner.Worker() as worker:
        for exercise in draw.sample(known, EXERCISES):
            found, seconds = runner.candidates(exercise, worker)
            for candidate in draw.sample(found, min(EACH, len(found))):
                verdict = runner.verdict_on(candidate, draw.randrange(10**6), runner.limit_s(seconds), worker)
                if not verdict.right and not table.excused(entries, verdict.kind, verdict.key):
                    wrong.append(f"{exercise}: {verdict.kind} {verdict.edit}: {verdict.status} {verdict.message}")
    assert not wrong, "\n".join(wrong)
