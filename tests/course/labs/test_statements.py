"""Lab 23: every statement is decided by rows that can fail, and a ballot says who was right."""

import re
from functools import cache

import pytest

from course.kit import course
from course.kit.receipts import row
from course.lab23_claims import receipts
from course.lab23_claims.receipts import STATEMENTS
from course.shared.statement import VERDICTS


@cache
def rows_of(key):
    return STATEMENTS[key].run()


@pytest.mark.drawn(12)
@pytest.mark.parametrize("key", STATEMENTS)
def test_a_statement_is_whole_and_its_rows_hold(key):
    its = STATEMENTS[key]
    assert its.because and its.flips and "https://" in its.source and its.text.endswith(".")
    verdicts = [found.verdict for found in rows_of(key)]
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
    assert "A hundred and one statements" in text and len(STATEMENTS) == 101
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
    for its in rows_of(key):
        if its.verdict == "ok":
            assert row(its.name, its.predicted, turned(its.measured), its.unit, widest).verdict == "off", its.name


def turned(found):
    if isinstance(found, bool):
        return not found
    if isinstance(found, int | float):
        return 1.5 * found + 1
    return [turned(each) for each in found]


def test_answering_false_throughout_scores_at_most_half():
    for verdict in VERDICTS:
        assert receipts.decide(dict.fromkeys(STATEMENTS, verdict)).right <= len(STATEMENTS) / 2


def test_every_statement_has_a_source_with_its_place():
    """A name and a link; a paper of many pages with the section, where one section says it."""
    papers = [its.source for its in STATEMENTS.values() if "arxiv.org" in its.source]
    assert all(re.fullmatch(r"[^:]+: https://\S+", its.source) for its in STATEMENTS.values())
    placed = [source for source in papers if re.search(r", (section|table|appendix) [\d.A-Z]+:", source)]
    assert len(placed) >= 0.7 * len(papers)


@pytest.mark.parametrize("key", STATEMENTS)
def test_a_statement_turned_round_has_a_row_that_refutes_it(key):
    """Whoever claims the opposite claims other values in the rows that decide; what ran refutes each of them."""
    deciding = [found for found in rows_of(key) if found.verdict == "ok" and found.predicted is not None]
    assert deciding
    for found in deciding:
        claimed = turned(found.predicted)
        assert row(found.name, claimed, found.measured, found.unit, 0.2).verdict == "off", found.name
