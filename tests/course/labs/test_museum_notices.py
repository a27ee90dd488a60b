"""Which of minillm's checks notices which fault of the museum: the table that the lab shows is what is found here."""

import pytest

from course.lab22_bug_museum import notices
from course.lab22_bug_museum.museum import EXHIBITS
from tests.course.labs.museum_notices import found

QUICK = ("nobody-asked", "secret-is-out", "slower-every-day", "noon-and-night")
SERVING = [name for name, its in EXHIBITS.items() if its.kind == "serving"]
TRAINING = [name for name, its in EXHIBITS.items() if its.kind == "training"]


def test_the_table_has_every_exhibit():
    assert set(notices.load()) == set(EXHIBITS)
    for kind, checks in (("training", notices.TRAINING), ("serving", notices.SERVING)):
        shown = notices.notices(kind)
        assert shown.columns == ("exhibit", *checks)
        assert [cells[0] for cells in shown.rows] == [name for name, its in EXHIBITS.items() if its.kind == kind]


def test_every_fault_is_noticed_and_what_is_none_is_not_called_wrong():
    assert [name for name in notices.unnoticed() if not EXHIBITS[name].innocent] == []
    for name, its in EXHIBITS.items():
        if its.innocent:
            seen = notices.load()[name]
            assert not any(seen.get(check) for check in ("oracle", "naive loop", "distribution", "errors")), name


def test_every_check_that_has_a_column_notices_something_or_is_explained():
    table = notices.load()
    silent = [
        check for check in (*notices.TRAINING, *notices.SERVING) if not any(its.get(check) for its in table.values())
    ]
    assert silent == list(notices.SILENT)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.full) for n in SERVING])
def test_serving_row_is_found_again(name):
    assert found([name]) == {name: notices.load()[name]}


@pytest.mark.full
@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", TRAINING)
def test_training_row_is_found_again(name):
    assert found([name]) == {name: notices.load()[name]}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.full) for n in SERVING])
def test_sound_engine_is_noticed_by_nothing(name):
    assert not any(notices.of_serving(EXHIBITS[name].run((), 3)).values())
