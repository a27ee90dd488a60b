"""The harness itself, on a fixture lab: it accepts a good one and catches each way a lab can be wrong."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from course.kit import exercises, masters
from tests.course.exercises import harness

FIXTURE = Path(__file__).parent / "fixture"


@pytest.fixture
def fixture_lab(tmp_path, monkeypatch):
    """A copy of the fixture's master, its exercises registered and nobody else's."""
    monkeypatch.setattr(exercises, "_exercises", {})
    monkeypatch.setattr(exercises, "_answers", {})
    monkeypatch.setattr(exercises, "_modules", lambda kind, lab="": [])
    monkeypatch.syspath_prepend(str(FIXTURE))
    sys.modules.pop("fixture_exercises", None)
    __import__("fixture_exercises")
    (tmp_path / "lab90_fixture").mkdir()
    return Path(shutil.copy(FIXTURE / "course" / "lab90_fixture" / "notebook.py", tmp_path / "lab90_fixture"))


@pytest.fixture
def scratch(tmp_path):
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


def edit(master: Path, old: str, new: str) -> None:
    text = master.read_text()
    assert old in text
    master.write_text(text.replace(old, new))


def test_good_lab_passes(fixture_lab, scratch):
    harness.check_unsolved(fixture_lab, scratch)
    harness.check_rebound(fixture_lab)
    for name in ("fixture-total", "fixture-mean"):
        harness.check_alone(fixture_lab, name, scratch)
    harness.check_counts("90_fixture", exercises.all_exercises(), exercises.answers())


def test_good_answers_pass(fixture_lab):
    for answer in exercises.answers():
        (harness.check_mistake if answer.wrong else harness.check_alternative)(answer)


def test_answer_left_in_the_lab_is_caught(fixture_lab, scratch):
    edit(fixture_lab, "    # BEGIN SOLUTION\n    result = 0", "    result = 0")
    edit(fixture_lab, "    return result\n    # END SOLUTION", "    return result")
    with pytest.raises(AssertionError, match=r"nothing is solved.*'fixture-total': 'passed'"):
        harness.check_unsolved(fixture_lab, scratch)


def test_stub_that_returns_a_value_is_caught(fixture_lab, scratch):
    edit(fixture_lab, "    # BEGIN SOLUTION\n    result = 0", "    return 0\n    # BEGIN SOLUTION\n    result = 0")
    with pytest.raises(AssertionError, match=r"nothing is solved.*\{'fixture-total': 'failed'\}"):
        harness.check_unsolved(fixture_lab, scratch)


@pytest.mark.parametrize("stops", [ValueError("no stub expected"), exercises.CheckFailed("no answer"), SystemExit(1)])
def test_check_that_raises_on_the_stub_is_caught(fixture_lab, scratch, stops):
    def verify(candidate):
        raise stops

    exercises._exercises["fixture-mean"] = replace(exercises.find("fixture-mean"), verify=verify)
    caught, said = (SystemExit, None) if isinstance(stops, SystemExit) else (AssertionError, "'fixture-mean': 'failed'")
    with pytest.raises(caught, match=said):
        harness.check_unsolved(fixture_lab, scratch)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('total = check("fixture-total", total)', 'check("fixture-total", total)', r"functions read \['total'\]"),
        (
            'total = check("fixture-total", total)',
            'total = check("fixture-total", total) if shown else None',
            r"functions read \['total'\]",
        ),
        (
            'total = check("fixture-total", total)',
            'print(total([1]))\ntotal = check("fixture-total", total)',
            "before a",
        ),
        ("sliders(view, count=(1, 8))", "sliders(view, count=(1, last))", r"no cell .* binds \['last'\]"),
    ],
    ids=["not bound again", "bound again in some places", "called before its check", "bound in the solution alone"],
)
def test_cell_that_reads_what_is_unwritten_is_caught(fixture_lab, old, new, said):
    edit(fixture_lab, "sliders(view", "shown = True\nsliders(view")
    edit(fixture_lab, 'print("mean of 1 and 2:"', 'last = 8\nprint("mean of 1 and 2:"')
    edit(fixture_lab, old, new)
    with pytest.raises(AssertionError, match=said):
        harness.check_rebound(fixture_lab)


def test_check_in_some_places_alone_needs_no_reader(fixture_lab):
    """As where an exercise exists only with a library: later cells go without its answer."""
    edit(fixture_lab, 'mean = check("fixture-mean", mean)', 'mean = check("fixture-mean", mean) if bars else None')
    edit(fixture_lab, "mean(list(range(n)))", "n / 2")
    harness.check_rebound(fixture_lab)


def test_wrong_solution_is_caught(fixture_lab, scratch):
    edit(fixture_lab, "result = 0", "result = 1")
    with pytest.raises(AssertionError, match=r"only \['fixture-total'\] solved, yet what passes is \[\]"):
        harness.check_alone(fixture_lab, "fixture-total", scratch)


def test_exercise_that_needs_another_is_caught(fixture_lab, scratch):
    edit(fixture_lab, 'total = check("fixture-total", total)', 'check("fixture-total", total)')
    edit(fixture_lab, "show(view)", "")
    with pytest.raises(AssertionError, match=r"only \['fixture-mean'\] solved"):
        harness.check_alone(fixture_lab, "fixture-mean", scratch)


def test_lab_that_stops_when_half_solved_is_caught(fixture_lab, scratch):
    edit(fixture_lab, "mean = check(", "total([1])\n\nmean = check(")
    harness.check_half(fixture_lab, scratch)
    edit(fixture_lab, 'mean = check("fixture-mean", mean)', 'check("fixture-mean", mean)\nmean([1])')
    with pytest.raises(NotImplementedError):
        harness.check_half(fixture_lab, scratch)


def test_only_what_a_check_stands_on_is_run(fixture_lab):
    notebook = masters.lab(fixture_lab, solved=["fixture-mean"])
    run = [notebook.cells[index].source for index in sorted(harness.needed(notebook, ["fixture-mean"]))]
    assert len(run) == 4 and "import fixture_exercises" in run[0] and "fixture-mean" in run[-1]


def test_unchecked_exercise_is_caught(fixture_lab, scratch):
    edit(fixture_lab, 'mean = check("fixture-mean", mean)', "")
    with pytest.raises(AssertionError, match=r"registers \['fixture-mean'\] without checking"):
        harness.check_unsolved(fixture_lab, scratch)


def test_check_that_accepts_a_mistake_is_caught(fixture_lab):
    exercises.KnownAnswers("fixture-total").mistake("not-wrong", expect="anything")(sum)
    with pytest.raises(AssertionError, match="mistake 'not-wrong' of 'fixture-total' is not rejected"):
        harness.check_mistake(exercises.answers("fixture-total")[-1])


def test_message_that_does_not_fit_is_caught(fixture_lab):
    exercises.KnownAnswers("fixture-total").mistake("wrong-message", expect="deadlock")(lambda numbers: 0)
    with pytest.raises(AssertionError, match="which lacks 'deadlock'"):
        harness.check_mistake(exercises.answers("fixture-total")[-1])


def test_rejected_alternative_is_caught(fixture_lab):
    exercises.KnownAnswers("fixture-total").alternative("wrong")(lambda numbers: 0)
    with pytest.raises(AssertionError, match="alternative 'wrong'"):
        harness.check_alternative(exercises.answers("fixture-total")[-1])


def test_too_few_answers_are_caught(fixture_lab):
    answers = exercises.answers()
    with pytest.raises(AssertionError, match="'fixture-mean' has 2 mistakes"):
        harness.check_counts("90_fixture", exercises.all_exercises(), [a for a in answers if a.label != "no-division"])
    with pytest.raises(AssertionError, match="90_fixture has 1 alternatives"):
        harness.check_counts("90_fixture", exercises.all_exercises(), [a for a in answers if a.label != "loop"])
