"""Lab 23: every statement is decided by rows that can fail, and a ballot says who was right."""

import re

import pytest

from course.kit import course
from course.lab23_claims import receipts
from course.lab23_claims.receipts import STATEMENTS
from course.lab23_claims.statement import VERDICTS


@pytest.mark.parametrize("key", STATEMENTS)
def test_a_statement_is_whole_and_its_rows_hold(key):
    its = STATEMENTS[key]
    assert its.because and its.flips and "https://" in its.source and its.text.endswith(".")
    rows = its.run()
    assert any(row.verdict == "ok" for row in rows), "something must decide it"
    assert not [row for row in rows if row.verdict == "off"]


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
