"""Lab 23: every statement is decided by rows that can fail, and a ballot says who was right."""

import re

import pytest

from course.kit import course
from course.kit.receipts import row
from course.lab23_claims import receipts
from course.lab23_claims.receipts import STATEMENTS
from course.shared.statement import VERDICTS


@pytest.mark.parametrize("key", STATEMENTS)
def test_a_statement_is_whole_and_its_rows_hold(key):
    its = STATEMENTS[key]
    assert its.because and its.flips and "https://" in its.source and its.text.endswith(".")
    verdicts = [found.verdict for found in its.run()]
    assert "ok" in verdicts and "off" not in verdicts, "something must decide it"


def test_there_are_enough_and_all_verdicts_occur():
    assert len(STATEMENTS) >= 40
    assert {its.verdict for its in STATEMENTS.values()} == set(VERDICTS)


def test_a_ballot_counts_and_refuses_what_is_no_vote():
    key = next(iter(STATEMENTS))
    right = receipts.decide({key: STATEMENTS[key].verdict})
    assert right.right == 1 and "1 of 1 right" in repr(right) and "✓" in right._repr_markdown_()
    wrong = next(verdict for verdict in VERDICTS if verdict != STATEMENTS[key].verdict)
    assert receipts.decide({key: wrong}).right == 0
    with pytest.raises(ValueError, match="maybe"):
        receipts.decide({key: "maybe"})
    with pytest.raises(ValueError, match="no_such"):
        receipts.decide({"no_such": "true"})


def test_the_notebook_asks_for_a_vote_on_every_statement():
    text = (course.home() / "course/lab23_claims/notebook.py").read_text()
    assert "Ninety-nine statements" in text and len(STATEMENTS) == 99
    assert sorted(re.findall(r'^    "(\w+)": "depends",$', text, re.MULTILINE)) == sorted(STATEMENTS)
    listed = set(re.findall(r'"([\w ]+)"', " ".join(re.findall(r"receipts\.statements\((.*)\)", text))))
    assert listed == {its.topic for its in STATEMENTS.values()}


@pytest.mark.parametrize("verdict", VERDICTS)
def test_no_verdict_wins_by_being_repeated(verdict):
    share = sum(its.verdict == verdict for its in STATEMENTS.values()) / len(STATEMENTS)
    assert 0.2 <= share <= 0.5


@pytest.mark.parametrize("key", STATEMENTS)
def test_every_row_that_decides_can_fail(key):
    """The opposite of what it found, or a number half as large again, is off: no tolerance swallows the verdict."""
    widest = 0.2  # of any claim's row
    for its in STATEMENTS[key].run():
        if its.verdict == "ok":
            assert row(its.name, its.predicted, turned(its.measured), its.unit, widest).verdict == "off", its.name


def turned(found):
    if isinstance(found, bool):
        return not found
    if isinstance(found, int | float):
        return 1.5 * found + 1
    return [turned(each) for each in found]
