"""A sample of the attack, by the day's seed: `make full` tries a few candidates, `make mutants` all of them.

At most one candidate in a hundred may slip through, the aim of the whole attack. More than LUCK of a sample of 54 are
then luck on two days of a hundred, and fail; fewer are warned of, to be mended or entered in the table.
"""

import os
import random
import warnings

import pytest

from course.kit import exercises
from tests.course.attack import runner, table

EXERCISES, EACH, LUCK = 6, 9, 2


@pytest.mark.full
@pytest.mark.drawn(1)
def test_of_the_sample_of_the_day_hardly_any_survives_without_a_reason():
    draw = random.Random(int(os.environ["MINILLM_SEED"]))
    known = [each.name for each in exercises.all_exercises()]
    entries, wrong = table.read(), []
    with runner.Worker() as worker:
        for exercise in draw.sample(known, EXERCISES):
            seed = draw.randrange(10**6)
            found, seconds = runner.candidates(exercise, worker, seed)
            for candidate in draw.sample(found, min(EACH, len(found))):
                verdict = runner.verdict_on(candidate, seed, runner.limit_s(seconds), worker)
                if not verdict.right and not table.excused(entries, verdict.kind, verdict.key):
                    wrong.append(f"{exercise}: {verdict.kind} {verdict.edit}: {verdict.status} {verdict.message}")
    for each in wrong:
        warnings.warn(each, stacklevel=1)
    assert len(wrong) <= LUCK, "\n".join(wrong)
