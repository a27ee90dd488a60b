"""Every number on every card: given by its question, computed a second time, or a fact with its source.

A number that is none of these fails and is named, so that a new card cannot bring one unchecked.
"""

import math
from collections.abc import Iterator, Mapping

import card_tables_serving
import card_tables_systems
import card_tables_training
import pytest
from card_formulas import FORMULAS
from card_numbers import Said, Worked, equal, near, parts
from card_words import IN_WORDS, WORD

from course.lab24_interview import deck

TABLES = (card_tables_training, card_tables_serving, card_tables_systems)
WORKED = {start: worked for table in TABLES for start, worked in table.WORKED.items()}
NAMED = [table for module in TABLES for table in (module.COUNTS, getattr(module, "FACTS", {}))]
NOTHING = Worked(())


def of_card(table: Mapping, question: str) -> list:
    return [entry for start, entry in table.items() if question.startswith(start)]


def kind(said: Said, given: tuple[float, ...], worked: Worked, named: list[float]) -> str:
    """Where the number comes from; "" for nowhere."""
    if any(near(said, result) for result in worked.results):
        return "computed again"
    if any(equal(said, value) for value in (*given, *worked.chosen)):
        return "given"
    return "a fact or a count" if any(equal(said, value) for value in named) else ""


def sources(question: str) -> tuple[Worked, list[float]]:
    worked = of_card(WORKED, question)
    assert len(worked) <= 1, f"{question}: two entries"
    return (worked or [NOTHING])[0], [value for table in NAMED for entry in of_card(table, question) for value in entry]


def every_number() -> Iterator[tuple[str, str, Said, str]]:
    """(question, text, number, kind) of all cards."""
    for question, texts in parts().items():
        worked, named = sources(question)
        for part in texts:
            for said in part.numbers(FORMULAS):
                yield question, part.text, said, kind(said, part.given, worked, named)


def test_every_number_has_its_origin():
    lost = [f"{said.text} in {text!r} of {question!r}" for question, text, said, origin in every_number() if not origin]
    assert not lost, "\n".join(lost)


@pytest.mark.parametrize("start", WORKED)
def test_a_card_says_what_another_computation_gives(start):
    questions = [question for question in parts() if question.startswith(start)]
    assert len(questions) == 1, f"{start}: {len(questions)} cards"
    said = [number for part in parts()[questions[0]] for number in part.numbers(FORMULAS)]
    text = " ".join(part.text for part in parts()[questions[0]])
    for expected in WORKED[start].results:
        assert any(near(number, expected) for number in said), f"{expected:.6g} is not in {text!r}"
    for expected in WORKED[start].chosen:
        assert any(equal(number, expected) for number in said), f"{expected:.6g} is not in {text!r}"


def test_what_is_listed_is_said():
    for table in NAMED:
        for start, entries in table.items():
            questions = [question for question in parts() if question.startswith(start)]
            assert len(questions) == 1, start
            said = [number for part in parts()[questions[0]] for number in part.numbers(FORMULAS)]
            missing = [value for value in entries if not any(equal(number, value) for number in said)]
            assert not missing and all(entries.values()), f"{start}: {missing}"


def test_a_number_that_is_7_per_cent_off_is_found():
    """What was computed again would be refused with another value."""
    missed = []
    for question, texts in parts().items():
        worked, named = sources(question)
        for part in texts:
            for said in part.numbers(FORMULAS):
                if said.value and kind(said, part.given, worked, named) == "computed again":
                    wrong = Said(said.text, 1.07 * said.value, said.step)
                    missed += [f"{said.text}: {part.text}"] if kind(wrong, part.given, worked, named) else []
    assert not missed, "\n".join(missed)


@pytest.mark.parametrize("formula", FORMULAS)
def test_a_printed_formula_gives_what_counting_gives(formula):
    assert any(formula in part.text + part.question for texts in parts().values() for part in texts), (
        "no card prints it"
    )
    for printed, counted in FORMULAS[formula]:
        assert math.isclose(printed, counted, rel_tol=0.01), f"{formula}: {printed:.6g} against {counted:.6g}"


def test_those_are_all_that_compute():
    kinds = [origin for *_, origin in every_number()]
    assert kinds.count("computed again") >= 250 and len(WORKED) >= 110


def test_every_share_in_words_has_its_entry():
    lost = []
    for question, texts in parts().items():
        phrases = [phrase for entry in of_card(IN_WORDS, question) for phrase in entry]
        for part in texts:
            text = part.text
            for phrase in phrases:
                text = text.replace(phrase, "∎")
            lost += [f"{word} in {part.text!r} of {question!r}" for word in WORD.findall(text)]
    assert not lost, "\n".join(lost)


@pytest.mark.parametrize("start", IN_WORDS)
def test_a_share_in_words_is_what_another_computation_gives(start):
    texts = [part.text for question, texts in parts().items() if question.startswith(start) for part in texts]
    for phrase, entry in IN_WORDS[start].items():
        assert any(phrase in text for text in texts), f"{phrase!r} is not said"
        assert isinstance(entry, str) or entry[0] == pytest.approx(entry[1], rel=0.03), phrase


def test_every_card_is_followed_up_twice():
    for card in deck.deck():
        questions, replies = zip(*card.next_asked, strict=True)
        assert len(set(questions)) == len(questions) >= 2 and len(set(replies)) == len(replies), card.question
        assert all(question.endswith(("?", ".")) for question in questions), card.question
        assert all(reply.endswith((".", "?")) for reply in replies), card.question
