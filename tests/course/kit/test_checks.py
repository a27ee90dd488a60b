import math
import random

import pytest
import torch

from course.kit import (
    CheckFailed,
    KnownAnswers,
    check,
    checks,
    exercise,
    exercises,
    finish,
    hint,
    progress,
    receipt,
    row,
)
from course.kit.blame import summary
from course.kit.card import Card
from course.kit.evidence import same
from minillm.comm import launch

HINTS = ["a nudge", "a bigger nudge", "the plan"]


def reference(x):
    return 2 * x


@pytest.fixture
def double():
    @exercise("double-it", reference=reference, hints=HINTS, minutes=4, lab="90_demo")
    def verify(candidate):
        if candidate(1) is None:
            raise CheckFailed("nothing came back", [row("evidence", 1, 2)])
        return receipt("doubling", [row("twice 3", 6, candidate(3))])


def test_passing_answer_comes_back_with_its_receipt(double, capsys):
    def mine(x):
        return x + x

    assert check("double-it", mine) is mine
    out = capsys.readouterr().out
    assert "double-it: passed" in out and "twice 3" in out and "ok" in out
    assert progress.load()["double-it"] == progress.Entry("90_demo", True, "passed", 1, 0)


@pytest.mark.parametrize(("asked", "open_rows"), [({}, checks.PASSED_ROWS), ({"open_rows": 2}, 2)])
def test_a_passed_check_folds_its_rows_unless_the_verifier_keeps_them_open(asked, open_rows):
    found = receipt("", [row(name, 1, 1) for name in "abcd"], **asked)
    assert [each.name for each in checks._as_receipt(None, found).open] == list("abcd")[:open_rows]


def test_wrong_answer_gives_reason_hint_and_reference(double, capsys):
    assert check("double-it", lambda x: 3 * x) is reference
    out = capsys.readouterr().out
    assert "not passed yet" in out and "twice 3: measured 9, predicted 6" in out
    assert "a nudge" not in out and 'hint("double-it") opens a hint' in out
    assert "Until yours passes, the cells below use the course's own version" in out


def test_evidence_is_shown_with_the_complaint(double, capsys):
    check("double-it", lambda x: None)
    out = capsys.readouterr().out
    assert "nothing came back" in out and "evidence" in out and "off" in out


def test_failures_and_exceptions_spend_no_hint(double, capsys):
    for _ in range(4):
        check("double-it", lambda x: 0)
        check("double-it", lambda x: nothing)  # noqa: F821
    assert progress.load()["double-it"] == progress.Entry("90_demo", False, "failed", 8, 0)
    assert "a nudge" not in capsys.readouterr().out
    for level in (1, 2, 3, 3):
        hint("double-it")
        assert f"Hint {level} of 3" in capsys.readouterr().out
    hint("double-it")
    assert "solutions/90_demo.ipynb" in capsys.readouterr().out


def test_a_second_press_does_not_pass_the_courses_own_version(double, capsys):
    def untouched(x):
        raise NotImplementedError

    mine = check("double-it", untouched)
    for _ in range(3):
        mine = check("double-it", mine)
    out = capsys.readouterr().out
    assert "double-it: passed" not in out and "run the cell that defines yours" in out
    assert not progress.load()["double-it"].passed and progress.load()["double-it"].attempts == 0


def test_a_second_press_with_a_pair():
    exercise("a-pair", reference=(reference, abs), hints=HINTS, minutes=1, lab="90_demo")(
        lambda pair: [row("twice 3", 6, pair[0](3))]
    )
    one, two = check("a-pair", (None, abs))
    one, two = check("a-pair", (one, two))
    assert not progress.load()["a-pair"].passed
    check("a-pair", (lambda x: 2 * x, two))
    assert progress.load()["a-pair"].passed


def test_the_card_says_how_far_the_lab_is_and_finish_sums_up(double, capsys):
    for name in ("another-one", "third-one"):
        exercise(name, reference=abs, hints=HINTS, minutes=5, lab="90_demo")(lambda f: [row("x", 1, f(1))])
    check("double-it", lambda x: x + x)
    assert "double-it: passed (1 of 3 in lab 90)" in capsys.readouterr().out
    check("another-one", lambda x: 0)
    assert "another-one: not passed yet (1 of 3 in lab 90)" in capsys.readouterr().out
    finish("90_demo")
    assert capsys.readouterr().out.splitlines() == [
        "Lab 90: 1 of 3 exercises passed",
        "  passed: double-it",
        "  tried, not passed yet: another-one",
        "  open: third-one",
        '  Next: check("another-one", ...) in this notebook. About 10 minutes are left.',
    ]
    with pytest.raises(ValueError, match="lab '91_none' has no exercise"):
        finish("91_none")


def test_finish_keeps_the_notebooks_order_and_names_the_next_lab(capsys, monkeypatch):
    """The verifiers below stand in another order than the checks of lab 20's notebook; lab 21 comes after it."""
    names = ["loss", "budget", "fit"]
    monkeypatch.setattr(checks, "checked_by", lambda lab: ("fit", "budget", "loss"))
    for name in names:
        exercise(name, reference=abs, hints=HINTS, minutes=5, lab="20_design_training")(lambda f: [row("x", 1, f(1))])
    check("budget", lambda x: x)
    finish("20_design_training")
    lines = capsys.readouterr().out.splitlines()
    assert (
        "  open: fit, loss" in lines
        and '  Next: check("fit", ...) in this notebook. About 10 minutes are left.' in lines
    )
    for name in names:
        check(name, lambda x: x)
    finish("20_design_training")
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert lines == ["  passed: fit, budget, loss", "  Next: 21_design_serving.ipynb, in the same folder."]


def test_a_known_mistake_lends_its_sentence(capsys):
    @exercise("add-up", reference=sum, hints=HINTS, minutes=1, lab="90_demo")
    def verify(candidate):
        numbers = [random.randint(1, 10**6) for _ in range(5)]
        if (found := candidate(numbers)) != sum(numbers):
            raise CheckFailed(f"the sum is {sum(numbers)}", evidence=found)
        return [row("right", True, True)]

    KnownAnswers("add-up").mistake("drops the last", says="You left the last number out.")(
        lambda numbers: sum(numbers[:-1])
    )
    KnownAnswers("add-up").mistake("largest", says="You took the largest.")(max)
    check("add-up", lambda numbers: sum(numbers) - numbers[-1])
    out = capsys.readouterr().out
    assert "the sum is" in out and "You left the last number out." in out
    check("add-up", lambda numbers: sorted(numbers)[-1])
    assert "You took the largest." in capsys.readouterr().out
    check("add-up", lambda numbers: 1)
    assert "You " not in capsys.readouterr().out


def test_what_counts_as_the_same_evidence():
    assert same([1, (2.0, math.nan)], (1, [2.0000001, math.nan])) and same({"a": torch.ones(2)}, {"a": torch.ones(2)})
    assert not same(torch.ones(2), torch.ones(2, 1)) and not same([1, 2], [1]) and not same("a", "b")
    assert not same(1.0, 1.001) and not same(None, 0)


def test_hint_opens_the_next_level_or_the_asked_one(double, capsys):
    hint("double-it")
    hint("double-it")
    hint("double-it", level=1)
    out = capsys.readouterr().out
    assert out.index("Hint 1") < out.index("Hint 2") and out.count("Hint 1") == 2
    assert progress.load()["double-it"] == progress.Entry("90_demo", hints=2)
    with pytest.raises(ValueError, match=r"level=4 of hint\('double-it'\) must be from 1 to 3"):
        hint("double-it", level=4)


@pytest.mark.parametrize("candidate", [None, ..., "body"])
def test_unsolved_is_friendly_and_counts_as_no_attempt(double, capsys, candidate):
    def body(x):
        raise NotImplementedError

    assert check("double-it", body if candidate == "body" else candidate) is reference
    out = capsys.readouterr().out
    assert "not attempted yet" in out and "About 4 minutes" in out and "nudge" not in out and "Error" not in out
    assert progress.load()["double-it"] == progress.Entry("90_demo", False, "not attempted", 0, 0)


def test_not_implemented_from_elsewhere_is_an_error(double, capsys):
    def mine(x):
        return object.__new__(Refusing).go()

    class Refusing:
        def go(self):
            error = NotImplementedError("no kernel for int64")
            raise error

    check("double-it", mine)
    assert "it stopped with NotImplementedError: no kernel for int64" in capsys.readouterr().out


def test_error_names_the_learners_line(double, capsys):
    def mine(x):
        values = [1, 2]
        return sorted(values, key=lambda v: values[v + x])

    check("double-it", mine)
    out = capsys.readouterr().out
    assert "IndexError: list index out of range" in out
    assert "of <lambda>: return sorted(values, key=lambda v: values[v + x])" in out
    assert "course/kit" not in out and "Traceback" not in out


def test_error_in_the_check_itself_says_so(double, capsys, monkeypatch):
    class Odd:
        def __getattr__(self, name):
            raise RuntimeError("odd")

    verify = exercises.find("double-it").verify
    monkeypatch.setattr("course.kit.blame._is_theirs", lambda file: False)
    assert verify is not None
    check("double-it", lambda x: Odd().value)
    assert "raised where the check used what your code returned" in capsys.readouterr().out


def test_error_on_a_rank_names_rank_and_line(capsys):
    @exercise("on-ranks", reference=reference, hints=HINTS, minutes=1, lab="90_demo")
    def verify(candidate):
        return [row("rank 1", 1, launch(candidate, 2, timeout=20)[1])]

    def mine(group):
        if group.rank == 1:
            return [0, 1][7]
        return 0

    def todo(group):
        raise NotImplementedError

    check("on-ranks", mine)
    out = capsys.readouterr().out
    assert "it stopped with rank 1 of 2 raised IndexError: list index out of range" in out
    assert "of mine: return [0, 1][7]" in out and "Traceback" not in out
    check("on-ranks", todo)
    assert "not attempted yet" in capsys.readouterr().out
    check("on-ranks", lambda group: group.rank)
    assert "on-ranks: passed" in capsys.readouterr().out


def test_summary_of_a_remote_traceback_without_heading():
    assert summary(RuntimeError("Traceback (most recent call last)\n  File ...\nKeyError: 'x'\n")) == "KeyError: 'x'"
    assert summary(KeyError()) == "KeyError"


def added_up(x):
    return x + x


def test_strict_raises(double, monkeypatch):
    monkeypatch.setenv("MINILLM_STRICT", "1")
    with pytest.raises(CheckFailed, match="double-it: twice 3: measured 0, predicted 6"):
        check("double-it", lambda x: 0)
    with pytest.raises(CheckFailed, match="double-it: not attempted yet"):
        check("double-it", None)
    assert check("double-it", added_up) is added_up


def test_interrupt_is_not_swallowed(double):
    def mine(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check("double-it", mine)


def test_failing_again_keeps_what_was_earned(double):
    check("double-it", added_up)
    check("double-it", lambda x: 0)
    entry = progress.load()["double-it"]
    assert entry.passed and entry.last == "failed" and entry.attempts == 2


@pytest.mark.parametrize(
    ("returned", "message"),
    [(None, "must return a Receipt"), ([row("x", None, 1)], "compared nothing"), ([], "nothing")],
)
def test_verifier_that_checks_nothing_is_refused(returned, message):
    exercise("hollow", reference=reference, hints=HINTS, minutes=1, lab="90_demo")(lambda candidate: returned)
    with pytest.raises(TypeError, match=message):
        check("hollow", added_up)


def test_values_too_close_to_tell_apart_are_shown_in_full():
    exercise("close", reference=1, hints=HINTS, minutes=1, lab="90_demo")(lambda value: [row("x", 1.5, value)])
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(CheckFailed, match=r"measured 1\.5000001, predicted 1\.5"),
    ):
        patch.setenv("MINILLM_STRICT", "1")
        check("close", 1.5000001)


def test_unknown_exercise_names_the_nearest(double):
    with pytest.raises(ValueError, match="no exercise is called 'duoble-it'; did you mean 'double-it'"):
        check("duoble-it", reference)


def test_registration_refuses_bad_input(double):
    def register(name="fine", **changes):
        options = {"reference": 1, "hints": HINTS, "minutes": 1, "lab": "90_demo"} | changes
        exercise(name, **options)(lambda candidate: [])

    for name, changes, message in [
        ("Not Fine", {}, "lower-case words joined by hyphens"),
        ("fine", {"lab": "demo"}, "must read NN_topic"),
        ("fine", {"hints": ["one"]}, "has 1 hints; give two"),
        ("fine", {"minutes": 0}, "minutes of 1 or more"),
        ("fine", {"difficulty": 6}, "difficulty from 1 to 5"),
    ]:
        with pytest.raises(ValueError, match=message):
            register(name, **changes)

    def elsewhere(candidate):
        return []

    elsewhere.__module__ = "another.lab"
    with pytest.raises(ValueError, match="'double-it' is already registered in"):
        exercise("double-it", reference=1, hints=HINTS, minutes=1, lab="90_demo")(elsewhere)


def test_answers_are_kept_by_exercise(double):
    KnownAnswers("double-it").mistake("triples", expect="measured 9")(lambda x: 3 * x)
    KnownAnswers("double-it").alternative("shift")(lambda x: x << 1)
    assert [(answer.label, answer.expect) for answer in exercises.answers("double-it")] == [
        ("triples", "measured 9"),
        ("shift", ""),
    ]
    for vague in ({}, {"says": "a", "expect": "a"}):
        with pytest.raises(ValueError, match=r"needs says=.* or expect="):
            KnownAnswers("double-it").mistake("vague", **vague)


def test_lab_modules_are_imported_when_asked_for(tmp_path, monkeypatch):
    package = tmp_path / "labs_for_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    template = (
        "from course.kit import exercise, row\n"
        "exercise('{0}', reference=1, hints='abc', minutes=1, lab='{1}')(lambda c: [row('x', 1, c)])\n"
    )
    (package / "lab_91.py").write_text(template.format("ninety-one", "91_a"))
    (package / "lab_92.py").write_text(template.format("ninety-two", "92_b"))
    monkeypatch.syspath_prepend(str(tmp_path))
    found = ["labs_for_test.lab_91", "labs_for_test.lab_92"]
    monkeypatch.setattr(exercises, "_modules", lambda kind, lab="": found)
    monkeypatch.setattr(exercises, "_mentions", lambda module, name: module.endswith("92") and name == "ninety-two")
    assert exercises.find("ninety-two").lab == "92_b"
    assert "ninety-one" not in exercises._exercises
    assert [e.name for e in exercises.all_exercises()] == ["ninety-one", "ninety-two"]


def test_card_is_rich_text_without_raw_markup():
    html = Card("a: passed", "3 of 7", receipt("", [row("n", 1, 1)]), ("<i>", "two\nlines"), "note")._repr_html_()
    assert "&lt;i&gt;" in html and "<pre" in html and "<table" in html and "<i>note</i>" in html and "3 of 7" in html
